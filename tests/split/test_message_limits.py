"""The size of hidden states that the server of a networked split model accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_runs import whole_model

from hf_federated import SplitModel
from hf_federated.split.body import BodyServer
from hf_federated.split.message_limits import MessageLimits
from hf_federated.split.messages import Forward


# The model has 64 positions and hidden states of size 16.
POSITIONS = 64


def server_of(limits: MessageLimits | None) -> BodyServer:
    split = SplitModel.from_model(whole_model())
    return BodyServer(split.server_body, split.boundary.wire, limits=limits)


def message(batch_size: int, length: int, packed: bool = False, **fields: Any) -> bytes:
    states = torch.ones(batch_size * length, 16)
    positions = (torch.arange(length) % POSITIONS).int()[None] if packed else None
    fields = {"training": True, "grad": True, **fields}
    return Forward("evil", 0, 0, {"values": states}, batch_size, position_ids=positions, **fields).to_bytes()


LIMITS = MessageLimits(batch_size=2, eval_batch_size=4)


def test_packed_row_counts_as_a_whole():
    """The attention of a packed row is quadratic in its length, although its positions restart."""
    server = server_of(LIMITS)
    assert server.answer(message(1, 2 * POSITIONS, packed=True))
    error = (
        "Client 'evil' sent a micro-batch of 1 rows of 129 positions at step 0. The parties agreed to at most 128 "
        "positions in training"
    )
    with pytest.raises(ValueError, match=error):
        server.answer(message(1, 2 * POSITIONS + 1, packed=True))
    # Without an agreement, only the positions are limited.
    assert server_of(None).answer(message(1, 2 * POSITIONS + 1, packed=True))


def test_batch_size_times_length_is_limited():
    server = server_of(LIMITS)
    assert server.answer(message(2, POSITIONS)) and server.answer(message(8, POSITIONS // 4))
    with pytest.raises(ValueError, match="3 rows of 64 positions .* at most 128"):
        server.answer(message(3, POSITIONS))


def test_max_length_limits_every_row():
    server = server_of(MessageLimits(2, 4, max_length=8))
    assert server.answer(message(2, 8))
    for number, length in ((2, 9), (1, 16)):
        with pytest.raises(ValueError, match="at most max_length=8 positions"):
            server.answer(message(number, length, packed=number == 1))
    with pytest.raises(ValueError, match="at most 16 positions in training"):
        server.answer(message(3, 8))


def test_evaluation_has_a_limit_of_its_own():
    server = server_of(LIMITS)
    evaluation = {"training": False, "grad": False}
    assert server.answer(message(8 * 4, POSITIONS, **evaluation))
    with pytest.raises(ValueError, match="at most 2048 positions in evaluation and generation"):
        server.answer(message(8 * 4 + 1, POSITIONS, **evaluation))


def test_caches_of_a_client_have_the_limit_of_an_evaluation():
    server = server_of(MessageLimits(1, 1, max_length=8))
    generation = {"training": False, "grad": False}
    for cache_id in range(5):
        server.answer(message(4, 4, cache_id=cache_id, **generation))
    # Each cache has 16 of 64 positions, so the fifth cache replaces the first one.
    assert [cache_id for _, cache_id in server.caches] == [1, 2, 3, 4]
    server.answer(message(4, 1, cache_id=4, seen=4, **generation))
    assert [cache_id for _, cache_id in server.caches] == [2, 3, 4]
    with pytest.raises(ValueError, match="at most max_length=8"):
        server.answer(message(4, 5, cache_id=4, seen=5, **generation))
