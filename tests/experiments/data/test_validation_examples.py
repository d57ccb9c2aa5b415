"""Validation examples of a recipe: they are never trained on, and a run on them uses no test example."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from datasets import Dataset, load_dataset

from hf_federated import FederatedDatasetDict, IidPartitioner
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.network.party_data import load_server_data
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.yaml_file import read_values


SPLIT = {"test_split": "test"}


@pytest.fixture
def load(recipe_path, texts_dir):
    """Load the raw data of the recipe with other fields of `data`, evaluated on test or on validation examples."""
    recipe = yaml.safe_load(recipe_path.read_text())

    def load(data, evaluate_on="test", by_client=False, **sections):
        given = {"path": str(texts_dir), **data, "evaluate_on": evaluate_on}
        changed = {**recipe, "partition": {"name": "natural", "column": "site"}, **sections, "data": given}
        recipe_path.write_text(yaml.safe_dump(changed))
        return load_raw_data(load_recipe(recipe_path), by_client)

    return load


def ids(examples) -> list[str]:
    return sorted((examples if isinstance(examples, Dataset) else examples.to_dataset())["id"])


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.parametrize(
    "test", [SPLIT, {"test_examples": 0.2}, {"test_clients": 2}], ids=lambda test: next(iter(test))
)
def test_validation_examples_are_neither_trained_nor_tested_on(load, test, by_client):
    data = {**test, "validation_examples": 0.25}
    tested, validated = (load(data, name, by_client) for name in ("test", "validation"))
    assert ids(tested.train) == ids(validated.train)
    assert tested.validation is not None and ids(tested.validation) == ids(validated.test)
    assert validated.validation is None
    parts = [ids(tested.train), ids(tested.test), ids(validated.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) and all(parts)
    # 60 examples of 6 sites. A client gives a quarter of its remaining examples, rounded up.
    of_client = {"test_split": 10, "test_examples": 8, "test_clients": 10}[next(iter(test))]
    num_clients = 4 if "test_clients" in test else 6
    assert len(validated.test) == num_clients * -(-of_client // 4)
    assert validated.test_source == ", 25 % of the training examples of each client (data.validation_examples)"
    assert validated.test_clients is not None and set(validated.test_clients) == set(tested.train)


def test_validation_split_takes_the_place_of_the_test_examples(load):
    for test in (SPLIT, {"test_examples": 0.2}):
        data = {**test, "validation_split": "shifted"}
        tested, validated = load(data), load(data, "validation")
        assert ids(tested.train) == ids(validated.train)
        assert ids(tested.validation) == ids(validated.test) and validated.validation is None
        assert {name.split("-")[0] for name in validated.test["id"]} == {"shifted"}
        assert validated.test_source == " of the split 'shifted'"
        assert not set(ids(tested.test)) & {*ids(validated.train), *ids(validated.test)}


def test_run_on_validation_examples_does_not_load_the_test_splits(load, texts_dir, tmp_path):
    """The test splits of the copy are missing, and the run on validation examples is the same."""
    shutil.copytree(texts_dir, tmp_path / "texts")
    for split in ("test", "shifted"):
        (tmp_path / "texts" / f"{split}.parquet").unlink()
    (tmp_path / "texts" / "README.md").unlink()
    data = {**SPLIT, "further_test_splits": ["shifted"], "validation_examples": 0.2}
    whole = load(data, "validation")
    without = load({**data, "path": str(tmp_path / "texts")}, "validation")
    assert ids(whole.train) == ids(without.train) and ids(whole.test) == ids(without.test)
    assert whole.further_tests == without.further_tests == {}
    with pytest.raises(RecipeError, match="test"):
        load({**data, "path": str(tmp_path / "texts")})


def test_federated_dataset_has_validation_examples_of_each_client(load, texts_dir, tmp_path):
    splits = {
        split: load_dataset("parquet", data_files=str(texts_dir / f"{split}.parquet"), split="train")
        for split in ("train", "test", "shifted")
    }
    FederatedDatasetDict.from_dataset(splits, IidPartitioner(3)).save_to_disk(tmp_path / "clients")
    path = {"path": str(tmp_path / "clients"), **SPLIT}
    tested = load({**path, "validation_examples": 0.1}, partition=None)
    validated = load({**path, "validation_examples": 0.1}, "validation", partition=None)
    assert len(tested.test) == 12 and len(validated.test) == 3 * 2 and ids(tested.train) == ids(validated.train)
    assert len(tested.train.to_dataset()) == 60 - 6 and ids(tested.validation) == ids(validated.test)
    validated = load({**path, "validation_split": "shifted"}, "validation", partition=None)
    assert ids(validated.test) == sorted(splits["shifted"]["id"])
    tested = load({**path, "validation_split": "shifted"}, partition=None)
    assert ids(tested.validation) == ids(validated.test) and ids(tested.test) == sorted(splits["test"]["id"])
    with pytest.raises(RecipeError, match="has no split 'missing'"):
        load({**path, "validation_split": "missing"}, partition=None)


def test_limit_of_test_examples_applies_to_validation_examples(load):
    data = {**SPLIT, "validation_examples": 0.5, "max_test_rows": 7}
    validated = load(data, "validation")
    assert len(validated.test) == 7 and len(validated.train.to_dataset()) == 30
    assert validated.test_source.endswith("limited by data.max_test_rows=7")
    assert ids(load(data).validation) == ids(validated.test)
    data = {**SPLIT, "validation_split": "shifted", "max_test_rows": 7}
    assert ids(load(data).validation) == ids(load(data, "validation").test) and len(load(data).validation) == 7


def test_record_of_a_run_on_validation_examples_does_not_depend_on_test_labels(recipe_path, texts_dir, tmp_path):
    """The labels of the test split are replaced by one label."""
    poisoned = tmp_path / "poisoned"
    shutil.copytree(texts_dir, poisoned)
    test = load_dataset("parquet", data_files=str(texts_dir / "test.parquet"), split="train")
    test.map(lambda example: {"label": 2}).to_parquet(poisoned / "test.parquet")
    records = {}
    for evaluate_on in ("validation", "test"):
        for path in (texts_dir, poisoned):
            data = {"path": str(path), **SPLIT, "validation_examples": 0.2, "evaluate_on": evaluate_on}
            values = read_values(recipe_path, [f"data={json.dumps(data)}", "partition.column=site"])
            result = measure_run(values, "federated", tmp_path / "runs" / evaluate_on / path.name)
            records[evaluate_on, path] = {
                key: result[key] for key in ("metrics", "history", "train_rows", "test_rows")
            }
    assert records["validation", texts_dir] == records["validation", poisoned]
    assert records["test", texts_dir]["metrics"] != records["test", poisoned]["metrics"]
    assert records["test", texts_dir]["train_rows"] == records["validation", texts_dir]["train_rows"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"evaluate_on": "validation", **SPLIT},
            "evaluate_on is validation, but the recipe has no validation examples",
        ),
        ({"validation_examples": 0.1}, "validation_examples is set, but the recipe does not name its test examples"),
        ({"validation_split": "test"}, "validation_split is set, but the recipe does not name its test examples"),
        ({"validation_examples": 0.1, "validation_split": "b", **SPLIT}, "are both set. Set one of them"),
        ({"validation_split": "test", **SPLIT}, "'test', which is also a training or test split"),
        ({"validation_split": "train", **SPLIT}, "'train', which is also a training or test split"),
        ({"validation_examples": 0.0, **SPLIT}, "validation_examples is 0.0; it must be a share"),
        ({"validation_examples": 1.0, **SPLIT}, "validation_examples is 1.0; it must be a share"),
        ({"evaluate_on": "train", **SPLIT}, "evaluate_on is 'train'"),
    ],
)
def test_invalid_validation_fields_are_rejected(load, data, message):
    with pytest.raises(RecipeError, match=message):
        load({"evaluate_on": "test", **data}, data.get("evaluate_on", "test"))


def test_clients_with_one_example_cannot_hold_out_validation_examples(load):
    with pytest.raises(RecipeError, match="data.validation_examples holds out .* Set data.validation_split"):
        load({**SPLIT, "validation_examples": 0.1}, partition={"name": "natural", "column": "id"})


def test_network_rejects_validation_examples(load, recipe_path):
    load({**SPLIT, "validation_examples": 0.1})
    with pytest.raises(RecipeError, match="data.validation_examples is set, but the parties of a network"):
        load_server_data(load_recipe(recipe_path))
