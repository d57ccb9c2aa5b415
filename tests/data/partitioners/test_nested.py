"""Tests of the partitioner that partitions each group of another partitioner into clients."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from partition_checks import client_rows, shares_in_splits, skewed_labels

from hf_federated.data import (
    IidPartitioner,
    LabelDirichletPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
    QuantityDirichletPartitioner,
)


def reviews(num_rows: int, domains: str = "bhs", seed: int = 0) -> Dataset:
    drawn = np.random.default_rng(seed).choice(list(domains), num_rows).tolist()
    return Dataset.from_dict({"domain": drawn, "label": skewed_labels(num_rows, 5, seed)})


BY_DOMAIN = NestedPartitioner(NaturalPartitioner("domain"), LabelDirichletPartitioner(4, alpha=0.5))


def test_every_client_has_rows_of_one_group():
    dataset = reviews(900)
    clients = client_rows(BY_DOMAIN.partition(dataset))
    assert list(clients) == [f"{domain}/{i}" for domain in "bhs" for i in range(4)]
    domains = dataset["domain"][:]
    for client_id, indices in clients.items():
        assert {domains[row] for row in indices} == {client_id[0]}
    assert sorted(row for indices in clients.values() for row in indices) == list(range(900))


def test_groups_with_the_same_rows_are_partitioned_differently():
    labels = skewed_labels(300, 5)
    dataset = Dataset.from_dict({"domain": ["a"] * 300 + ["b"] * 300, "label": labels * 2})
    clients = client_rows(BY_DOMAIN.partition(dataset))
    assert clients["a/0"] != [row - 300 for row in clients["b/0"]]


def test_clients_of_a_group_do_not_depend_on_other_groups():
    dataset = reviews(600)
    only = [row for row, domain in enumerate(dataset["domain"]) if domain == "h"]
    alone = client_rows(BY_DOMAIN.partition(dataset.select(only)))
    together = client_rows(BY_DOMAIN.partition(dataset))
    assert [[only[row] for row in alone[f"h/{i}"]] for i in range(4)] == [together[f"h/{i}"] for i in range(4)]


def test_client_has_the_same_label_shares_in_all_splits():
    splits = {"train": reviews(12_000), "test": reviews(6000, seed=1)}
    partitions = BY_DOMAIN.partition_splits(splits)
    assert partitions["train"].client_ids == partitions["test"].client_ids
    first, second = shares_in_splits(partitions, splits)
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.9


def test_group_absent_from_a_later_split_has_no_clients_in_it():
    partitions = BY_DOMAIN.partition_splits({"train": reviews(300), "test": reviews(200, "bx")})
    assert partitions["test"].client_ids == [f"b/{i}" for i in range(4)]


def test_rows_dropped_by_the_outer_partitioner_stay_dropped():
    outer = NaturalPartitioner("domain", max_clients=1)
    partition = NestedPartitioner(outer, IidPartitioner(2)).partition(reviews(300))
    assert sorted(partition.indices.tolist()) == sorted(outer.partition(reviews(300)).indices.tolist())


def test_nested_partitioners_can_be_nested():
    inner = NestedPartitioner(IidPartitioner(2), IidPartitioner(3))
    partitioner = NestedPartitioner(NaturalPartitioner("domain"), inner)
    partition = partitioner.partition(reviews(100))
    assert len(partition) == 18
    assert "h/1/2" in partition.client_ids
    assert sorted(partition.indices.tolist()) == list(range(100))


def test_derived_seeds_are_the_same_in_every_process():
    # The expected seed is a constant. A comparison inside one process would not detect the use of hash() of a string,
    # which differs between processes.
    first, second = (QuantityDirichletPartitioner(2, seed=7).reseeded(key) for key in ("a", "b"))
    assert first.seed != second.seed
    state = np.random.SeedSequence([7, 0xE8B7BE43]).generate_state(1)  # the CRC-32 of b"a"
    assert first.seed == state[0]
    assert NaturalPartitioner("domain").reseeded("a") == NaturalPartitioner("domain")


def test_error_names_the_group_that_cannot_be_partitioned():
    message = "cannot partition the group 'x'. IidPartitioner: num_clients=3, but 1 rows are too few for 3 clients"
    with pytest.raises(ValueError, match=message):
        NestedPartitioner(NaturalPartitioner("domain"), IidPartitioner(3)).partition(
            Dataset.from_dict({"domain": ["a", "a", "a", "x"]})
        )


def test_colliding_client_ids_raise_error():
    dataset = Dataset.from_dict({"domain": ["a", "a/0"], "ward": ["0/1", "1"]})
    with pytest.raises(ValueError, match="'a/0/1' occurs twice"):
        NestedPartitioner(NaturalPartitioner("domain"), NaturalPartitioner("ward")).partition(dataset)


def test_arguments_must_be_partitioners():
    with pytest.raises(ValueError, match="inner must be a Partitioner, got 4"):
        NestedPartitioner(IidPartitioner(2), 4)
