"""Labels without names become a `ClassLabel`, in the same way for datasets and federated datasets."""

from __future__ import annotations

import pytest
from datasets import ClassLabel, Dataset

from hf_federated import FederatedDataset
from hf_federated.experiments.data.label_encoding import encode_labels
from hf_federated.experiments.recipe.schema import RecipeError


def labels(*values: object) -> Dataset:
    return Dataset.from_dict({"label": list(values), "site": [str(number % 2) for number in range(len(values))]})


def named(names: list[str], *values: int) -> Dataset:
    return labels(*values).cast_column("label", ClassLabel(names=names))


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        (["good", "bad", "good"], ["poor"], ["bad", "good", "poor"]),
        ([10, 1, 5], [1], ["1", "5", "10"]),
        ([1, 0], [0], ["0", "1"]),
        (["good", None, "bad"], [None], ["bad", "good"]),
        ([5.0, 1.0], [1.0], ["1.0", "5.0"]),
    ],
)
@pytest.mark.parametrize("is_federated", [False, True])
def test_names_are_the_sorted_values_of_all_splits(train, test, names, is_federated, tmp_path):
    splits = {"train": labels(*train), "test": labels(*test)}
    if is_federated:
        for split, rows in splits.items():
            FederatedDataset.from_column(rows, "site").save_to_disk(tmp_path / split)
            splits[split] = FederatedDataset.load_from_disk(tmp_path / split)
    encoded = encode_labels(splits, "label")
    for split, values in (("train", train), ("test", test)):
        rows = encoded[split].to_dataset() if is_federated else encoded[split]
        feature = rows.features["label"]
        assert feature.names == names
        found = [None if number is None else feature.int2str(number) for number in rows["label"]]
        order = sorted(range(len(values)), key=lambda position: position % 2) if is_federated else range(len(values))
        assert found == [None if values[position] is None else str(values[position]) for position in order]


def test_federated_dataset_keeps_the_rows_of_its_clients(tmp_path):
    clients = FederatedDataset.from_column(labels("b", "a", "b", "c"), "site")
    encoded = encode_labels({"train": clients}, "label")["train"]
    assert {client_id: rows["label"][:] for client_id, rows in encoded.items()} == {"0": [1, 1], "1": [0, 2]}


def test_class_labels_are_unchanged_and_name_the_strings_of_other_splits():
    splits = {"train": named(["good", "bad"], 0, 1), "test": labels("bad", "good", "bad")}
    encoded = encode_labels(splits, "label")
    assert encoded["train"] is splits["train"]
    assert encoded["test"]["label"][:] == [1, 0, 1] and encoded["test"].features["label"].names == ["good", "bad"]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (labels("a", "b"), labels(0, 1), "are names in the split 'train' and numbers in the split 'test'"),
        (named(["a", "b"], 0, 1), labels(0, 1), "are names in the split 'train' and numbers in the split 'test'"),
        (named(["a", "b"], 0, 1), labels("a", "c"), "the label 'c' .* is not a label of the split 'train'.*a, b"),
        (named(["a", "b"], 0, 1), named(["b", "a"], 0), "differ in the label names .*: a, b and b, a"),
        (labels(0.5, 1.0), labels(0.5), "has values that are not integers"),
        (
            labels("a", "b"),
            labels("a").remove_columns("label"),
            "the column 'label' does not exist in the split 'test'",
        ),
    ],
)
def test_labels_that_cannot_be_matched_are_rejected(train, test, message):
    with pytest.raises(RecipeError, match=message):
        encode_labels({"train": train, "test": test}, "label")
