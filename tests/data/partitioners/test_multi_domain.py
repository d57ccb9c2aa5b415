"""Tests of the four partitions that have the same sizes and differ only in their diversity."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from datasets import Dataset
from partition_checks import client_rows, count_labels, mean_divergence, shares, shares_in_splits

from hf_federated.data import MultiDomainPartitioner
from hf_federated.data.partitioners.multi_domain import round_shares


DOMAINS = ["auto", "baby", "clothing", "health", "sport"]


def reviews(num_rows: int, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    domains = generator.choice(DOMAINS, num_rows, p=[0.1, 0.15, 0.25, 0.3, 0.2]).tolist()
    stars = generator.choice(5, num_rows, p=[0.1, 0.1, 0.15, 0.25, 0.4]).tolist()
    return Dataset.from_dict({"domain": domains, "label": stars})


def all_four_partitioners(**arguments) -> dict[tuple[bool, bool], MultiDomainPartitioner]:
    """Return the partitioner for each `(diverse_domains, diverse_labels)`."""
    return {
        (domains, labels): MultiDomainPartitioner(
            "domain", diverse_domains=domains, diverse_labels=labels, **arguments
        )
        for domains, labels in product([False, True], repeat=2)
    }


@pytest.mark.parametrize("clients_per_domain", [1, 3])
def test_all_four_partitions_have_the_same_number_and_sizes_of_clients(clients_per_domain):
    dataset = reviews(20_000)
    sizes = set()
    for partitioner in all_four_partitioners(clients_per_domain=clients_per_domain, alpha=1.0).values():
        partition = partitioner.partition(dataset)
        partition.check_rows(20_000)
        assert len(partition) == 5 * clients_per_domain
        sizes |= set(partition.sizes.tolist())
    assert len(sizes) == 1


def test_only_the_requested_properties_are_diverse():
    dataset = reviews(50_000)
    labels, domains = dataset["label"][:], dataset["domain"][:]
    for (diverse_domains, diverse_labels), partitioner in all_four_partitioners(alpha=1.0, seed=2).items():
        partition = partitioner.partition(dataset)
        label_divergence = mean_divergence(np.repeat(shares(count_labels(partition, labels)), 3, axis=0))
        domain_shares = shares(count_labels(partition, domains))
        assert (label_divergence > 0.1) == diverse_labels
        assert (domain_shares.max(axis=1) == 1).all() == diverse_domains
        assert (domain_shares.max(axis=1) < 0.5).all() == (not diverse_domains)


def test_label_diverse_partitions_have_the_same_label_counts():
    dataset = reviews(20_000)
    one, both = (
        MultiDomainPartitioner("domain", diverse_domains=diverse, alpha=1.0).partition(dataset)
        for diverse in (False, True)
    )
    np.testing.assert_array_equal(count_labels(one, dataset["label"][:]), count_labels(both, dataset["label"][:]))


def test_clients_have_the_largest_size_that_the_data_allows():
    dataset = reviews(20_000)
    partition = MultiDomainPartitioner("domain", alpha=1.0, seed=1).partition(dataset)
    counts = count_labels(partition, dataset["label"][:])
    pairs = Counter(zip(dataset["domain"], dataset["label"], strict=True))
    available = np.array([[pairs[domain, star] for star in range(5)] for domain in DOMAINS])
    assert (counts <= available).all()
    # With the same shares and one more row per client, a domain would need more rows of a label than it has. Counts
    # are rounded, so this holds up to one row.
    grown = counts / counts.sum(axis=1, keepdims=True) * (counts.sum(axis=1, keepdims=True) + 2)
    assert (grown + 1 > available).any()


def test_clients_are_named_after_their_domain():
    dataset = reviews(5000)
    assert MultiDomainPartitioner("domain").partition(dataset).client_ids == DOMAINS
    several = MultiDomainPartitioner("domain", clients_per_domain=2, alpha=5.0).partition(dataset)
    assert several.client_ids[:3] == ["auto/0", "auto/1", "baby/0"]
    mixed = MultiDomainPartitioner("domain", diverse_domains=False).partition(dataset)
    assert mixed.client_ids == ["0", "1", "2", "3", "4"]
    domains = np.array(dataset["domain"][:])
    for client_id, rows in client_rows(several).items():
        assert set(domains[rows]) == {client_id[:-2]}


def test_label_shares_have_the_mean_of_the_dirichlet_distribution():
    dataset = reviews(3000)
    prior = np.bincount(dataset["label"][:]) / 3000
    drawn = []
    for seed in range(300):
        partitioner = MultiDomainPartitioner("domain", alpha=3.0, seed=seed)
        drawn.append(shares(count_labels(partitioner.partition(dataset), dataset["label"][:])))
    variance = prior * (1 - prior) / 4
    mean = np.mean(drawn, axis=(0, 1))
    np.testing.assert_allclose(mean, prior, atol=4 * np.sqrt(variance.max() / 1500) + 0.002)


def test_client_has_the_same_label_shares_in_all_splits():
    splits = {"train": reviews(20_000), "test": reviews(8000, seed=1)}
    partitions = MultiDomainPartitioner("domain", alpha=1.0).partition_splits(splits)
    first, second = shares_in_splits(partitions, splits)
    assert np.abs(first - second).max() < 0.02  # rounding error of clients with at least a few hundred rows
    assert partitions["test"].client_ids == partitions["train"].client_ids


def test_label_absent_from_a_domain_has_no_share():
    dataset = Dataset.from_dict({"domain": ["a"] * 100 + ["b"] * 100, "label": [0, 1] * 50 + [0, 2] * 50})
    counts = count_labels(MultiDomainPartitioner("domain", alpha=5.0).partition(dataset), dataset["label"][:])
    assert counts[0, 2] == 0 and counts[1, 1] == 0
    assert counts.min(axis=1).tolist() == [0, 0] and counts.sum() > 20


def test_tiny_alpha_chooses_a_label_of_the_domain():
    dataset = Dataset.from_dict({"domain": ["a"] * 100 + ["b"] * 100, "label": [0, 1] * 50 + [2, 3] * 50})
    for seed in range(10):
        partition = MultiDomainPartitioner("domain", alpha=1e-6, seed=seed).partition(dataset)
        assert count_labels(partition, dataset["label"][:]).max(axis=1).tolist() == [50, 50]


def test_domains_absent_from_the_first_split_are_dropped():
    train = reviews(1000)
    test = Dataset.from_dict({"domain": ["zoo"] * 50 + DOMAINS * 50, "label": [0, 1, 2, 3, 4] * 10 + [4] * 250})
    for partitioner in all_four_partitioners(alpha=20.0).values():
        partition = partitioner.partition_splits({"train": train, "test": test})["test"]
        assert min(partition.indices) >= 50


def test_error_names_the_label_that_runs_out():
    dataset = Dataset.from_dict({"domain": ["a", "b"] * 50, "label": ["x"] * 98 + ["rare"] * 2})
    partitioner = MultiDomainPartitioner("domain", min_size=40, alpha=0.01, seed=3, clients_per_domain=2)
    with pytest.raises(
        ValueError, match="rows per client, but at least 40 are needed. The label .* of the domain .* runs out."
    ):
        partitioner.partition(dataset)


@pytest.mark.parametrize("name", ["diverse_domains", "diverse_labels"])
def test_diversity_settings_must_be_booleans(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'yes'"):
        MultiDomainPartitioner("domain", **{name: "yes"})


def test_empty_dataset_raises_error():
    with pytest.raises(ValueError, match="the first split has no rows"):
        MultiDomainPartitioner("domain").partition(reviews(10).select([]))


def test_rounded_shares_have_the_requested_sum_and_change_by_less_than_one():
    drawn = np.random.default_rng(0).dirichlet(np.ones(6), 50)
    for size in (0, 1, 17, 1000):
        rounded = round_shares(drawn, size)
        assert (rounded.sum(axis=1) == size).all()
        assert np.abs(rounded - drawn * size).max() < 1
