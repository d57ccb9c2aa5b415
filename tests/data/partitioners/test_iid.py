"""Tests of `IidPartitioner`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from datasets import Dataset

from hf_federated.data import IidPartitioner


def numbered(num_rows: int) -> Dataset:
    return Dataset.from_dict({"number": list(range(num_rows))})


def test_every_row_is_assigned_once_and_sizes_differ_by_at_most_one():
    partition = IidPartitioner(num_clients=7, seed=3).partition(numbered(100))
    assert sorted(partition.indices.tolist()) == list(range(100))
    assert partition.sizes.tolist() == [15, 15, 14, 14, 14, 14, 14]  # 100 = 7 * 14 + 2
    assert partition.client_ids == ["0", "1", "2", "3", "4", "5", "6"]


def test_equal_numbers_of_clients_and_rows_give_one_row_each():
    assert IidPartitioner(num_clients=5).partition(numbered(5)).sizes.tolist() == [1] * 5


def test_rows_of_a_client_keep_the_order_of_the_dataset():
    partition = IidPartitioner(num_clients=3, seed=1).partition(numbered(50))
    for position in range(3):
        rows = partition.rows(position)
        assert (np.diff(rows) > 0).all()


def test_seed_determines_the_partition():
    dataset = numbered(200)
    first, again, other = (IidPartitioner(num_clients=4, seed=seed).partition(dataset) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.indices, again.indices)
    assert not np.array_equal(first.indices, other.indices)


def test_global_random_generators_do_not_change():
    np.random.seed(0)
    random.seed(0)
    before = np.random.get_state()[1].copy(), random.getstate()
    IidPartitioner(num_clients=4).partition(numbered(40))
    np.testing.assert_array_equal(np.random.get_state()[1], before[0])
    assert random.getstate() == before[1]


def test_clients_have_the_label_shares_of_the_dataset():
    labels = np.arange(10_000) // 5000  # sorted, so a contiguous partition would give clients with one label
    partition = IidPartitioner(num_clients=10, seed=0).partition(numbered(10_000))
    shares = [labels[partition.rows(position)].mean() for position in range(10)]
    # Drawing 1000 of 10 000 rows without replacement: the standard deviation is below sqrt(0.25 / 1000) = 0.016.
    assert max(abs(share - 0.5) for share in shares) < 4 * 0.016


def test_settings_are_the_constructor_arguments():
    assert IidPartitioner(num_clients=3, seed=5).settings() == {"num_clients": 3, "seed": 5}


def test_more_clients_than_rows_raise_error():
    with pytest.raises(ValueError, match="5 rows are too few for 6 clients. Set num_clients to at most 5"):
        IidPartitioner(num_clients=6).partition(numbered(5))


@pytest.mark.parametrize("arguments", [{"num_clients": 0}, {"num_clients": 2.5}, {"num_clients": True}])
def test_num_clients_must_be_a_positive_integer(arguments):
    with pytest.raises(ValueError, match="num_clients must be an integer of at least 1"):
        IidPartitioner(**arguments)


def test_seed_must_be_a_non_negative_integer():
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        IidPartitioner(num_clients=2, seed=-1)
