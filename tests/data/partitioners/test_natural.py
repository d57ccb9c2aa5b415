"""Tests of the partitioner that creates one client for each value of a column."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset
from partition_checks import client_rows

from hf_federated.data import FederatedDataset, NaturalPartitioner


def speeches(speakers: str) -> Dataset:
    return Dataset.from_dict({"who": list(speakers)})


def sizes(speakers: str, **arguments) -> dict[str, int]:
    return FederatedDataset.from_dataset(speeches(speakers), NaturalPartitioner("who", **arguments)).num_rows


def test_each_value_becomes_a_client():
    assert client_rows(NaturalPartitioner("who").partition(speeches("bab"))) == {
        "a": [1],
        "b": [0, 2],
    }


def test_from_column_creates_the_same_clients():
    dataset = speeches("abcabcaab")
    clients = FederatedDataset.from_column(dataset, "who", min_rows=3)
    assert client_rows(clients.partition) == client_rows(NaturalPartitioner("who", min_size=3).partition(dataset))


@pytest.mark.parametrize("other", ["north ", " north", "North", "nor\u200bth", "north\x00", "ｎorth", "north\u202e"])
def test_names_that_look_alike_are_separate_clients_with_a_warning(other, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    rows = Dataset.from_dict({"text": list("abcd"), "site": ["north", other, "south", "st. mary"]})
    assert len(FederatedDataset.from_column(rows, "site")) == 4
    (text,) = caplog.messages
    assert "'north'" in text and repr(other) in text and "south" not in text and text.isprintable()
    assert "values of the column 'site' differ in case, whitespace or invisible characters only" in text


def test_names_that_differ_visibly_have_no_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    rows = Dataset.from_dict({"text": list("abcd"), "site": ["north 1", "north 2", "nörth", "north-1"]})
    assert len(FederatedDataset.from_column(rows, "site")) == 4 and not caplog.messages


def test_values_with_fewer_than_min_size_rows_are_dropped():
    assert sizes("aaabbcddd", min_size=3) == {"a": 3, "d": 3}
    assert sizes("aaabbcddd", min_size=2) == {"a": 3, "b": 2, "d": 3}


def test_small_values_are_merged_in_sorted_order_up_to_min_size():
    # b and c have 3 rows together, d and e too. f has too few rows and joins the last merged client.
    assert sizes("aaaabbcddef", min_size=3, merge_small=True) == {"a": 4, "b+1 more": 3, "d+2 more": 4}


def test_rows_of_merged_values_keep_their_order():
    partition = NaturalPartitioner("who", min_size=3, merge_small=True).partition(speeches("cbabaca"))
    assert client_rows(partition) == {"a": [2, 4, 6], "b+1 more": [0, 1, 3, 5]}


def test_remaining_small_value_joins_the_smallest_client():
    assert sizes("aaaabbbbccccd", min_size=3, merge_small=True) == {"a+1 more": 5, "b": 4, "c": 4}
    assert sizes("aaaabbbccccd", min_size=3, merge_small=True) == {"a": 4, "b+1 more": 4, "c": 4}


def test_too_few_rows_for_any_client_raise_error():
    with pytest.raises(
        ValueError,
        match="None of the 3 values of 'who' has at least 9 rows.* all values together have 4",
    ):
        sizes("aabc", min_size=9, merge_small=True)
    with pytest.raises(ValueError, match="None of the 3 values of 'who' has at least 3 rows. The largest has 2"):
        sizes("aabc", min_size=3)


def test_max_clients_keeps_the_largest_clients_in_order():
    assert sizes("abbcccdddd", max_clients=2) == {"c": 3, "d": 4}
    assert sizes("aabbccd", max_clients=2) == {"a": 2, "b": 2}  # a and b have the same size, c is smaller
    assert sizes("aab", max_clients=9) == {"a": 2, "b": 1}
    assert sizes("aaabbcddef", min_size=3, merge_small=True, max_clients=1) == {"d+2 more": 4}


def test_first_split_determines_the_clients():
    splits = {"train": speeches("aaabbbcd"), "test": speeches("xcaad")}
    partitions = NaturalPartitioner("who", min_size=2, merge_small=True).partition_splits(splits)
    assert client_rows(partitions["test"]) == {
        "a": [2, 3],
        "c+1 more": [1, 4],
    }  # b has no test rows, x is not a client
    partitions = NaturalPartitioner("who", min_size=2).partition_splits(splits)
    assert client_rows(partitions["test"]) == {"a": [2, 3]}


def test_later_split_without_known_clients_raises_error():
    with pytest.raises(ValueError, match="no row of the split 'test' belongs to a client of the first split"):
        NaturalPartitioner("who").partition_splits({"train": speeches("ab"), "test": speeches("xy")})


def test_colliding_client_ids_raise_error():
    dataset = Dataset.from_dict({"who": ["a", "b", "a+1 more", "a+1 more"]})
    with pytest.raises(ValueError, match=r"'a\+1 more' occurs twice"):
        NaturalPartitioner("who", min_size=2, merge_small=True).partition(dataset)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"column": 3}, "column must be the name of a column, got 3"),
        ({"min_size": 0}, "min_size must be an integer of at least 1, got 0"),
        ({"min_size": True}, "min_size must be an integer of at least 1, got True"),
        ({"max_clients": 0}, "max_clients must be an integer of at least 1"),
        ({"merge_small": 1, "min_size": 2}, "merge_small must be True or False, got 1"),
        ({"merge_small": True}, "merge_small=True needs min_size"),
    ],
)
def test_invalid_settings_raise_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        NaturalPartitioner(**{"column": "who", **arguments})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("movie", "no column 'movie'"),
        ("score", "'score' has the type double, whose values do not name clients"),
        ("who", "Row 1 has no value in the column 'who'"),
    ],
)
def test_columns_that_cannot_identify_clients_raise_error(column, message):
    dataset = Dataset.from_dict({"who": ["a", None], "score": [0.5, 1.0]})
    with pytest.raises((TypeError, ValueError), match=message):
        NaturalPartitioner(column).partition(dataset)


def test_empty_dataset_raises_error():
    with pytest.raises(ValueError, match="no rows, so there are no clients"):
        NaturalPartitioner("who").partition(speeches("ab").select([]))
