"""Tests that apply to all partitioners."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from partition_checks import client_rows, skewed_labels

from hf_federated.data import (
    FeatureClusterPartitioner,
    FederatedDataset,
    IidPartitioner,
    LabelDirichletPartitioner,
    MultiDomainPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
    PerClassDirichletPartitioner,
    QuantityDirichletPartitioner,
)


def lengths(texts: list[str]) -> np.ndarray:
    return np.array([[len(text)] for text in texts])


KEEP_ALL = {
    "iid": IidPartitioner(7, seed=3),
    "quantity": QuantityDirichletPartitioner(7, beta=1.0, seed=3),
    "label": LabelDirichletPartitioner(7, alpha=0.3, seed=3),
    "label x quantity": LabelDirichletPartitioner(7, alpha=0.3, quantity_beta=1.0, seed=3),
    "per class": PerClassDirichletPartitioner(7, alpha=0.3, seed=3),
    "clusters": FeatureClusterPartitioner(7, ["text", "label"], 4, lengths, alpha=0.3, seed=3, batch_size=100),
    "natural": NaturalPartitioner("domain", min_size=3, merge_small=True),
    "nested": NestedPartitioner(NaturalPartitioner("domain"), LabelDirichletPartitioner(3, alpha=0.3, seed=3)),
}
DROP_SOME = {
    "multi-domain": MultiDomainPartitioner("domain", alpha=2.0, clients_per_domain=2, seed=3),
    "domains": MultiDomainPartitioner("domain", diverse_labels=False, seed=3),
    "largest": NaturalPartitioner("domain", max_clients=2),
}
EVERY = {**KEEP_ALL, **DROP_SOME}
every = pytest.mark.parametrize("partitioner", EVERY.values(), ids=EVERY)


def rows(num_rows: int, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    labels = [f"label-{label}" for label in skewed_labels(num_rows, 6, seed)]
    domains = generator.choice(["baby", "health", "sport"], num_rows).tolist()
    texts = ["x" * length for length in generator.integers(1, 100, num_rows)]
    return Dataset.from_dict({"label": labels, "domain": domains, "text": texts, "row": list(range(num_rows))})


@every
def test_no_row_belongs_to_two_clients_and_no_client_is_empty(partitioner):
    partition = partitioner.partition(rows(1000))
    partition.check_rows(1000)
    assert partition.sizes.min() >= 1
    assert partition.indices.dtype == np.int32


@pytest.mark.parametrize("partitioner", KEEP_ALL.values(), ids=KEEP_ALL)
def test_every_row_is_assigned(partitioner):
    assert sorted(partitioner.partition(rows(1003)).indices.tolist()) == list(range(1003))


@every
def test_rows_of_a_client_keep_their_order(partitioner):
    partition = client_rows(partitioner.partition(rows(1000)))
    assert all(indices == sorted(indices) for indices in partition.values())


@every
def test_same_settings_give_the_same_partition_without_using_global_random_generators(partitioner):
    def state() -> list:
        return [np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()]

    before = state()
    first, again = partitioner.partition(rows(1000)), partitioner.partition(rows(1000))
    assert client_rows(first) == client_rows(again)
    assert state() == before


@pytest.mark.parametrize("name", [name for name in EVERY if not isinstance(EVERY[name], NaturalPartitioner)])
def test_different_seed_gives_different_partition(name):
    partitioner, dataset = EVERY[name], rows(1000)
    other = partitioner.reseeded("other")
    assert type(other) is type(partitioner)
    assert client_rows(other.partition(dataset)) != client_rows(partitioner.partition(dataset))


@every
def test_selected_rows_are_partitioned_like_a_copy_of_them(partitioner):
    order = np.random.default_rng(1).permutation(2000)[:1000]
    selected = rows(2000).select(order)
    copied = Dataset.from_dict(selected.to_dict())
    assert client_rows(partitioner.partition(selected)) == client_rows(partitioner.partition(copied))


@every
def test_first_split_gets_the_same_partition_as_alone(partitioner):
    splits = DatasetDict(train=rows(1000), test=rows(400, seed=1))
    partitions = partitioner.partition_splits(splits)
    assert list(partitions) == ["train", "test"]
    assert client_rows(partitions["train"]) == client_rows(partitioner.partition(splits["train"]))
    partitions["test"].check_rows(400)
    assert set(partitions["test"].client_ids) <= set(partitions["train"].client_ids)


@every
def test_sizes_of_clients_agree_between_splits(partitioner):
    partitions = partitioner.partition_splits({"train": rows(6000), "test": rows(3000, seed=1)})
    train, test = (dict(zip(p.client_ids, p.sizes / p.sizes.sum(), strict=True)) for p in partitions.values())
    # Shares are a sixth or more. Partitions by class and by domain add the sampling error of 3000 rows.
    assert all(abs(train[client_id] - test.get(client_id, 0)) < 0.05 for client_id in train)


@every
def test_settings_can_be_stored_as_json(partitioner):
    settings = partitioner.settings()
    assert json.loads(json.dumps(settings)) == settings


def test_settings_include_nested_partitioners_and_functions():
    assert EVERY["nested"].settings()["inner"]["partitioner"] == "LabelDirichletPartitioner"
    assert EVERY["nested"].settings()["inner"]["alpha"] == 0.3
    assert EVERY["clusters"].settings()["embedder"] == "test_every_partitioner.lengths"
    assert EVERY["clusters"].settings()["text_columns"] == ["text", "label"]


@every
def test_from_dataset_creates_the_clients_of_the_partition(partitioner):
    dataset = rows(1000)
    clients = FederatedDataset.from_dataset(dataset, partitioner)
    assert clients.partitioning == {"partitioner": type(partitioner).__name__, **partitioner.settings()}
    expected = client_rows(partitioner.partition(dataset))
    assert {client_id: clients[client_id]["row"][:] for client_id in clients} == expected


@every
def test_partitioner_is_immutable_and_hashable(partitioner):
    assert hash(partitioner) == hash(partitioner)
    with pytest.raises(AttributeError):
        partitioner.seed = 1


@every
def test_invalid_splits_raise_error(partitioner):
    with pytest.raises(TypeError, match="expected a mapping from split name to Dataset, got Dataset. For one"):
        partitioner.partition_splits(rows(10))
    with pytest.raises(ValueError, match="the mapping of splits is empty"):
        partitioner.partition_splits({})
    with pytest.raises(TypeError, match="the split 'train' is a list"):
        partitioner.partition_splits({"train": [1]})


SIZED_PARTITIONERS = [
    IidPartitioner,
    QuantityDirichletPartitioner,
    LabelDirichletPartitioner,
    PerClassDirichletPartitioner,
]


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
@pytest.mark.parametrize("kind", SIZED_PARTITIONERS)
def test_num_clients_must_be_a_positive_integer(kind, value):
    with pytest.raises(
        ValueError, match=f"{kind.__name__}: num_clients must be an integer of at least 1, got {value!r}"
    ):
        kind(num_clients=value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: LabelDirichletPartitioner(2, alpha=value), "alpha"),
        (lambda value: LabelDirichletPartitioner(2, quantity_beta=value), "quantity_beta"),
        (lambda value: PerClassDirichletPartitioner(2, alpha=value), "alpha"),
        (lambda value: QuantityDirichletPartitioner(2, beta=value), "beta"),
        (lambda value: FeatureClusterPartitioner(2, "text", alpha=value), "alpha"),
        (lambda value: MultiDomainPartitioner("domain", alpha=value), "alpha"),
    ],
)
def test_concentration_must_be_finite_and_positive(make, name, value):
    if name == "quantity_beta" and value is None:
        return  # None is the default: all clients have the same size
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0, got {value!r}"):
        make(value)


@pytest.mark.parametrize("value", [-1, 1.5, True])
@pytest.mark.parametrize("kind", SIZED_PARTITIONERS)
def test_seed_must_be_a_non_negative_integer(kind, value):
    with pytest.raises(ValueError, match="seed must be an integer of at least 0"):
        kind(2, seed=value)


@pytest.mark.parametrize("value", [0, 1.5, True])
@pytest.mark.parametrize("kind", SIZED_PARTITIONERS[1:])
def test_min_size_must_be_a_positive_integer(kind, value):
    with pytest.raises(ValueError, match="min_size must be an integer of at least 1"):
        kind(2, min_size=value)


@pytest.mark.parametrize("kind", SIZED_PARTITIONERS)
def test_more_clients_than_rows_raise_error(kind):
    message = "num_clients=6, but 5 rows are too few for 6 clients. Set num_clients to at most 5, or pass more rows"
    with pytest.raises(ValueError, match=message):
        kind(num_clients=6).partition(rows(100).select(range(5)))


@pytest.mark.parametrize("kind", SIZED_PARTITIONERS)
def test_empty_dataset_raises_error(kind):
    with pytest.raises(ValueError, match="num_clients=2, but 0 rows are too few for 2 clients. Pass more rows"):
        kind(num_clients=2).partition(rows(100).select([]))


@pytest.mark.parametrize("kind", SIZED_PARTITIONERS[1:])
def test_too_few_rows_for_min_size_raise_error(kind):
    message = (
        "100 rows are too few for 3 clients with at least 40 each. Set num_clients to at most 2 or lower min_size"
    )
    with pytest.raises(ValueError, match=message):
        kind(num_clients=3, min_size=40).partition(rows(100))


@pytest.mark.parametrize("kind", SIZED_PARTITIONERS[1:3])
def test_error_names_later_split_with_fewer_rows_than_clients(kind):
    with pytest.raises(ValueError, match="num_clients=8, but 5 rows of the split 'test' are too few for 8 clients"):
        kind(num_clients=8).partition_splits({"train": rows(100), "test": rows(100).select(range(5))})


@pytest.mark.parametrize("kind", [LabelDirichletPartitioner, PerClassDirichletPartitioner])
def test_columns_without_labels_raise_error(kind):
    dataset = Dataset.from_dict({"score": [0.5, 1.0], "label": ["a", None]})
    with pytest.raises(ValueError, match="There is no column 'class'. The columns are: score, label"):
        kind(2, "class").partition(dataset)
    with pytest.raises(TypeError, match="'score' has the type double, whose values are no class labels"):
        kind(2, "score").partition(dataset)
    with pytest.raises(ValueError, match="Row 1 has no label in the column 'label'"):
        kind(2).partition(dataset)
    with pytest.raises(ValueError, match="label_column must be the name of a column, got 3"):
        kind(2, 3)
