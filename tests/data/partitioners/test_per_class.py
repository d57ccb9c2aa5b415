"""Tests of the partitioner that splits each class across the clients."""

from __future__ import annotations

import numpy as np
import pytest
from partition_checks import (
    client_rows,
    count_labels,
    mean_divergence,
    shares,
    skewed_labels,
    with_labels,
)

from hf_federated.data import PerClassDirichletPartitioner
from hf_federated.data.partitioners import per_class


@pytest.mark.slow
def test_class_shares_have_the_mean_and_variance_of_the_dirichlet_distribution():
    labels = [0] * 600 + [1] * 400
    num_clients, alpha, num_seeds = 4, 2.0, 800
    drawn = []
    for seed in range(num_seeds):
        partition = PerClassDirichletPartitioner(num_clients, alpha=alpha, seed=seed).partition(with_labels(labels))
        drawn.append(count_labels(partition, labels)[:, 0] / 600)
    # Shares follow Dir(alpha * 1_C). Each share has mean m = 1 / C and variance m (1 - m) / (C alpha + 1).
    mean = 1 / num_clients
    variance = mean * (1 - mean) / (num_clients * alpha + 1)
    np.testing.assert_allclose(np.mean(drawn, axis=0), mean, atol=4 * np.sqrt(variance / num_seeds) + 1 / 600)
    np.testing.assert_allclose(np.var(drawn, axis=0), variance, rtol=0.25)


def test_classes_are_split_independently():
    labels = [0, 1] * 500
    drawn = []
    for seed in range(300):
        partition = PerClassDirichletPartitioner(3, alpha=1.0, seed=seed).partition(with_labels(labels))
        drawn.append(count_labels(partition, labels)[0])
    assert abs(np.corrcoef(np.array(drawn).T)[0, 1]) < 4 / np.sqrt(300)


def test_huge_alpha_splits_every_class_evenly():
    labels = skewed_labels(5000, 5)
    counts = count_labels(PerClassDirichletPartitioner(10, alpha=1e9).partition(with_labels(labels)), labels)
    assert np.abs(counts - np.bincount(labels) / 10).max() <= 1


def test_larger_alpha_makes_clients_more_similar():
    labels = skewed_labels(11_314)
    means = []
    for alpha in (1, 5, 10, 100):
        partition = PerClassDirichletPartitioner(100, alpha=alpha).partition(with_labels(labels))
        means.append(mean_divergence(shares(count_labels(partition, labels))))
    assert means == sorted(means, reverse=True)


def test_tiny_alpha_assigns_each_task_to_one_client():
    tasks = ["boolq", "cb", "copa", "multirc", "rte", "wic", "wsc", "record"] * 20
    partition = PerClassDirichletPartitioner(4, "task", alpha=1e-6).partition(with_labels([0] * 160, task=tasks))
    assert set(count_labels(partition, tasks).ravel().tolist()) == {0, 20}


@pytest.mark.parametrize("min_size", [1, 30])
def test_shares_are_redrawn_until_every_client_has_min_size_rows(min_size):
    for seed in range(20):
        partitioner = PerClassDirichletPartitioner(5, alpha=0.3, min_size=min_size, seed=seed)
        assert partitioner.partition(with_labels(skewed_labels(300, 4))).sizes.min() >= min_size


def test_error_after_too_many_draws_suggests_other_settings(monkeypatch):
    monkeypatch.setattr(per_class, "MAX_DRAWS", 50)
    message = (
        "50 draws with alpha=1e-06 .* each of 3 clients has min_size=1 rows. In the best draw, the smallest client has"
        " 0. Increase"
    )
    with pytest.raises(ValueError, match=message):
        PerClassDirichletPartitioner(3, alpha=1e-6).partition(with_labels([0, 1] * 50))  # two labels for three clients


def test_class_shares_are_the_same_in_all_splits():
    train, test = skewed_labels(20_000), skewed_labels(10_000, seed=1)
    partitions = PerClassDirichletPartitioner(10, alpha=0.5).partition_splits(
        {"train": with_labels(train), "test": with_labels(test)}
    )
    first, second = count_labels(partitions["train"], train), count_labels(partitions["test"], test)
    by_class = [counts / counts.sum(axis=0) for counts in (first, second)]
    assert np.abs(by_class[0] - by_class[1]).max() < 0.02  # floors differ by one of a few hundred rows


def test_client_without_rows_is_absent_from_a_later_split():
    partitioner = PerClassDirichletPartitioner(6, alpha=0.5)
    train = with_labels(skewed_labels(300, 4))
    partitions = partitioner.partition_splits({"train": train, "test": with_labels([0, 1, 1])})
    assert len(partitions["train"]) == 6
    assert 1 <= len(partitions["test"]) <= 3
    assert sorted(partitions["test"].indices.tolist()) == [0, 1, 2]


def test_class_absent_from_the_first_split_is_split():
    partitioner = PerClassDirichletPartitioner(4, alpha=100.0)
    splits = {"train": with_labels(["a", "b"] * 100), "test": with_labels(["new"] * 100)}
    assert partitioner.partition_splits(splits)["test"].sizes.min() > 10
    assert client_rows(partitioner.partition_splits(splits)["train"]) == client_rows(
        partitioner.partition(splits["train"])
    )
