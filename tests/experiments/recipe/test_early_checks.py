"""The checks before slow imports know the columns, the metrics and the length of a run, and refuse no honest run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import TrainingArguments

from hf_federated.config import FederatedConfig
from hf_federated.data import FederatedDataset
from hf_federated.experiments.recipe import early_checks
from hf_federated.experiments.recipe.data_columns import missing_column, named_columns, read_columns
from hf_federated.experiments.recipe.fields import named_section_fields
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.tasks import TASKS
from hf_federated.trainer.checks.arguments import resolve_federation
from hf_federated.utils.due_steps import warn_once


REQUIRED = {"label_names": ["0", "1"], "tag_names": ["O", "B-X", "I-X"], "words": ["a", "b"]}


def build_task(name: str, **arguments):
    cls = TASKS[name]
    fields = cls.__dataclass_fields__
    return cls(**{key: value for key, value in REQUIRED.items() if key in fields}, **arguments)


@pytest.mark.parametrize("name", TASKS)
def test_columns_of_a_task_are_those_that_it_reads(name) -> None:
    fields = named_section_fields()["task"][name]
    read = set(build_task(name).columns)
    assert {column for _, column in named_columns("task", fields, {})} <= read
    renamed = {key: f"my_{key}" for key in fields if key.endswith("_column")}
    named = {column for _, column in named_columns("task", fields, renamed)}
    assert named == set(renamed.values()) <= set(build_task(name, **renamed).columns)


@pytest.mark.parametrize(
    ("content", "present", "absent"),
    [
        ("text,label\n1,2\n", ["text", "label"], "txt"),
        ("text;label\n1;2\n", ["text", "label"], "text;label2"),
        ("text\tlabel\n1\t2\n", ["text", "label"], "tex"),
        ('"the text";"a; b"\n1;2\n', ["the text", "a; b"], "text"),
        ("\ufefftext,label\n1,2\n", ["text"], "txt"),
        ("text\na\n", ["text"], "label"),
        ("text, label\n1,2\n", ["text", "label", " label"], "lab"),
        ("sep=;\ntext;label\n1;2\n", ["text", "label"], "sep"),
        ("Reviews of 2024\n\ntext;label\n1;2\n", ["text", "label"], "txt"),
    ],
)
def test_columns_of_a_text_file_are_those_of_its_header(tmp_path, content, present, absent) -> None:
    for number, encoding in enumerate(("utf-8", "utf-8") if content.startswith("\ufeff") else ("utf-8", "utf-16")):
        path = tmp_path / f"{number}.csv"
        path.write_text(content, encoding=encoding)
        assert all(missing_column(path, "task.text_column", column) is None for column in present)
        assert "has no such column. Its columns are " in missing_column(path, "task.text_column", absent)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b"caf\xe9,label\n1,2\n"),
        ("rows.csv", b'"a\nb",label\n1,2\n'),
        ("rows.csv", "other,label\n1,2\n".encode("utf-16-le")),
        ("rows.xlsx", b"PK"),
        ("rows.csv", b"text"),
        ("rows.csv", b""),
        ("rows.csv.gz", gzip.compress(b"text,label\n", mtime=0)),
        ("rows.json", b'[{"text": 1}]'),
        ("rows.json", b"{"),
        ("rows.parquet", b"PAR1"),
        ("rows.txt", b"one\n"),
        ("rows.arrow", b"one\n"),
    ],
)
def test_file_whose_columns_are_not_known_is_not_refused(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content)
    column = "café" if content.startswith(b"caf") else "other"
    assert missing_column(tmp_path / name, "task.text_column", column) is None


def test_column_of_a_later_json_row_is_not_refused(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"text": "a"}, {"text": "b", "label": 1}])))
    assert read_columns(path).names == ["text"]
    assert missing_column(path, "f", "label") is None
    assert missing_column(path, "f", "labels") is not None


def test_column_is_missing_in_a_folder_only_if_no_file_has_it(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n1,2\n")
    (tmp_path / "b.csv").write_text("text,label,site\n1,2,3\n")
    assert missing_column(tmp_path, "f", "site") is None
    assert "Did you mean 'text'?" in missing_column(tmp_path, "f", "txt")
    (tmp_path / "c.xlsx").write_bytes(b"PK")
    assert missing_column(tmp_path, "f", "txt") is None
    (tmp_path / "c.xlsx").rename(tmp_path / "c.md")
    assert missing_column(tmp_path, "f", "txt") is not None
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"txt\n1\n"))
    assert missing_column(tmp_path, "f", "txt") is None
    assert missing_column(tmp_path / "nosuch", "f", "txt") is None


def test_federated_dataset_has_the_columns_of_its_clients(tmp_path) -> None:
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    FederatedDataset.from_dict({"a": rows, "b": rows}).save_to_disk(tmp_path / "clients")
    assert missing_column(tmp_path / "clients", "f", "text") is None
    assert "Its columns are text, label" in missing_column(tmp_path / "clients", "f", "txt")


@pytest.mark.parametrize(
    ("training", "federation"),
    [
        ({}, {}),
        ({"num_train_epochs": 2.5}, {}),
        ({}, {"num_rounds": 7}),
        ({"max_steps": 12}, {"local_steps": 4}),
    ],
)
def test_number_of_rounds_is_that_of_the_trainer(tmp_path, training, federation) -> None:
    args = TrainingArguments(str(tmp_path), **training)
    expected = resolve_federation(FederatedConfig(**federation), args).num_rounds
    assert early_checks.number_of_rounds({"federation": federation}, training) == expected


@pytest.mark.parametrize("epochs", [float("inf"), float("nan")])
def test_number_of_epochs_that_is_not_finite_is_refused(epochs) -> None:
    with pytest.raises(RecipeError, match="training.num_train_epochs is (inf|nan)"):
        early_checks.number_of_rounds({}, {"num_train_epochs": epochs})


def test_name_in_quotes_can_contain_separators(tmp_path) -> None:
    (tmp_path / "rows.csv").write_text('"How was it? (1=bad; 5=good; 9=none)",label\na,x\nb,y\n')
    assert missing_column(tmp_path / "rows.csv", "f", "How was it? (1=bad; 5=good; 9=none)") is None


def test_metric_of_the_task_and_its_arguments_is_accepted(recipe_path, tmp_path) -> None:
    for changes in (
        ["training.metric_for_best_model=eval_f1_macro"],
        ["training.metric_for_best_model=loss"],
        ["training.metric_for_best_model=matthews_correlation", "task.metric=matthews_correlation"],
        ["training.metric_for_best_model=anything", "training.eval_strategy=no"],
        ["training.metric_for_best_model=boolq_accuracy", "task={name: superglue-seq2seq}"],
    ):
        early_checks.check_early(read_values(recipe_path, changes), str(tmp_path / "run"))


def test_client_with_its_own_examples_needs_none_of_the_files_of_the_recipe(recipe_path, tmp_path) -> None:
    values = read_values(recipe_path, ["data.path=./nosuch", "data.test_path=./no", "partition.column=x"])
    (tmp_path / "own.csv").write_text("text,label\na,b\n")
    own = {"evaluates": False, "examples": str(tmp_path / "own.csv")}
    early_checks.check_early(values, str(tmp_path / "run"), **own)
    with pytest.raises(RecipeError, match="2 mistakes:\n.*data.path.*\n.*data.test_path|2 mistakes"):
        early_checks.check_early(values, str(tmp_path / "run"))
    # The server reads the test examples only, and trains no client.
    server = read_values(recipe_path, ["data.path=./nosuch", "training.optim=adamw_anyprecision"])
    early_checks.check_early(server, str(tmp_path / "run"), trains=False)


def test_columns_of_a_file_with_reader_options_are_not_checked(recipe_path, tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("text#label#movie\na#b#c\n")
    values = read_values(recipe_path, [f"data.path={tmp_path / 'rows.csv'}"])
    with pytest.raises(RecipeError, match="task.text_column is 'text'"):
        early_checks.check_early(values, str(tmp_path / "run"))
    values["data"]["csv"] = {"separator": "#"}
    early_checks.check_early(values, str(tmp_path / "run"))


def test_all_mistakes_of_a_recipe_are_in_one_error(recipe_path, tmp_path) -> None:
    changes = ["task.text_column=txt", "training.metric_for_best_model=x", "training.optim=adamw_anyprecision"]
    with pytest.raises(RecipeError) as error:
        early_checks.check_early(read_values(recipe_path, changes), str(tmp_path / "run"))
    assert len(error.value.mistakes) == 3


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    warn_once.cache_clear()


def test_defaults_of_the_training_arguments_are_always_due(recipe_path, tmp_path, caplog) -> None:
    values = read_values(recipe_path, ["training={output_dir: run, eval_strategy: steps}", "federation.num_rounds=3"])
    early_checks.check_early(values, str(tmp_path / "run"))
    assert not caplog.records
    assert load_recipe(recipe_path, ["training.save_steps=9"]).training["save_steps"] == 9
    late = read_values(recipe_path, ["training.save_strategy=steps", "training.save_steps=9"])
    early_checks.check_early(late, str(tmp_path / "run"))
    assert "save_steps=9 counts rounds, and the run has 1" in caplog.text


RECIPES = sorted(Path(__file__).parents[3].glob("recipes/*/**/*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_shipped_recipes_pass_the_checks(path, tmp_path, caplog) -> None:
    values = read_values(path)
    if "model" in values:
        # The data files of some recipes are made by a script.
        values["data"] = {**values["data"], "path": "you/data", "test_path": None}
        values["model"] = {**values["model"], "name_or_path": "you/model"}
        early_checks.check_early(values, str(tmp_path / "run"))
        assert not caplog.records
