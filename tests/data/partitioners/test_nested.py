"""Groups are cut into clients, each group in its own way."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from partition_checks import rows_of, shares_in_splits, skewed_labels

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


def test_every_client_lies_inside_its_group():
    dataset = reviews(900)
    clients = rows_of(BY_DOMAIN.partition(dataset))
    assert list(clients) == [f"{domain}/{i}" for domain in "bhs" for i in range(4)]
    domains = dataset["domain"][:]
    for client_id, numbers in clients.items():
        assert {domains[row] for row in numbers} == {client_id[0]}
    assert sorted(row for numbers in clients.values() for row in numbers) == list(range(900))


def test_groups_with_the_same_rows_are_cut_differently():
    labels = skewed_labels(300, 5)
    dataset = Dataset.from_dict({"domain": ["a"] * 300 + ["b"] * 300, "label": labels * 2})
    clients = rows_of(BY_DOMAIN.partition(dataset))
    assert clients["a/0"] != [row - 300 for row in clients["b/0"]]


def test_a_group_does_not_depend_on_the_others():
    dataset = reviews(600)
    only = [row for row, domain in enumerate(dataset["domain"]) if domain == "h"]
    alone = rows_of(BY_DOMAIN.partition(dataset.select(only)))
    together = rows_of(BY_DOMAIN.partition(dataset))
    assert [[only[row] for row in alone[f"h/{i}"]] for i in range(4)] == [together[f"h/{i}"] for i in range(4)]


def test_splits_of_a_client_are_alike():
    splits = {"train": reviews(12_000), "test": reviews(6000, seed=1)}
    partitions = BY_DOMAIN.partition_splits(splits)
    assert partitions["train"].client_ids == partitions["test"].client_ids
    first, second = shares_in_splits(partitions, splits)
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.9


def test_a_group_that_a_later_split_lacks_has_no_clients_there():
    partitions = BY_DOMAIN.partition_splits({"train": reviews(300), "test": reviews(200, "bx")})
    assert partitions["test"].client_ids == [f"b/{i}" for i in range(4)]


def test_rows_that_the_outer_one_drops_stay_dropped():
    outer = NaturalPartitioner("domain", max_clients=1)
    partition = NestedPartitioner(outer, IidPartitioner(2)).partition(reviews(300))
    assert sorted(partition.indices.tolist()) == sorted(outer.partition(reviews(300)).indices.tolist())


def test_nests_may_be_deep():
    inner = NestedPartitioner(IidPartitioner(2), IidPartitioner(3))
    partitioner = NestedPartitioner(NaturalPartitioner("domain"), inner)
    partition = partitioner.partition(reviews(100))
    assert len(partition) == 18
    assert "h/1/2" in partition.client_ids
    assert sorted(partition.indices.tolist()) == list(range(100))


def test_seeds_are_derived_in_every_process_alike():
    # written down: hash() of a string, which differs between processes, would pass a comparison inside one
    first, second = (QuantityDirichletPartitioner(2, seed=7).reseeded(key) for key in ("a", "b"))
    assert first.seed != second.seed
    state = np.random.SeedSequence([7, 0xE8B7BE43]).generate_state(1)  # the CRC-32 of b"a"
    assert first.seed == state[0]
    assert NaturalPartitioner("domain").reseeded("a") == NaturalPartitioner("domain")


def test_a_group_that_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match="the group 'x' cannot be cut. IidPartitioner: 3 clients cannot share 1 rows"):
        NestedPartitioner(NaturalPartitioner("domain"), IidPartitioner(3)).partition(
            Dataset.from_dict({"domain": ["a", "a", "a", "x"]})
        )


def test_ids_that_collide_are_refused():
    dataset = Dataset.from_dict({"domain": ["a", "a/0"], "ward": ["0/1", "1"]})
    with pytest.raises(ValueError, match="'a/0/1' occurs twice"):
        NestedPartitioner(NaturalPartitioner("domain"), NaturalPartitioner("ward")).partition(dataset)


def test_only_partitioners_nest():
    with pytest.raises(ValueError, match="inner must be a Partitioner, got 4"):
        NestedPartitioner(IidPartitioner(2), 4)
