"""Where the test examples of `hf-federated train` and `benchmark` come from, and what the commands print about it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset

from hf_federated import FederatedDatasetDict, NaturalPartitioner
from hf_federated.cli.main import main
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError


SITES = ("east", "north", "south", "west")


def rows(num_rows: int, start: int = 0) -> Dataset:
    """Rows of four sites in turn. Each site has both labels."""
    numbers = range(start, start + num_rows)
    return Dataset.from_dict(
        {
            "text": [f"a film {number}" for number in numbers],
            "label": [["dull", "bright"][number // 4 % 2] for number in numbers],
            "site": [SITES[number % 4] for number in numbers],
        }
    )


@pytest.fixture
def recipe(recipe_path, tmp_path, monkeypatch):
    """Load a recipe with one client per site, whose section `data` is given."""
    monkeypatch.chdir(tmp_path)

    def load(data: dict, **sections):
        values = yaml.safe_load(recipe_path.read_text())
        values |= {"data": data, "partition": {"name": "natural", "column": "site"}, **sections}
        recipe_path.write_text(yaml.safe_dump(values))
        return load_recipe(recipe_path)

    return load


def write(folder: str, **splits: Dataset) -> str:
    for split, dataset in splits.items():
        Path(folder).mkdir(exist_ok=True)
        dataset.to_csv(f"{folder}/{split}.csv")
    return folder


def test_every_client_trains_and_gives_a_tenth_of_its_examples_by_default(recipe, recipe_path, tmp_path, capsys):
    rows(80).to_csv("sites.csv")
    recipe({"path": "sites.csv"})
    assert main(["train", str(recipe_path)]) == 0
    printed = capsys.readouterr().out
    assert "Training: 4 clients with 72 examples." in printed
    assert "Test: 8 examples, 10 % of the examples of each client (data.test_examples)." in printed
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["num_train_clients"], results["num_test_clients"], results["num_test_rows"]) == (4, None, 8)
    assert results["test_source"] == "8 examples, 10 % of the examples of each client (data.test_examples)"
    assert "on the same 8 examples:" in printed
    raw = load_raw_data(load_recipe(recipe_path))
    # Each site has 20 examples, 10 of each label, and therefore one test example of each label.
    assert {site: Counter(part["label"]) for site, part in raw.test_clients.items()} == dict.fromkeys(
        SITES, {0: 1, 1: 1}
    )
    assert not set(raw.test["text"]) & set(raw.train.to_dataset()["text"])


@pytest.mark.parametrize(
    ("fields", "sizes", "source"),
    [
        ({"test_examples": 0.25}, (60, 20), ", 25 % of the examples of each client (data.test_examples)"),
        ({"test_clients": 0.5}, (40, 40), " of 2 held-out clients"),
        ({"test_clients": 1}, (60, 20), " of 1 held-out client"),
        ({"test_clients": 0}, (72, 8), ", 10 % of the examples of each client (data.test_examples)"),
        ({"max_clients": 2}, (36, 4), ", 10 % of the examples of each client (data.test_examples)"),
        ({"test_path": "dev.csv"}, (80, 12), " of dev.csv"),
        ({"test_path": "dev.csv", "test_examples": 0, "test_clients": 0}, (80, 12), " of dev.csv"),
        (
            {"max_test_rows": 6},
            (72, 6),
            ", 10 % of the examples of each client (data.test_examples), limited by data.max_test_rows=6",
        ),
    ],
)
def test_single_file_has_the_test_examples_that_the_recipe_chooses(recipe, fields, sizes, source):
    rows(80).to_csv("sites.csv")
    rows(12, start=80).to_csv("dev.csv")
    raw = load_raw_data(recipe({"path": "sites.csv", **fields}))
    assert (sum(raw.train.num_rows.values()), len(raw.test)) == sizes
    assert raw.test_source == source


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize(
    ("fields", "sizes", "source", "note"),
    [
        ({}, (40, 12), " of the split 'test', found in sites", ""),
        ({"test_split": "validation"}, (40, 8), " of the split 'validation'", ""),
        ({"further_test_splits": ["test"]}, (40, 8), " of the split 'validation', found in sites", ""),
        ({"test_path": "dev.csv"}, (40, 4), " of dev.csv", ""),
        ({"test_path": "more"}, (40, 16), " of the split 'test' of more", ""),
        ({"test_path": "more", "test_split": "train"}, (40, 20), " of the split 'train' of more", ""),
        (
            {"test_examples": 0.2},
            (32, 8),
            ", 20 % of the examples of each client (data.test_examples)",
            "The split 'test' of sites is not used.",
        ),
        ({"test_clients": 1}, (30, 10), " of 1 held-out client", "The split 'test' of sites is not used."),
        ({"max_train_rows": 21, "max_test_rows": 5}, (21, 5), " of the split 'test', found in sites", ""),
    ],
)
@pytest.mark.sampled(6)
def test_test_split_of_a_folder_is_used_and_named(recipe, is_partitioned, fields, sizes, source, note):
    write("sites", train=rows(40), validation=rows(8, start=40), test=rows(12, start=48))
    write("more", train=rows(20, start=60), test=rows(16, start=80))
    rows(4, start=96).to_csv("dev.csv")
    partition = {"name": "natural", "column": "site"}
    if is_partitioned:
        assert main("partition sites --partitioner natural --column site --output clients".split()) == 0
        fields, partition = {**fields}, None
        source, note = source.replace("found in sites", "found in clients"), note.replace("sites", "clients")
    path = "clients" if is_partitioned else "sites"
    raw = load_raw_data(recipe({"path": path, **fields}, partition=partition))
    assert (sum(raw.train.num_rows.values()), len(raw.test)) == sizes
    assert (raw.test_source, raw.note) == (source, note)
    assert raw.task.label_names == ("bright", "dull")
    assert raw.test.features["label"].names == ["bright", "dull"]


def test_run_prints_the_test_split_that_it_uses_and_the_split_that_it_does_not_use(recipe, capsys):
    write("sites", train=rows(40), test=rows(12, start=48))
    assert build_run(recipe({"path": "sites"})).describe() == [
        "Training: 4 clients with 40 examples.",
        "Test: 12 examples of the split 'test', found in sites.",
    ]
    assert build_run(recipe({"path": "sites", "test_clients": 1})).describe() == [
        "Training: 3 clients with 30 examples.",
        "Test: 10 examples of 1 held-out client.",
        "The split 'test' of sites is not used.",
    ]


@pytest.mark.parametrize("missing", ["label column", "labels", "text column"])
def test_test_split_without_labels_or_a_column_is_not_used(recipe, missing):
    """In a competition, the labels of the split `test` are not published."""
    train, validation, test = rows(40), rows(8, start=40), rows(12, start=48)
    if missing == "labels":
        feature = ClassLabel(names=["bright", "dull"])
        train, validation = train.cast_column("label", feature), validation.cast_column("label", feature)
        test = test.remove_columns("label").add_column("label", [-1] * 12).cast_column("label", feature)
        columns = train.column_names
        for split, part in (("train", train), ("validation", validation), ("test", test)):
            part.select_columns(columns).to_parquet(f"sites/{split}.parquet")
        reason = "it has no labels in the column 'label'"
    else:
        column = missing.split()[0]
        write("sites", train=train, validation=validation, test=test.remove_columns(column))
        reason = f"it has no column '{column}'"
    raw = load_raw_data(recipe({"path": "sites"}))
    assert raw.test_source == " of the split 'validation', found in sites" and len(raw.test) == 8
    (Path("sites") / f"validation.{'parquet' if missing == 'labels' else 'csv'}").unlink()
    raw = load_raw_data(recipe({"path": "sites"}))
    assert raw.test_source.startswith(", 10 %") and len(raw.test) == 4
    assert raw.note == f"The split 'test' of sites is not used, because {reason}."


def test_test_file_beside_a_single_training_file_is_named(recipe):
    write("sites", train=rows(40), test=rows(12, start=48))
    raw = load_raw_data(recipe({"path": "sites/train.csv"}))
    assert len(raw.test) == 4
    assert raw.note == "sites/test.csv is not used. To test on it, set data.test_path."
    assert load_raw_data(recipe({"path": "sites/train.csv", "test_path": "sites/test.csv"})).note == ""


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_clients_are_evaluated_on_their_held_out_examples(recipe, is_partitioned):
    rows(40).to_csv("sites.csv")
    partition = {"name": "natural", "column": "site"}
    if is_partitioned:
        assert main("partition sites.csv --partitioner natural --column site --output clients".split()) == 0
        partition = None
    path = "clients" if is_partitioned else "sites.csv"
    federation = {"num_rounds": 1, "evaluate_clients": True}
    run = build_run(recipe({"path": path}, partition=partition, federation=federation))
    assert run.data.test_clients.num_rows == dict.fromkeys(SITES, 1)


def test_test_path_may_be_a_federated_dataset(recipe):
    rows(40).to_csv("sites.csv")
    splits = {"test": rows(12, start=40)}
    FederatedDatasetDict.from_dataset(splits, NaturalPartitioner("site")).save_to_disk("tests")
    raw = load_raw_data(recipe({"path": "sites.csv", "test_path": "tests"}))
    assert len(raw.test) == 12 and raw.test_source == " of tests"
    assert main("partition sites.csv --partitioner natural --column site --output clients".split()) == 0
    values = {"path": "clients", "test_path": "tests"}
    raw = load_raw_data(recipe(values, partition=None), by_client=True)
    assert raw.test_clients.num_rows == dict.fromkeys(SITES, 3)
    rows(4, start=60).to_csv("dev.csv")
    with pytest.raises(RecipeError, match="evaluate_clients is set, but data.test_path=dev.csv does not assign"):
        load_raw_data(recipe({**values, "test_path": "dev.csv"}, partition=None), by_client=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_examples": 0}, "data.test_examples is 0, and sites.csv has no split test or validation"),
        (
            {"test_path": "den.csv"},
            "data.test_path: the file .* den.csv does not exist .did you mean dev.csv",
        ),
        ({"test_path": "dev.csv", "test_split": "test"}, "dev.csv is a file with one split. Remove data.test_split"),
        ({"test_path": "parts"}, "the split to use is unknown. The splits of parts are dev_a, dev_b"),
        ({"test_path": "parts", "test_split": "x"}, "there is no split 'x'. The splits of parts are dev_a, dev_b"),
        ({"test_split": "test"}, "sites.csv is a file with one split.*set data.test_path"),
        ({"test_path": "no_label.csv"}, "the column 'label' does not exist in the split 'test_path'"),
        ({"test_path": "no_text.csv"}, "the column 'text' does not exist in the split 'test_path'"),
        ({"test_clients": 4}, "holds out 4 of 4 clients"),
        ({"max_train_rows": 0}, "data.max_train_rows is 0"),
    ],
)
def test_invalid_source_of_test_examples_is_rejected(recipe, fields, message):
    rows(40).to_csv("sites.csv")
    rows(4).to_csv("dev.csv")
    rows(4).remove_columns("label").to_csv("no_label.csv")
    rows(4).remove_columns("text").to_csv("no_text.csv")
    write("parts", dev_a=rows(4), dev_b=rows(4))
    files = [f"  - {{split: {name}, path: {name}.csv}}" for name in ("dev_a", "dev_b")]
    card = ["---", "configs:", "- config_name: default", "  data_files:", *files, "---", ""]
    Path("parts/README.md").write_text("\n".join(card))
    with pytest.raises(RecipeError, match=message):
        load_raw_data(recipe({"path": "sites.csv", **fields}))


def test_limit_of_training_examples_of_a_stored_dataset_keeps_its_clients(recipe):
    rows(40).to_csv("sites.csv")
    assert main("partition sites.csv --partitioner natural --column site --output clients".split()) == 0
    raw = load_raw_data(recipe({"path": "clients", "max_train_rows": 20, "test_examples": 0.2}, partition=None))
    # 20 of 40 examples are 5 per site, one of which is for testing.
    assert raw.train.num_rows == dict.fromkeys(SITES, 4) and raw.test_clients.num_rows == dict.fromkeys(SITES, 1)
    with pytest.raises(RecipeError, match="max_train_rows is 3, but there are 4 clients"):
        load_raw_data(recipe({"path": "clients", "max_train_rows": 3}, partition=None))


def test_benchmark_prints_and_records_the_source_of_the_test_examples(recipe, recipe_path, tmp_path, capsys):
    rows(40).to_csv("sites.csv")
    recipe({"path": "sites.csv"}, benchmark={"seeds": [0], "runs": {"FedAvg": {}}})
    assert main(["benchmark", str(recipe_path), "--output-dir", "out"]) == 0
    source = "4 examples, 10 % of the examples of each client (data.test_examples)"
    assert f", tested on {source}\n" in capsys.readouterr().out
    (record,) = map(json.loads, (tmp_path / "out" / "recipe" / "runs.jsonl").read_text().splitlines())
    assert record["test_source"] == source
