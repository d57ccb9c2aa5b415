"""Tests of the client sizes of `QuantityDirichletPartitioner`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from datasets import Dataset

from hf_federated.data import QuantityDirichletPartitioner
from hf_federated.data.partitioners import quantity
from hf_federated.data.partitioners.quantity import quantity_sizes


def numbered(num_rows: int) -> Dataset:
    return Dataset.from_dict({"number": list(range(num_rows))})


@pytest.mark.parametrize("beta", [1.0, 5.0, 1e6])
def test_sizes_are_differences_of_floors_of_cumulative_shares(monkeypatch, beta):
    drawn = []

    def record(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    draw = quantity.draw_shares
    monkeypatch.setattr(quantity, "draw_shares", record)
    sizes = QuantityDirichletPartitioner(20, beta=beta).partition(numbered(10_000)).sizes.tolist()
    expected, before, cumulated = [], 0, 0.0
    for share in drawn[0][0]:
        cumulated += share
        edge = math.floor(cumulated * 10_000)
        expected.append(edge - before)
        before = edge
    expected[-1] += 10_000 - before
    assert min(expected) >= 1
    assert sizes == expected


def test_sizes_have_the_mean_and_variance_of_the_dirichlet_distribution():
    num_clients, beta = 5, 2.0
    drawn = np.array([quantity_sizes(100_000, num_clients, beta, 1, seed) for seed in range(3000)]) / 100_000
    mean = 1 / num_clients
    variance = mean * (1 - mean) / (num_clients * beta + 1)
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=4 * np.sqrt(variance / 3000))
    np.testing.assert_allclose(drawn.var(axis=0), variance, rtol=0.15)


@pytest.mark.parametrize("beta", [1e-300, 1e-3, 0.1, 1e300])
@pytest.mark.parametrize("min_size", [1, 9, 10])
def test_every_client_has_at_least_min_size_rows(beta, min_size):
    for seed in range(10):
        sizes = quantity_sizes(1000, 100, beta, min_size, seed)
        assert sizes.min() >= min_size
        assert sizes.sum() == 1000


def test_missing_rows_are_taken_in_proportion_to_the_surplus():
    unbounded, bounded = (quantity_sizes(10_000, 10, 0.3, min_size, seed=0) for min_size in (1, 200))
    small = unbounded < 200
    assert small.any()
    assert (bounded[small] == 200).all()
    share = (200 - unbounded[small]).sum() / (unbounded[~small] - 200).sum()
    np.testing.assert_allclose(unbounded[~small] - bounded[~small], share * (unbounded[~small] - 200), atol=2)


def test_rows_are_drawn_at_random():
    partition = QuantityDirichletPartitioner(4, beta=5.0).partition(numbered(10_000))
    means = [partition.rows(i).mean() for i in range(4)]
    assert max(abs(mean - 5000) for mean in means) < 5 * 2887 / np.sqrt(partition.sizes.min())


def test_client_sizes_are_proportional_in_all_splits():
    partitions = QuantityDirichletPartitioner(10, beta=1.0, min_size=5).partition_splits(
        {"train": numbered(10_000), "test": numbered(1000)}
    )
    assert np.abs(partitions["train"].sizes - 10 * partitions["test"].sizes).max() <= 20


def test_single_client_has_all_rows():
    assert QuantityDirichletPartitioner(1).partition(numbered(7)).sizes.tolist() == [7]
