"""`FederatedDatasetDict` partitions, transforms and stores the splits of a federated dataset."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict

from hf_federated import (
    FederatedDataset,
    FederatedDatasetDict,
    IidPartitioner,
    LabelDirichletPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
)
from hf_federated.data import label_counts


def rows(num_rows: int, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    return Dataset.from_dict(
        {
            "text": [f"text {number}" for number in range(num_rows)],
            "site": [f"site {number % 3}" for number in range(num_rows)],
            "label": generator.integers(0, 4, num_rows),
        }
    ).cast_column("label", ClassLabel(num_classes=4))


@pytest.fixture
def splits() -> DatasetDict:
    return DatasetDict(train=rows(2000), test=rows(400, seed=1))


def test_client_has_the_same_label_shares_in_every_split(splits):
    clients = FederatedDatasetDict.from_dataset(splits, LabelDirichletPartitioner(num_clients=8, alpha=0.3))
    train, test = (label_counts(clients[split]).shares for split in ("train", "test"))
    same_client = np.abs(train - test).sum(axis=1)
    other_client = np.abs(train - np.roll(test, 1, axis=0)).sum(axis=1)
    assert same_client.mean() < other_client.mean() / 3
    for split, dataset in splits.items():
        assigned = [text for client in clients[split].values() for text in client["text"][:]]
        assert sorted(assigned) == sorted(dataset["text"][:])


def test_client_and_select_clients_return_all_splits(splits):
    clients = FederatedDatasetDict.from_dataset(splits, NaturalPartitioner("site"))
    assert clients.client_ids == ["site 0", "site 1", "site 2"]
    client = clients.client("site 1")
    assert isinstance(client, DatasetDict) and list(client) == ["train", "test"]
    assert client["test"]["text"][:3] == ["text 1", "text 4", "text 7"]
    selected = clients.select_clients(["site 2", "site 0"])
    assert {split: list(part) for split, part in selected.items()} == {
        "train": ["site 2", "site 0"],
        "test": ["site 2", "site 0"],
    }
    for call in (lambda: clients.client("site 9"), lambda: clients.select_clients(["site 9"])):
        with pytest.raises(KeyError, match=r"no client 'site 9' in any of the splits .*Did you mean 'site \d'"):
            call()


def test_client_may_lack_a_split(splits):
    small = DatasetDict(train=splits["train"], test=splits["test"].select([0, 1]))
    clients = FederatedDatasetDict.from_dataset(small, NaturalPartitioner("site"))
    assert list(clients["test"]) == ["site 0", "site 1"]
    assert list(clients.client("site 2")) == ["train"]
    assert list(clients.select_clients(["site 2"])) == ["train"]
    unequal = FederatedDatasetDict.from_dict({"a": {"train": rows(3), "test": rows(2)}, 7: {"train": rows(4)}})
    assert unequal.num_rows == {"train": {"a": 3, "7": 4}, "test": {"a": 2}}


def test_transformations_apply_to_every_split(splits):
    clients = FederatedDatasetDict.from_dataset(splits, IidPartitioner(4))
    changed = (
        clients.map(lambda row: {"length": len(row["text"])})
        .rename_column("length", "size")
        .remove_columns("site")
        .cast_column("label", ClassLabel(names=["a", "b", "c", "d"]))
    )
    for split in splits:
        assert changed.column_names[split] == ["text", "label", "size"]
        assert changed[split].features["label"].names == ["a", "b", "c", "d"]
        assert changed[split]["2"]["size"][:] == [len(text) for text in clients[split]["2"]["text"][:]]
    assert clients.select_columns(["text"]).column_names == {"train": ["text"], "test": ["text"]}


def test_invalid_splits_and_partitioners_raise_errors(splits):
    with pytest.raises(TypeError, match="expected a DatasetDict with splits, got Dataset"):
        FederatedDatasetDict.from_dataset(splits["train"], IidPartitioner(2))
    with pytest.raises(TypeError, match="'train' is a Dataset, expected a FederatedDataset"):
        FederatedDatasetDict(train=splits["train"])
    with pytest.raises(ValueError, match="is not a valid split name"):
        FederatedDatasetDict({"all": FederatedDataset.from_dict({"a": splits["train"]})})
    with pytest.raises(TypeError, match="expected a Partitioner"):
        FederatedDatasetDict.from_dataset(splits, "iid")


def test_saved_nested_partition_keeps_its_settings(splits, tmp_path):
    partitioner = NestedPartitioner(NaturalPartitioner("site"), LabelDirichletPartitioner(2, alpha=0.5))
    clients = FederatedDatasetDict.from_dataset(splits, partitioner)
    clients.save_to_disk(tmp_path / "clients", label_column="label")
    loaded = FederatedDatasetDict.load_from_disk(tmp_path / "clients")
    assert loaded.client_ids == clients.client_ids and "site 0/1" in loaded.client_ids
    assert loaded["train"].partitioning == clients["train"].partitioning
    assert loaded["test"]["site 2/0"][:] == clients["test"]["site 2/0"][:]
