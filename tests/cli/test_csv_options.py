"""`partition` and recipes read CSV files of spreadsheet programs: files, folders of splits and files of clients."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hf_federated import FederatedDatasetDict
from hf_federated.cli.main import main
from hf_federated.experiments.data.files import load_file
from hf_federated.experiments.data.splits import load_splits
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.schema import RecipeError


GERMAN = "text;label;score\nzu heiß, zu laut;schlecht;1,5\nschön;gut;2\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    return tmp_path


def recipe(path: str, **data) -> object:
    return parse_recipe(
        {
            "model": {"name_or_path": "m"},
            "data": {"path": path, **data},
            "partition": {"name": "iid", "num_clients": 1},
        }
    )


def test_one_line_names_the_format_of_all_files(folder, caplog):
    for site in ("north", "south"):
        (folder / "sites" / f"{site}.csv").write_bytes(GERMAN.encode("cp1252"))
    (folder / "sites" / "west.csv").write_text("text,label,score\nfine,gut,1\n")
    assert main("partition sites --client-per-file --output clients".split()) == 0
    lines = [record.message for record in caplog.records if "Read with" in record.message]
    assert lines == ["north.csv, south.csv: Read with separator ';', encoding cp1252."]
    clients = FederatedDatasetDict.load_from_disk("clients")["train"]
    assert clients["north"][:] == {
        "text": ["zu heiß, zu laut", "schön"],
        "label": ["schlecht", "gut"],
        "score": [1.5, 2.0],
    }


def test_options_of_partition_override_the_file(folder, capsys):
    (folder / "sites" / "a.csv").write_bytes("text:code\nпривет:007\n".encode("cp1251"))
    line = "partition sites --client-per-file --output clients"
    assert main(line.split()) == 2
    assert "cp1251" in capsys.readouterr().err
    options = ["--csv-separator", ":", "--csv-encoding", "cp1251", "--csv-text-columns", "code"]
    assert main([*line.split(), *options]) == 0
    assert FederatedDatasetDict.load_from_disk("clients")["train"]["a"][:] == {"text": ["привет"], "code": ["007"]}
    assert main([*line.split(), "--overwrite", "--csv-encoding", "cp12511"]) == 2
    assert "--csv-encoding is 'cp12511', which is unknown" in capsys.readouterr().err


def test_folder_of_splits_is_read_as_its_files(folder):
    (folder / "sites" / "train.csv").write_bytes(GERMAN.encode("cp1252"))
    (folder / "sites" / "test.csv").write_text("text;label;score\nneu;gut;3\n", encoding="utf-16")
    assert main("partition sites --partitioner iid --num-clients 1 --output clients".split()) == 0
    splits = FederatedDatasetDict.load_from_disk("clients")
    assert splits["train"]["0"]["text"][:] == ["zu heiß, zu laut", "schön"]
    assert splits["test"]["0"]["text"][:] == ["neu"]
    loaded = load_splits(recipe("sites", csv={"decimal": "."}))
    assert {name: rows["score"][:] for name, rows in loaded.splits.items()} == {"train": ["1,5", "2"], "test": [3]}
    assert load_splits(recipe("sites", train_split="train[:1]")).splits["train[:1]"]["text"][:] == ["zu heiß, zu laut"]


def test_test_file_is_read_with_the_options_of_the_recipe(folder):
    for name in ("train.csv", "more.csv"):
        (folder / name).write_text("text:code\na:01\n")
    loaded = load_splits(recipe("train.csv", test_path="more.csv", csv={"separator": ":", "text_columns": ["code"]}))
    assert [rows["code"][:] for rows in loaded.splits.values()] == [["01"], ["01"]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b'text,label\na,"x\n', ["a.csv, line 2", "never closed"]),
        ("a.jsonl", b'{"text": "a"}\n{"text" "b"}\n', ["a.jsonl, line 2", "character 9"]),
        ("sites", b'text,label\na,"x\n', ["train.csv, line 2", "never closed"]),
    ],
)
def test_mistake_in_a_file_is_reported_with_its_line(folder, name, content, words):
    (folder / (name if "." in name else "sites/train.csv")).write_bytes(content)
    with pytest.raises(CommandError) as caught:
        load_splits(recipe(name))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("csv", "words"),
    [
        ({"seperator": ";"}, ["data.csv.seperator is not a field", "did you mean separator"]),
        ({"separator": ";;"}, ["data.csv.separator is ';;'", "one character"]),
        ({"text_columns": "label"}, ["data.csv.text_columns is 'label'", "list of str"]),
        ({"encoding": "x"}, ["data.csv.encoding is 'x'"]),
    ],
)
def test_invalid_options_of_a_recipe_are_mistakes(csv, words):
    with pytest.raises(RecipeError) as caught:
        recipe("a.csv", csv=csv)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}\n{"text": "b"}\n',
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
        b'{\n"text": "a"\n}\n{\n"text": "b"\n}\n',
        b'[{"text": "a"}, {"text": "b"}]',
        '[{"text": "a"},\n{"text": "b"}]'.encode("utf-16"),
        b'["a", "b"]',
    ],
)
def test_json_in_each_form_is_loaded(folder, content):
    (folder / "a.json").write_bytes(content)
    assert load_file(Path("a.json"), "train")["train"]["text"][:] == ["a", "b"]


def test_damaged_archive_is_an_error_that_names_the_file(folder):
    for name in ("a.csv.gz", "a.jsonl.gz"):
        (folder / name).write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n')[:-9])
        with pytest.raises(CommandError, match=f"{name} is a damaged archive"):
            load_file(Path(name), "train")
