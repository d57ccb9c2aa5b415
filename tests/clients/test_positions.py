"""Positions of public examples, and exchanges in which a tokenizer leaves out some positions."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_federated.clients.positions import ABSENT, Positions


def positions() -> Positions:
    """Examples with 2, 0, 1 and 3 positions. The model cannot predict at the second position of the last example."""
    rows = Dataset.from_dict(
        {"num_positions": [2, 0, 1, 3], "labels": [[-100, 0, 1], [-100], [0], [0, -100, 2, -100]]}
    )
    return Positions.from_dataset(rows, feeds_labels=False)


def test_position_indices_follow_the_order_of_the_examples():
    found = positions()
    assert found.numbers_of([3, 1, 0]).tolist() == [3, 4, 5, 0, 1]
    assert found.seen.tolist() == [True, True, True, True, False, True]
    assert found.agreed_of(torch.tensor([3, 2])).tolist() == [3, 5, 2]
    assert found.agreed_among_seen([3, 2]).tolist() == [True, True, True]
    assert found.index_map([3, 2]).tolist() == [-1, -1, 2, 0, -1, 1]
    assert found.rows_with_agreed([1, 0, 3, 1]).tolist() == [0, 3]
    assert found.numbers_of([]).tolist() == found.rows_with_agreed([1]).tolist() == []


def test_receiver_reads_the_positions_that_the_sender_leaves_out():
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


def test_copies_have_independent_agreed_positions():
    first = positions()
    second = first.copy()
    first.agree([0], torch.tensor([0, 1]))
    assert first.agreed_of([0]).tolist() == [] and second.agreed_of([0]).tolist() == [0, 1]


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
def test_invalid_absent_positions_are_refused(absent):
    with pytest.raises(ValueError, match="must be a one-dimensional int32 tensor of unique ascending indices below 4"):
        positions().take_absent([3, 2], {ABSENT: absent})


def test_targets_of_a_word_that_the_tokenizer_drops_are_refused():
    with pytest.raises(ValueError, match="includes 1 words that this client's tokenizer drops.* position 1 "):
        positions().agree([3, 2], torch.tensor([0]))


def test_public_examples_without_positions_are_refused():
    rows = Dataset.from_dict({"num_positions": [0, 2], "labels": [[-100], [-100, -100]]})
    with pytest.raises(ValueError, match="None of the 2 public examples has a position to predict"):
        Positions.from_dataset(rows, feeds_labels=False).first_seen_row()
    assert positions().first_seen_row() == 0
