"""Which positions public rows have, and how an exchange is narrowed down to some of them."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_federated.clients.positions import ABSENT, Positions


def positions() -> Positions:
    """Rows of two, none, one and three positions; the second of the last is not seen."""
    rows = Dataset.from_dict(
        {"num_positions": [2, 0, 1, 3], "labels": [[-100, 0, 1], [-100], [0], [0, -100, 2, -100]]}
    )
    return Positions.from_dataset(rows, feeds_labels=False)


def test_numbers_follow_the_order_of_the_rows():
    found = positions()
    assert found.numbers_of([3, 1, 0]).tolist() == [3, 4, 5, 0, 1]
    assert found.seen.tolist() == [True, True, True, True, False, True]
    assert found.agreed_of(torch.tensor([3, 2])).tolist() == [3, 5, 2]
    assert found.agreed_among_seen([3, 2]).tolist() == [True, True, True]
    assert found.index_map([3, 2]).tolist() == [-1, -1, 2, 0, -1, 1]
    assert found.rows_with_agreed([1, 0, 3, 1]).tolist() == [0, 3]
    assert found.numbers_of([]).tolist() == found.rows_with_agreed([1]).tolist() == []


def test_what_one_side_leaves_out_the_other_reads():
    sender, receiver = positions(), positions()
    sent = sender.add_absent([3, 2], {"values": torch.zeros(3, 2)})
    assert sent[ABSENT].tolist() == [1] and sent[ABSENT].dtype == torch.int32
    values, absent = receiver.take_absent([3, 2], sent)
    assert list(values) == ["values"] and absent.tolist() == [1]
    receiver.agree([3, 2], torch.tensor([1, 3]))
    assert receiver.agreed_of([3, 2]).tolist() == [3, 5]
    assert receiver.agreed_among_seen([3, 2]).tolist() == [True, True, False]
    receiver.agree([3, 2])
    assert receiver.agreed_of([3, 2]).tolist() == [3, 5, 2]
    assert ABSENT not in sender.add_absent([0, 2], {})


def test_copies_are_narrowed_one_by_one():
    one = positions()
    other = one.copy()
    one.agree([0], torch.tensor([0, 1]))
    assert one.agreed_of([0]).tolist() == [] and other.agreed_of([0]).tolist() == [0, 1]


@pytest.mark.parametrize(
    "absent",
    [
        torch.tensor([1], dtype=torch.int64),
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        torch.tensor([-1], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
        torch.tensor([2, 1], dtype=torch.int32),
        torch.tensor([2, -(2**31), 3], dtype=torch.int32),
    ],
)
def test_places_that_are_none_are_refused(absent):
    with pytest.raises(ValueError, match="expected int32 places below 4"):
        positions().take_absent([3, 2], {ABSENT: absent})


def test_targets_of_a_word_that_is_not_seen_are_refused():
    with pytest.raises(ValueError, match="about 1 words of which this client's tokenizer keeps nothing.* position 1 "):
        positions().agree([3, 2], torch.tensor([0]))


def test_rows_without_anything_to_predict_are_refused():
    rows = Dataset.from_dict({"num_positions": [0, 2], "labels": [[-100], [-100, -100]]})
    with pytest.raises(ValueError, match="None of the 2 public rows has anything to predict"):
        Positions.from_dataset(rows, feeds_labels=False).first_seen_row()
    assert positions().first_seen_row() == 0
