"""Reading, changing and validating recipes before data or models are loaded."""

from __future__ import annotations

import dataclasses
import doctest
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_federated import FederatedConfig, IidPartitioner
from hf_federated.cli.field_help import recipe_help, section_names
from hf_federated.cli.main import COMMANDS, build_parser, main
from hf_federated.experiments.recipe import recipe as recipe_module
from hf_federated.experiments.recipe.fields import check_names, named_section_fields, section_fields
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError, type_name
from hf_federated.experiments.recipe.sections import DataSection, ModelSection
from hf_federated.experiments.recipe.yaml_file import apply_changes, read_values
from hf_federated.utils.fields import check_of


MINIMAL = "model: {name_or_path: m}\ndata: {path: d}\npartition: {name: iid, num_clients: 4}\n"


def load(folder: Path, text: str, *overrides: str):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def test_minimal_recipe_has_defaults(tmp_path):
    recipe = load(tmp_path, MINIMAL)
    assert recipe.model == ModelSection("m")
    assert recipe.data == DataSection("d")
    assert (recipe.task.name, recipe.task.arguments) == ("text-classification", {})
    assert (recipe.partition.cls, recipe.partition.arguments) == (IidPartitioner, {"num_clients": 4})
    assert (recipe.training, recipe.federation, recipe.compare, recipe.plots) == ({}, {}, [], False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("1E3", 1000.0), ("-.5", -0.5), ("1.", 1.0), ("10", 10), ("1.5.2", "1.5.2"), ("e4", "e4")],
)
def test_numbers_are_read_as_in_yaml_1_2(tmp_path, text, value):
    recipe = load(tmp_path, MINIMAL + f"card: {{tags: {text}}}")
    assert recipe.card["tags"] == value and type(recipe.card["tags"]) is type(value)


def test_no_is_a_string_and_false_is_a_boolean(tmp_path):
    recipe = load(tmp_path, MINIMAL + "training: {eval_strategy: no, bf16: false}")
    assert recipe.training == {"eval_strategy": "no", "bf16": False}


def test_overrides_replace_and_add_fields_and_sections(tmp_path):
    recipe = load(
        tmp_path,
        MINIMAL,
        "data.path=other",
        "training.learning_rate=1e-3",
        "model.lora.r=4",
        "compare=[local]",
        "federation.aggregation_kwargs={weighting: uniform}",
    )
    assert recipe.data.path == "other"
    assert recipe.training == {"learning_rate": 0.001}
    assert recipe.model.lora == {"r": 4}
    assert recipe.compare == ["local"]
    assert recipe.federation == {"aggregation_kwargs": {"weighting": "uniform"}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["modle.task=x"], ["modle", "did you mean model"]),
        (["data.testsplit=x"], ["data.testsplit", "did you mean test_split", "train_split"]),
        (["training.learning_rte=1"], ["training.learning_rte", "did you mean learning_rate", "--help"]),
        (["training.learning_rate=fast"], ["training.learning_rate", "'fast'", "float"]),
        (["training.bf16=1"], ["training.bf16", "true | false"]),
        (["training.optim=adam"], ["training.optim", "'adam'", "adamw_torch"]),
        (["training.predict_with_generate=true"], ["training.predict_with_generate"]),
        (["federation.num_rounds=1.5"], ["federation.num_rounds", "1.5", "int or null"]),
        (["federation.num_rounds=true"], ["federation.num_rounds", "True", "int or null"]),
        (["compare=[federated]"], ["compare", "federated", "centralized | local"]),
        (["data.test_clients=1.5"], ["data.test_clients", "1.5", "share between 0 and 1"]),
        (["data.test_clients=-1"], ["data.test_clients is -1", "0 to hold out no client"]),
        (["data.test_examples=1"], ["data.test_examples is 1", "below 1"]),
        (["data.test_clients=2", "data.test_split=test"], ["test_split and test_clients are set"]),
        (["data.test_clients=2", "data.test_examples=0.1"], ["test_examples and test_clients are set"]),
        (["data.test_path=t.csv", "data.test_clients=2"], ["test_path and test_clients are set"]),
        (["data.test_path=t.csv", "data.test_examples=0.5"], ["test_path and test_examples are set"]),
        (["data.test_split=test", "data.test_examples=0.5"], ["test_split and test_examples are set"]),
        (["data.test_path=d"], ["data.test_path is d, which is also data.path"]),
        (["data.test_path=d", "data.test_split=train"], ["data.test_split is 'train', which is the training split"]),
        (["data.max_train_rows=0"], ["data.max_train_rows", "at least 1"]),
        (["task.name=regression"], ["task.name", "'regression'", "sequence-tagging"]),
        (["task=qa"], ["task.name", "'qa'", "question-answering"]),
        (["task.name=text-clasification"], ["did you mean text-classification?", "sequence-tagging"]),
        (["lr=1"], ["lr is not a field of a recipe. Allowed: model, data"]),
        (["task.max_length=0", "task.label_names=[a, b]"], ["task", "max_length", "at least 1"]),
        (["task.tokens_column=words"], ["task.tokens_column", "text_column"]),
        (["task={name: question-answering, max_length: 9, stride: 9}"], ["task", "max_length", "at least 10"]),
        (
            ["task.name=superglue-seq2seq", "training.predict_with_generate=false"],
            ["predict_with_generate", "superglue-seq2seq"],
        ),
        (
            ["task.name=summarization", "model.decoder_name_or_path=a"],
            ["decoder_name_or_path is set, but the task is summarization", "sequence-to-sequence"],
        ),
        (["task={name: superglue-classification, label_names: [a]}"], ["task.label_names", "max_length"]),
        (["task={name: seq2seq, text_column: a}"], ["task.text_column", "source_column"]),
        (["partition.name=random"], ["partition.name", "'random'", "label-dirichlet"]),
        (["partition.alpha=1"], ["partition.alpha", "num_clients"]),
        (["partition.num_clients=0"], ["partition", "num_clients", "at least 1"]),
        (["partition.num_clients=two"], ["partition.num_clients", "'two'", "int"]),
        (["partition={name: label-dirichlet}"], ["partition.num_clients is missing"]),
        (["partition={name: feature-cluster, num_clients: 2, text_columns: a, embedder: 3}"], ["partition.embedder"]),
        (["model.decoder_name_or_path=m"], ["model.decoder_name_or_path", "seq2seq"]),
        (["scale=paper"], ["scale is 'paper'", "default"]),
        (["scales.paper.data.path=e"], ["scales"]),
        (["scale=[a]"], ["scale is ['a']", "name"]),
        (["federation.num_rounds=010"], ["federation.num_rounds", "'010'"]),
        (["federation.num_rounds=1:30"], ["federation.num_rounds", "'1:30'"]),
        (["local_clients=0"], ["local_clients", "at least 1"]),
        (["data=[1]"], ["data", "[1]", "mapping"]),
        (["data.path.deep=1"], ["data.path.deep=1", "path"]),
        (["data.path"], ["'data.path'", "section.field=value"]),
        (["data.path=[1"], ["data.path=[1", "not YAML"]),
        (["data.path=null"], ["data.path", "None", "str"]),
        (["training.lr=1e-3"], ["training.lr is not a field", "did you mean learning_rate?"]),
        (["training.batch_size=8"], ["training.batch_size", "did you mean per_device_train_batch_size?"]),
        (["training.epochs=3"], ["training.epochs", "did you mean num_train_epochs?"]),
        (["federation.epochs=3"], ["federation.epochs", "did you mean local_epochs?"]),
        (["federation.rounds=3"], ["federation.rounds", "did you mean num_rounds?"]),
        (["federation.algorithm=fedavg"], ["federation.algorithm", "did you mean aggregation or distillation?"]),
        (["model.model_name_or_path=m"], ["model.model_name_or_path", "did you mean name_or_path?"]),
        (["partition.clients=3"], ["partition.clients", "did you mean num_clients?"]),
        (["federation.aggregation=fedprx"], ["federation: `aggregation` is 'fedprx'; did you mean 'fedprox'?"]),
        (["federation.aggregation_kwargs={nu: 1}"], ["federation: Invalid `aggregation_kwargs`", "nu", "weighting"]),
        (["federation.exchange_codec=int9"], ["`exchange_codec` is 'int9'", "did you mean 'int8'?"]),
        (
            ["federation.exchange_codec=topk", "federation.exchange_codec_kwargs={share: 3}"],
            ["federation: `share` is 3", "at most 1"],
        ),
        (["federation.exchange_codec_kwargs={share: 0.1}"], ["federation: exchange_codec_kwargs=", "'int8'"]),
        (["federation.secure_aggregation=secag"], ["`secure_aggregation` is 'secag'", "did you mean 'secagg'?"]),
        (
            ["federation.secure_aggregation=secagg", "federation.secure_aggregation_kwargs={limit: 1}"],
            ["federation: Invalid `secure_aggregation_kwargs`", "limit", "max_weight"],
        ),
        (["federation.distillation=feddff"], ["federation: `distillation` is 'feddff'; did you mean 'feddf'?"]),
        (["split.head_blocks=-1"], ["split: head_blocks=-1"]),
    ],
)
def test_invalid_recipe_is_rejected_with_a_one_line_message(tmp_path, overrides, words):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def mistakes_of(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(folder, MINIMAL, *overrides)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the recipe has {len(lines) - 1} mistakes:"
    assert lines[1:] == [f"  - {mistake}" for mistake in caught.value.mistakes]
    return list(caught.value.mistakes)


def test_all_mistakes_of_a_recipe_are_listed_in_one_error(tmp_path):
    mistakes = mistakes_of(
        tmp_path,
        "modle.name_or_path=x",
        "model.name_or_path=null",
        "data.seed=-1",
        "data.max_clients=0",
        "task.max_length=long",
        "task.stride=3",
        "partition.num_clients=0",
        "training.lr=1e-3",
        "training.optim=adam",
        "federation.num_rounds=0",
        "federation.exchange=everything",
        "federation.aggregation=fedprx",
        "client_models=[{name_or_path: a}, {name: b}]",
        "local_clients=0",
        "public.share=much",
    )
    starts = [
        "task.max_length is 'long'",
        "task.stride is not a field",
        "partition: ",
        "modle is not a field of a recipe; did you mean model",
        "model.name_or_path is None",
        "training.lr is not a field of the section training; did you mean learning_rate",
        "training.optim is 'adam'",
        "public.share is 'much'",
        "client_models[1].name is not a field",
        "client_models[1].name_or_path is missing",
        "federation: `num_rounds` is 0",
        "federation: `exchange` is 'everything'",
        "federation: `aggregation` is 'fedprx'",
        "data.seed is -1",
        "data.max_clients is 0",
        "local_clients is 0",
    ]
    for start in starts:
        assert sum(mistake.startswith(start) for mistake in mistakes) == 1, (start, mistakes)
    assert len(mistakes) == len(starts)


def test_combinations_are_listed_with_the_mistakes_of_other_sections(tmp_path):
    mistakes = mistakes_of(
        tmp_path,
        "partition=null",
        "public.share=0.1",
        "task.name=seq2seq",
        "training.predict_with_generate=false",
        "training.lr=1",
        "local_clients=0",
    )
    starts = ("training.lr is not", "local_clients is 0", "public.share is set without partition")
    assert [mistake.startswith(start) for mistake, start in zip(mistakes, starts, strict=True)] == [True] * 3


@pytest.mark.parametrize("override", ["partition.num_clients=0", "partition.name=random", "partition=iid"])
def test_invalid_partition_is_not_reported_as_missing(tmp_path, override):
    mistakes = mistakes_of(tmp_path, override, "public.share=0.1", "training.lr=1")
    assert len(mistakes) == 2 and not any("without partition" in mistake for mistake in mistakes)


def test_unknown_task_is_the_only_mistake_about_the_task(tmp_path):
    mistakes = mistakes_of(tmp_path, "task.name=translation", "training.predict_with_generate=true", "training.lr=1")
    assert [mistake.split(" ")[0] for mistake in mistakes] == ["task.name", "training.lr"]


def test_combination_of_federation_fields_is_listed_with_invalid_fields(tmp_path):
    mistakes = mistakes_of(
        tmp_path, "split.strategy=client_batch", "split.steps_per_turn=3", "split.tail_blocks=0", "federation=null"
    )
    assert ["tail_blocks=0" in mistakes[0], "`steps_per_turn` applies to" in mistakes[1]] == [True, True]


def test_all_invalid_changes_of_the_command_line_are_listed(tmp_path):
    assert len(mistakes_of(tmp_path, "data.path", "=x", "training.seed=[")) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {path: d}", ["model.name_or_path is missing"]),
        (MINIMAL + "scales: [paper]", ["scales must be a mapping"]),
        (MINIMAL + "scales: {1: {}}", ["scales must be a mapping"]),
        ("[" * 2000, ["not YAML"]),
        ("model: !!int x", ["not YAML"]),
        ("- model", ["list", "mapping"]),
        ("model: !!bool maybe", ["not YAML"]),
        ("model: !!timestamp maybe", ["not YAML"]),
        ("model: " + "[" * 101 + "]" * 101, ["not YAML", "nested more than 100 levels deep"]),
        (
            "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(200)),
            ["not YAML", "nested more than 100 levels deep"],
        ),
        (
            "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}]\n" for n in range(20)),
            ["not YAML", "more than 200000 values"],
        ),
        ("model: [" + "1," * 200_000 + "]", ["not YAML", "more than 200000 values"]),
        ("#" * (16 * 1024**2 + 1), ["not YAML", "more than 16777216 characters"]),
        ("model: &model {name_or_path: *model}", ["not YAML", "a value contains an alias of itself"]),
        ("model: {name_or_path: a, name_or_path: b}", ["duplicate key"]),
        ("model: {[a]: b, [a]: b}", ["not YAML", "unhashable key"]),
        ("model: [", ["not YAML"]),
        ("", ["model.name_or_path is missing"]),
    ],
)
def test_file_that_is_not_a_recipe_is_rejected(tmp_path, text, words):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    for word in words:
        assert word in str(caught.value)


def test_recipe_of_many_keys_is_read_and_checked_in_linear_time(tmp_path):
    num_keys, path = 20_000, tmp_path / "recipe.yaml"
    path.write_text("training:\n" + "".join(f"  key_{number}: {number}\n" for number in range(num_keys)))
    start = time.process_time()
    values = read_values(path)
    assert time.process_time() - start < 2  # 0.2 s on one core, and 30 s with a search for each key
    assert len(values["training"]) == num_keys
    start = time.process_time()
    with pytest.raises(RecipeError, match=f"{num_keys - 20} more names are not fields of the section training"):
        check_names(values)
    assert time.process_time() - start < 5


def test_aliases_of_a_recipe_are_replaced_by_their_values(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("scales: {a: &small {data: {max_train_rows: 9}}, b: *small}\nscale: b\n")
    assert read_values(path) == {"data": {"max_train_rows": 9}, "scale": "b"}


def test_file_that_is_not_utf8_is_rejected(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes("model: {name_or_path: Müller}".encode("latin-1"))
    with pytest.raises(RecipeError, match="it is not UTF-8"):
        load_recipe(tmp_path / "recipe.yaml")


def test_defaults_match_the_type_of_their_field():
    for section, fields in section_fields().items():
        for item in fields.values():
            if not item.required and item.default is not ...:
                # transformers represents an empty list of debug options as "".
                assert check_of(item.annotation)(item.default) is None or item.name == "debug", (section, item)


def test_help_lists_all_fields_with_type_and_default():
    text = recipe_help()
    for section, cls in [
        ("model", ModelSection),
        ("data", DataSection),
        ("training", TrainingArguments),
        ("federation", FederatedConfig),
    ]:
        for item in dataclasses.fields(cls):
            assert f"    {section}.{item.name}: " in text
    for line in [
        "training.learning_rate: float (default 5e-05)",
        "federation.clients_per_round: int or float (default 1.0)",
        "federation.aggregation_kwargs: mapping or null (default null)",
        "data.path: str (required)",
        "compare: list of centralized | local (default [])",
        "plots: true | false (default false)",
    ]:
        assert line in text


def printed_help(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main([*words])
    printed = capsys.readouterr()
    return caught.value.code, printed.out, printed.err


def test_train_help_fits_on_a_screen_and_names_the_sections(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, printed, _ = printed_help(capsys, "train", "--help")
    assert code == 0 and "--output-dir" in printed and len(printed.splitlines()) <= 40
    assert set(section_names()) <= set(re.findall(r"\w+", printed.partition("sections of a recipe")[2]))
    assert printed_help(capsys, "train", "--help", "all")[1].strip() == recipe_help()


def test_help_of_a_section_lists_its_fields_and_selects_them_by_a_word(capsys):
    _, training, _ = printed_help(capsys, "train", "--help", "training")
    for item in dataclasses.fields(TrainingArguments):
        assert f"training.{item.name}: " in training
    assert "federation." not in training
    _, steps, _ = printed_help(capsys, "serve", "-h", "training.steps")
    shown = re.findall(r"^    training\.(\w+): ", steps, flags=re.MULTILINE)
    assert shown == [item.name for item in dataclasses.fields(TrainingArguments) if "steps" in item.name]
    assert "partition.name: label-dirichlet" in printed_help(capsys, "train", "--help", "partition.alpha")[1]
    assert "benchmark.seeds" in printed_help(capsys, "benchmark", "--help", "benchmark")[1]


@pytest.mark.parametrize("topic", ["traning", "training.nosuch", "partition.nosuch", "nosuch"])
def test_help_of_an_unknown_section_names_the_sections(topic, capsys):
    code, _, error = printed_help(capsys, "train", "--help", topic)
    assert code == 2 and f"--help {topic}" in error
    assert topic != "traning" or "did you mean training? Sections are model, data, " in error


@pytest.mark.parametrize("name", [name for name in COMMANDS if not COMMANDS[name].help.startswith("deprecated")])
def test_examples_in_the_help_are_valid_commands(name, capsys):
    examples = COMMANDS[name].examples
    assert examples
    _, printed, _ = printed_help(capsys, name, "--help")
    for line in examples:
        assert f"\n  {line}\n" in printed
        arguments = build_parser().parse_args(shlex.split(line)[1:])
        assert arguments.command == name


def test_train_help_warns_that_a_recipe_can_run_code(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "A recipe can run code" in text and "trust_remote_code" in text and "`module:Class`" in text


def test_help_lists_arguments_of_all_tasks_and_partitioners():
    text = recipe_help()
    for section, classes in named_section_fields().items():
        for name, fields in classes.items():
            assert f"with {section}.name: {name}\n" in text
            for field in fields:
                assert f"    {section}.{field}: " in text
    for line in [
        "task.text_column: str or list of str (default text)",
        "task.label_names: list of str or null (default null)",
        "partition.alpha: float (default 1.0)",
        "partition.num_clients: int (required)",
        "partition.embedder: str (default sentence-transformers/all-MiniLM-L6-v2)",
    ]:
        assert line in text


SCALED = (
    MINIMAL
    + """
training: {learning_rate: 1, seed: 3}
scales:
  paper:
    model: {name_or_path: large}
    training: {learning_rate: 2}
    partition: {name: label-dirichlet, num_clients: 9}
"""
)


def test_scale_changes_the_recipe_and_overrides_change_the_scale(tmp_path):
    assert load(tmp_path, SCALED).model.name_or_path == "m"
    paper = load(tmp_path, SCALED, "scale=paper", "training.seed=4", "partition.alpha=0.5")
    assert (paper.scale, paper.model.name_or_path) == ("paper", "large")
    assert paper.training == {"learning_rate": 2, "seed": 4}
    assert paper.partition.arguments == {"num_clients": 9, "alpha": 0.5}
    assert load(tmp_path, SCALED + "scale: paper", "scale=default").scale == "default"
    # Overrides apply after the scale, regardless of their order on the command line.
    assert load(tmp_path, SCALED, "training.learning_rate=3", "scale=paper").training["learning_rate"] == 3


def test_unknown_scale_is_rejected_and_known_scales_are_listed(tmp_path):
    with pytest.raises(RecipeError, match="scale is 'papr'; it must be one of default, paper."):
        load(tmp_path, SCALED, "scale=papr")


def test_changes_copy_values_and_replace_a_section_with_a_different_class():
    values = {"partition": {"name": "iid", "num_clients": 4}, "card": {"tags": ["a"]}, "data": None}
    result = apply_changes(values, {"partition": {"name": "natural", "column": "c"}, "data": {"path": "p"}})
    assert result == {"partition": {"name": "natural", "column": "c"}, "card": {"tags": ["a"]}, "data": {"path": "p"}}
    result["card"]["tags"].append("b")
    assert values["card"]["tags"] == ["a"]
    assert apply_changes(values, {"partition": {"num_clients": 5}})["partition"] == {"name": "iid", "num_clients": 5}


def test_dataset_configuration_name_does_not_replace_the_section():
    values = {"data": {"path": "p", "name": "a", "test_split": "test"}, "task": {"label_column": "y"}}
    assert apply_changes(values, {"data": {"name": "b"}})["data"] == {"path": "p", "name": "b", "test_split": "test"}
    same_task = apply_changes(values, {"task": {"name": "text-classification", "max_length": 8}})
    assert same_task["task"] == {"label_column": "y", "name": "text-classification", "max_length": 8}


def test_read_values_does_not_check_field_names(tmp_path):
    (tmp_path / "recipe.yaml").write_text(SCALED)
    values = read_values(tmp_path / "recipe.yaml", ["nothing.known=1"])
    assert values["nothing"] == {"known": 1} and values["scale"] == "default" and "scales" not in values


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (int | None, "int or null"),
        (list[str], "list of str"),
        (str | list[str], "str or list of str"),
        (str | tuple[str, str], "str or list of str"),
        (Sequence[str], "list of str"),
        (str | Callable[[list[str]], int], "str"),
    ],
)
def test_type_names_are_readable(annotation, name):
    assert type_name(annotation) == name


def test_docstring_example_runs():
    result = doctest.testmod(recipe_module)
    assert result.attempted > 0 and result.failed == 0
