"""A value of a column is a client; small ones are left out or merged, and the first split decides."""

from __future__ import annotations

import pytest
from datasets import Dataset
from partition_checks import rows_of

from hf_federated.data import FederatedDataset, NaturalPartitioner


def said_by(speakers: str) -> Dataset:
    return Dataset.from_dict({"who": list(speakers)})


def sizes(speakers: str, **arguments) -> dict[str, int]:
    return FederatedDataset.from_dataset(said_by(speakers), NaturalPartitioner("who", **arguments)).num_rows


def test_each_value_is_a_client():
    assert rows_of(NaturalPartitioner("who").partition(said_by("bab"))) == {"a": [1], "b": [0, 2]}


def test_from_column_makes_the_same_clients():
    dataset = said_by("abcabcaab")
    clients = FederatedDataset.from_column(dataset, "who", min_rows=3)
    assert rows_of(clients.partition) == rows_of(NaturalPartitioner("who", min_size=3).partition(dataset))


def test_small_values_are_left_out():
    assert sizes("aaabbcddd", min_size=3) == {"a": 3, "d": 3}
    assert sizes("aaabbcddd", min_size=2) == {"a": 3, "b": 2, "d": 3}


def test_small_values_are_merged_in_their_order_until_they_suffice():
    # b + c reach 3, d + e reach 3; f alone does not, and joins the last
    assert sizes("aaaabbcddef", min_size=3, merge_small=True) == {"a": 4, "b+1 more": 3, "d+2 more": 4}


def test_rows_of_merged_values_keep_their_order():
    partition = NaturalPartitioner("who", min_size=3, merge_small=True).partition(said_by("cbabaca"))
    assert rows_of(partition) == {"a": [2, 4, 6], "b+1 more": [0, 1, 3, 5]}


def test_what_does_not_suffice_joins_the_smallest_of_the_others():
    assert sizes("aaaabbbbccccd", min_size=3, merge_small=True) == {"a+1 more": 5, "b": 4, "c": 4}
    assert sizes("aaaabbbccccd", min_size=3, merge_small=True) == {"a": 4, "b+1 more": 4, "c": 4}


def test_all_values_together_may_be_too_few():
    with pytest.raises(ValueError, match="None of the 3 values of 'who' has the 9 rows .* all together have 4"):
        sizes("aabc", min_size=9, merge_small=True)
    with pytest.raises(ValueError, match="None of the 3 values of 'who' has the 3 rows .* the largest has 2"):
        sizes("aabc", min_size=3)


def test_the_largest_are_kept_in_their_order():
    assert sizes("abbcccdddd", max_clients=2) == {"c": 3, "d": 4}
    assert sizes("aabbccd", max_clients=2) == {"a": 2, "b": 2}  # of equals the first
    assert sizes("aab", max_clients=9) == {"a": 2, "b": 1}
    assert sizes("aaabbcddef", min_size=3, merge_small=True, max_clients=1) == {"d+2 more": 4}


def test_the_first_split_decides_who_there_is():
    splits = {"train": said_by("aaabbbcd"), "test": said_by("xcaad")}
    partitions = NaturalPartitioner("who", min_size=2, merge_small=True).partition_splits(splits)
    assert rows_of(partitions["test"]) == {"a": [2, 3], "c+1 more": [1, 4]}  # b has no rows there, x is nobody
    partitions = NaturalPartitioner("who", min_size=2).partition_splits(splits)
    assert rows_of(partitions["test"]) == {"a": [2, 3]}


def test_a_later_split_of_strangers_is_refused():
    with pytest.raises(ValueError, match="no row of the split 'test' belongs to a client of the first one"):
        NaturalPartitioner("who").partition_splits({"train": said_by("ab"), "test": said_by("xy")})


def test_names_that_collide_are_refused():
    dataset = Dataset.from_dict({"who": ["a", "b", "a+1 more", "a+1 more"]})
    with pytest.raises(ValueError, match=r"'a\+1 more' occurs twice"):
        NaturalPartitioner("who", min_size=2, merge_small=True).partition(dataset)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"column": 3}, "column must be the name of a column, got 3"),
        ({"min_size": 0}, "min_size must be a whole number from 1, got 0"),
        ({"min_size": True}, "min_size must be a whole number from 1, got True"),
        ({"max_clients": 0}, "max_clients must be a whole number from 1"),
        ({"merge_small": 1, "min_size": 2}, "merge_small must be True or False, got 1"),
        ({"merge_small": True}, "merge_small needs min_size"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(arguments, message):
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
def test_columns_that_name_nobody_are_refused(column, message):
    dataset = Dataset.from_dict({"who": ["a", None], "score": [0.5, 1.0]})
    with pytest.raises((TypeError, ValueError), match=message):
        NaturalPartitioner(column).partition(dataset)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows, so there are no clients"):
        NaturalPartitioner("who").partition(said_by("ab").select([]))
