"""A recipe is read, changed and refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import doctest
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_federated import FederatedConfig
from hf_federated.cli import recipe as recipe_module
from hf_federated.cli.main import main, recipe_help
from hf_federated.cli.recipe import DataSection, ModelSection, RecipeError, _fits, load_recipe, sections, type_name


MINIMAL = "model: {name_or_path: m}\ndata: {path: d, num_clients: 4}\n"


def load(folder: Path, text: str, *overrides: str):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def test_a_recipe_without_options_has_the_defaults(tmp_path):
    recipe = load(tmp_path, MINIMAL)
    assert recipe.model == ModelSection("m")
    assert recipe.data == DataSection("d", num_clients=4)
    assert (recipe.training, recipe.federation, recipe.compare, recipe.plots) == ({}, {}, [], False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("1E3", 1000.0), ("-.5", -0.5), ("1.", 1.0), ("10", 10), ("1.5.2", "1.5.2"), ("e4", "e4")],
)
def test_numbers_are_read_as_people_write_them(tmp_path, text, value):
    recipe = load(tmp_path, MINIMAL + f"card: {{tags: {text}}}")
    assert recipe.card["tags"] == value and type(recipe.card["tags"]) is type(value)


def test_no_is_a_word_and_false_a_truth_value(tmp_path):
    recipe = load(tmp_path, MINIMAL + "training: {eval_strategy: no, bf16: false}")
    assert recipe.training == {"eval_strategy": "no", "bf16": False}


def test_set_replaces_adds_and_opens_sections(tmp_path):
    recipe = load(
        tmp_path,
        MINIMAL,
        "data.path=other",
        "training.learning_rate=1e-3",
        "model.lora.r=4",
        "compare=[local]",
        "federation.aggregation_kwargs={server_lr: 0.5}",
    )
    assert recipe.data.path == "other"
    assert recipe.training == {"learning_rate": 0.001}
    assert recipe.model.lora == {"r": 4}
    assert recipe.compare == ["local"]
    assert recipe.federation == {"aggregation_kwargs": {"server_lr": 0.5}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["modle.task=x"], ["modle", "did you mean model"]),
        (["data.clientcolumn=x"], ["data.clientcolumn", "did you mean client_column", "num_clients"]),
        (["training.learning_rte=1"], ["training.learning_rte", "did you mean learning_rate", "--help"]),
        (["training.learning_rate=fast"], ["training.learning_rate", "'fast'", "float"]),
        (["training.bf16=1"], ["training.bf16", "true | false"]),
        (["training.optim=adam"], ["training.optim", "'adam'", "adamw_torch"]),
        (["federation.num_rounds=1.5"], ["federation.num_rounds", "1.5", "int or null"]),
        (["federation.num_rounds=true"], ["federation.num_rounds", "True", "int or null"]),
        (["model.task=regression"], ["model.task", "'regression'", "sequence-classification"]),
        (["compare=[federated]"], ["compare", "federated", "centralized | local"]),
        (["data.client_column=movie"], ["either client_column", "num_clients"]),
        (["data.num_clients=null"], ["either client_column", "num_clients"]),
        (["data.test_clients=1.5"], ["data.test_clients", "1.5", "share between 0 and 1"]),
        (["data.test_clients=0"], ["data.test_clients", "0"]),
        (["data.max_length=0"], ["data.max_length", "at least 1"]),
        (["data.min_rows_per_client=3"], ["data.min_rows_per_client", "client_column"]),
        (["data.text_column=[a, b, c]"], ["data.text_column", "3"]),
        (["local_clients=0"], ["local_clients", "at least 1"]),
        (["data=[1]"], ["data", "[1]", "mapping"]),
        (["data.path.deep=1"], ["data.path.deep=1", "path"]),
        (["data.path"], ["'data.path'", "section.field=value"]),
        (["data.path=[1"], ["data.path=[1", "not YAML"]),
        (["data.path=null"], ["data.path", "None", "str"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, overrides, words):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {path: d, num_clients: 4}", ["model.name_or_path is missing"]),
        ("- model", ["list", "mapping"]),
        ("model: {name_or_path: a, name_or_path: b}", ["stands twice"]),
        ("model: [", ["not YAML"]),
        ("", ["model.name_or_path is missing"]),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, words):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    for word in words:
        assert word in str(caught.value)


def test_every_default_fits_its_own_type():
    for section, fields in sections().items():
        for item in fields.values():
            if not item.required:
                # transformers writes an empty list of debug options as "".
                assert _fits(item.default, item.annotation) or item.name == "debug", (section, item)


def test_help_lists_every_field_with_type_and_default():
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


def test_help_of_the_command_prints_it(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "--output-dir" in printed and recipe_help() in printed


@pytest.mark.parametrize(
    ("annotation", "name"),
    [(int | None, "int or null"), (list[str], "list of str"), (str | list[str], "str or list of str")],
)
def test_types_are_named_as_people_say_them(annotation, name):
    assert type_name(annotation) == name


def test_the_example_runs():
    result = doctest.testmod(recipe_module)
    assert result.attempted > 0 and result.failed == 0
