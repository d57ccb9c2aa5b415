"""Each class is split over the clients, and drawn again until everybody has enough."""

from __future__ import annotations

import numpy as np
import pytest
from partition_checks import count_labels, labelled, mean_divergence, rows_of, shares, skewed_labels

from hf_federated.data import PerClassDirichletPartitioner
from hf_federated.data.partitioners import per_class


def test_shares_of_a_class_have_the_mean_and_variance_of_the_distribution():
    labels = [0] * 600 + [1] * 400
    num_clients, alpha, num_seeds = 4, 2.0, 800
    drawn = []
    for seed in range(num_seeds):
        partition = PerClassDirichletPartitioner(num_clients, alpha=alpha, seed=seed).partition(labelled(labels))
        drawn.append(count_labels(partition, labels)[:, 0] / 600)
    # Dir(alpha * 1_C): each share has mean 1 / C and variance m (1 - m) / (C alpha + 1)
    mean = 1 / num_clients
    variance = mean * (1 - mean) / (num_clients * alpha + 1)
    np.testing.assert_allclose(np.mean(drawn, axis=0), mean, atol=4 * np.sqrt(variance / num_seeds) + 1 / 600)
    np.testing.assert_allclose(np.var(drawn, axis=0), variance, rtol=0.25)


def test_classes_are_split_independently():
    labels = [0, 1] * 500
    drawn = []
    for seed in range(300):
        partition = PerClassDirichletPartitioner(3, alpha=1.0, seed=seed).partition(labelled(labels))
        drawn.append(count_labels(partition, labels)[0])
    assert abs(np.corrcoef(np.array(drawn).T)[0, 1]) < 4 / np.sqrt(300)


def test_a_huge_alpha_splits_every_class_evenly():
    labels = skewed_labels(5000, 5)
    counts = count_labels(PerClassDirichletPartitioner(10, alpha=1e9).partition(labelled(labels)), labels)
    assert np.abs(counts - np.bincount(labels) / 10).max() <= 1


def test_clients_differ_less_the_larger_alpha_is():
    labels = skewed_labels(11_314)
    means = []
    for alpha in (1, 5, 10, 100):
        partition = PerClassDirichletPartitioner(100, alpha=alpha).partition(labelled(labels))
        means.append(mean_divergence(shares(count_labels(partition, labels))))
    assert means == sorted(means, reverse=True)


def test_a_tiny_alpha_gives_whole_tasks_to_single_clients():
    tasks = ["boolq", "cb", "copa", "multirc", "rte", "wic", "wsc", "record"] * 20
    partition = PerClassDirichletPartitioner(4, "task", alpha=1e-6).partition(labelled([0] * 160, task=tasks))
    assert set(count_labels(partition, tasks).ravel().tolist()) == {0, 20}


@pytest.mark.parametrize("min_size", [1, 30])
def test_it_is_drawn_again_until_everybody_has_enough(min_size):
    for seed in range(20):
        partitioner = PerClassDirichletPartitioner(5, alpha=0.3, min_size=min_size, seed=seed)
        assert partitioner.partition(labelled(skewed_labels(300, 4))).sizes.min() >= min_size


def test_draws_that_never_suffice_end_with_what_to_change(monkeypatch):
    monkeypatch.setattr(per_class, "MAX_DRAWS", 50)
    message = "50 draws with alpha=1e-06 .* each of 3 clients has min_size=1 rows; the best left one with 0. Raise"
    with pytest.raises(ValueError, match=message):
        PerClassDirichletPartitioner(3, alpha=1e-6).partition(labelled([0, 1] * 50))  # two labels for three clients


def test_splits_share_the_cuts_of_a_class():
    train, test = skewed_labels(20_000), skewed_labels(10_000, seed=1)
    partitions = PerClassDirichletPartitioner(10, alpha=0.5).partition_splits(
        {"train": labelled(train), "test": labelled(test)}
    )
    first, second = count_labels(partitions["train"], train), count_labels(partitions["test"], test)
    by_class = [counts / counts.sum(axis=0) for counts in (first, second)]
    assert np.abs(by_class[0] - by_class[1]).max() < 0.02  # both are floors: off by a row of some hundreds


def test_a_client_without_rows_of_a_later_split_is_absent_there():
    partitioner = PerClassDirichletPartitioner(6, alpha=0.5)
    train = labelled(skewed_labels(300, 4))
    partitions = partitioner.partition_splits({"train": train, "test": labelled([0, 1, 1])})
    assert len(partitions["train"]) == 6
    assert 1 <= len(partitions["test"]) <= 3
    assert sorted(partitions["test"].indices.tolist()) == [0, 1, 2]


def test_a_class_that_the_first_split_lacks_is_split_as_well():
    partitioner = PerClassDirichletPartitioner(4, alpha=100.0)
    splits = {"train": labelled(["a", "b"] * 100), "test": labelled(["new"] * 100)}
    assert partitioner.partition_splits(splits)["test"].sizes.min() > 10
    assert rows_of(partitioner.partition_splits(splits)["train"]) == rows_of(partitioner.partition(splits["train"]))
