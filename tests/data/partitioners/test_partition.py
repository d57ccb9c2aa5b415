"""Tests of the `Partition` class and its error messages."""

from __future__ import annotations

import numpy as np
import pytest

from hf_federated.data import Partition
from hf_federated.data.partitioners.base import row_index_dtype


def test_from_owners_groups_rows_and_drops_rows_without_owner():
    partition = Partition.from_owners(["a", "b"], np.array([1, -1, 0, 1, 0]))
    assert partition.rows(0).tolist() == [2, 4]
    assert partition.rows(1).tolist() == [0, 3]
    assert partition.indices.dtype == np.int32


def test_from_owners_supports_more_than_32767_clients():
    owners = np.arange(40_000)[::-1].copy()
    partition = Partition.from_owners([str(i) for i in range(40_000)], owners)
    np.testing.assert_array_equal(partition.indices, owners)


def test_row_indices_use_int64_only_if_needed():
    assert row_index_dtype(2**31 - 1) is np.int32
    assert row_index_dtype(2**31) is np.int64


def test_select_returns_clients_in_the_requested_order():
    partition = Partition.from_owners(["a", "b", "c"], np.array([0, 1, 2, 1, 0])).select([2, 0])
    assert partition.client_ids == ["c", "a"]
    assert [partition.rows(i).tolist() for i in range(2)] == [[2], [0, 4]]


@pytest.mark.parametrize(
    ("ids", "indices", "offsets", "message"),
    [
        (["a", "a"], [0, 1], [0, 1, 2], "'a' occurs twice"),
        (["a", ""], [0, 1], [0, 1, 2], "empty string"),
        (["a", 3], [0, 1], [0, 1, 2], "must be a string, got 3"),
        (["a", "b"], [0, 1], [0, 2], "2 clients need 3 offsets"),
        (["a", "b"], [0, 1], [0, 1, 3], "must increase from 0 to the number of indices"),
        (["a", "b"], [0.0, 1.0], [0, 1, 2], "one-dimensional array of integers"),
        (["a", "b", "c"], [0, 1], [0, 0, 2, 2], "cannot train: 'a', 'c'"),
    ],
)
def test_inconsistent_partition_raises_error(ids, indices, offsets, message):
    with pytest.raises(ValueError, match=message):
        Partition(ids, np.array(indices), np.array(offsets))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 5], "names row 5, but the dataset has the rows 0 to 4"),
        ([0, -1], "names row -1"),
        ([3, 3], "assigns row 3 2 times"),
    ],
)
def test_partition_that_does_not_fit_the_dataset_raises_error(indices, message):
    partition = Partition(["a", "b"], np.array(indices), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match=message):
        partition.check_rows(5)
