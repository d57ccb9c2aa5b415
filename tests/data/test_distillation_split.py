"""`split_for_distillation` returns private, public and server parts of the right size."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from hf_federated import FederatedDataset, IidPartitioner, split_for_distillation


@pytest.fixture
def reviews() -> Dataset:
    domains = ["auto"] * 40 + ["baby"] * 100 + ["sport"] * 60
    return Dataset.from_dict({"row": list(range(200)), "domain": domains, "label": [i % 3 for i in range(200)]})


def rows_of(dataset):
    return dataset["row"][:]


def test_fedid_shares_give_private_public_and_server_parts(reviews):
    split = split_for_distillation(reviews, public_share=0.45, server_share=0.05)
    assert [len(part) for part in split] == [100, 90, 10]
    all_rows = rows_of(split.private) + rows_of(split.public) + rows_of(split.server)
    assert sorted(all_rows) == list(range(200))
    assert split.public.column_names == ["row", "domain"]
    assert split.private.column_names == split.server.column_names == ["row", "domain", "label"]
    for part in split:
        assert rows_of(part) == sorted(rows_of(part))


def test_stratified_split_takes_the_same_share_of_each_domain(reviews):
    """AdaFD makes a fifth of each domain public."""
    split = split_for_distillation(reviews, public_share=0.2, stratify_by_column="domain")
    assert split.server is None
    domains, counts = np.unique(split.public["domain"][:], return_counts=True)
    assert dict(zip(domains.tolist(), counts.tolist(), strict=True)) == {"auto": 8, "baby": 20, "sport": 12}


def test_private_part_can_be_partitioned(reviews):
    private = split_for_distillation(reviews, public_share=0.2).private
    clients = FederatedDataset.from_dataset(private, IidPartitioner(8))
    assert set(clients.num_rows.values()) == {20}


def test_federated_dataset_is_stratified_by_client(reviews):
    clients = FederatedDataset.from_column(reviews, "domain", keep_column=True)
    split = split_for_distillation(clients, public_share=0.25, server_share=0.05)
    assert split.private.num_rows == {"auto": 28, "baby": 70, "sport": 42}
    assert split.private.partitioning == clients.partitioning
    assert len(split.public) == 50 and len(split.server) == 10
    kept = [row for client in split.private.values() for row in rows_of(client)]
    assert sorted(kept + rows_of(split.public) + rows_of(split.server)) == list(range(200))
    for name, client in split.private.items():
        assert set(client["domain"][:]) == {name}


def test_split_depends_only_on_the_seed(reviews):
    state = np.random.get_state()[1].copy()
    first, again, other = (split_for_distillation(reviews, public_share=0.3, seed=seed) for seed in (1, 1, 2))
    assert rows_of(first.public) == rows_of(again.public) != rows_of(other.public)
    assert (np.random.get_state()[1] == state).all()


def test_public_rows_are_drawn_uniformly(reviews):
    counts = np.zeros(200)
    for seed in range(400):
        counts[rows_of(split_for_distillation(reviews, public_share=0.25, seed=seed).public)] += 1
    # binomial(400, 0.25): mean 100, standard deviation 8.7; the bound is five standard deviations
    assert counts.mean() == 100 and np.abs(counts - 100).max() < 44


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"public_share": 1.0}, "public_share=1.0, but it must be at least 0 and below 1"),
        ({"public_share": -0.1}, "public_share=-0.1, but it must be"),
        ({"public_share": float("nan")}, "public_share=nan, but it must be"),
        ({"public_share": True}, "public_share=True, but it must be"),
        ({"public_share": 0.6, "server_share": 0.4}, "the public and the private part must not be empty"),
        ({"public_share": 0.0, "server_share": 0.4}, "the public and the private part must not be empty"),
        ({"public_share": 0.5, "label_column": "stars"}, "no column 'stars'"),
        ({"public_share": 0.5, "stratify_by_column": "site"}, "no column 'site'"),
        ({"public_share": 0.001}, "0 public"),
    ],
)
def test_invalid_arguments_raise_value_error(reviews, arguments, message):
    with pytest.raises(ValueError, match=message):
        split_for_distillation(reviews, **arguments)


def test_clients_without_rows_in_a_part_raise_value_error(reviews):
    pairs = FederatedDataset.from_dict({"a": reviews.select([0]), "b": reviews.select([1])})
    with pytest.raises(ValueError, match="client without rows"):
        split_for_distillation(pairs, public_share=0.5)
    with pytest.raises(ValueError, match="0 public"):
        split_for_distillation(pairs, public_share=0.1)
    with pytest.raises(ValueError, match="Remove stratify_by_column"):
        split_for_distillation(pairs, public_share=0.5, stratify_by_column="domain")
