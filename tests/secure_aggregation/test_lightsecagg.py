"""LightSecAgg: the server decodes the sum of the masks from sums of shares, and checks what clients send."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from secure_sessions import PHASES, Exchange, names, sum_of, updates

from hf_federated.messages.secure_aggregation import UnmaskShares
from hf_federated.secure_aggregation import LightSecAgg
from hf_federated.secure_aggregation.coded_masks import CodedMasks
from hf_federated.secure_aggregation.masks import ClientMasks, MaskPlace
from hf_federated.secure_aggregation.server_session import SessionFailedError
from hf_federated.security.prime_field import PRIME


def field_updates(number: int, num_values: int = 50) -> dict[str, torch.Tensor]:
    return updates(number, num_values, modulus=PRIME)


@pytest.mark.parametrize(("number", "threshold", "num_private"), [(8, 6, 3), (16, 11, 5)])
@pytest.mark.parametrize("phase", [None, *PHASES])
def test_sum_equals_that_of_python_integers(number, threshold, num_private, phase):
    """The products of these codes exceed 64-bit integers."""
    values = field_updates(number, 101)
    lost = {} if phase is None else dict.fromkeys(random.Random(0).sample(names(number), number - threshold), phase)
    exchange = Exchange(LightSecAgg(threshold=threshold, num_private=num_private), values, lost)
    total = exchange.run()
    assert torch.equal(total, sum_of([values[name] for name in exchange.server.survivors], PRIME))


def test_sum_is_exact_from_each_set_of_replies():
    values = field_updates(5)
    for spoiled in itertools.combinations(names(5), 2):
        spoil = dict.fromkeys(spoiled, replaced(None))
        total = Exchange(LightSecAgg(threshold=3), values, spoil=spoil).run()
        assert torch.equal(total, sum_of(list(values.values()), PRIME))


def test_largest_values_wrap_around():
    values = {name: torch.full((7,), PRIME - 1, dtype=torch.int32) for name in names(4)}
    assert Exchange(LightSecAgg(), values).run().tolist() == [PRIME - 4] * 7


def test_parts_have_the_announced_size():
    protocol = LightSecAgg(threshold=7, num_private=3)
    masks = protocol.client_masks()
    parts = masks.split(MaskPlace("client 00", b""), names(10), 7, 50)
    assert {len(part) for part in parts.values()} == {masks.part_bytes(10, 7, 50)} == {4 * 13}


# ---- Hostile clients


def replaced(mask_sum: torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Any], UnmaskShares]:
    def change(reply: UnmaskShares) -> UnmaskShares:
        return dataclasses.replace(reply, mask_sum=mask_sum(reply.mask_sum) if callable(mask_sum) else mask_sum)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "The sum of shares of client 'client 01' is missing"),
        (lambda sums: sums[:-1], r"'client 01' has shape \(24,\)"),
        (lambda sums: sums.reshape(1, -1), r"'client 01' has shape \(1, 25\)"),
        (lambda sums: sums.to(torch.int64), "dtype torch.int64"),
        (lambda sums: sums.index_fill(0, torch.tensor([3]), PRIME), "'client 01' has values from"),
        (lambda sums: sums.index_fill(0, torch.tensor([3]), -1), "'client 01' has values from"),
    ],
)
def test_sum_of_shares_that_cannot_be_used_is_left_out(change, message):
    values, protocol = field_updates(4), LightSecAgg(threshold=3)
    total = Exchange(protocol, values, spoil={"client 01": replaced(change)}).run()
    assert torch.equal(total, sum_of(list(values.values()), PRIME))
    with pytest.raises(
        SessionFailedError, match=f"2 clients sent a sum of shares of masks, 3 are needed. .*{message}"
    ):
        Exchange(protocol, values, {"client 03": "unmasking"}, spoil={"client 01": replaced(change)}).run()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda part: part[:-4], "The share of the mask of client 'client 03' has 96 bytes, but it must have 100"),
        (lambda part: b"\xff" * len(part), "The share of the mask of client 'client 03' has values"),
    ],
)
def test_share_that_cannot_be_used_fails_the_session(part, message):
    class Hostile(CodedMasks):
        def split(self, *args: Any) -> dict[str, bytes]:
            return {name: part(share) for name, share in super().split(*args).items()}

    class WithHostileClient(LightSecAgg):
        def client_masks(self) -> ClientMasks:
            cls = Hostile if next(numbers) == 3 else CodedMasks
            return cls(self.num_private_of)

    numbers = itertools.count()
    exchange = Exchange(WithHostileClient(threshold=3), field_updates(4))
    with pytest.raises(SessionFailedError, match="0 clients sent a sum of shares of masks, 3 are needed"):
        exchange.run()
    assert all(message in exchange.refusals[name] for name in names(3))


# ---- Settings


def test_default_numbers_follow_from_the_number_of_clients():
    protocol = LightSecAgg()
    numbers = [(protocol.threshold_of(number), protocol.num_private_of(number)) for number in (2, 3, 10, 16)]
    assert numbers == [(2, 1), (3, 1), (7, 3), (11, 5)]
    assert LightSecAgg(num_colluding=4).num_private_of(10) == 4


def test_settings_that_hide_nothing_or_reveal_nothing_are_refused():
    with pytest.raises(ValueError, match="num_private=7 is not below threshold=7 of 10 clients"):
        LightSecAgg(num_private=7).threshold_of(10)
    with pytest.raises(ValueError, match="threshold=7 of 10 clients does not protect .* num_colluding=5 clients"):
        LightSecAgg(threshold=7, num_private=5, num_colluding=5).threshold_of(10)
    with pytest.raises(ValueError, match="num_colluding=3 is above num_private=2"):
        LightSecAgg(num_private=2, num_colluding=3)
    with pytest.raises(ValueError, match="`bits` is 16; LightSecAgg allows 32 only"):
        LightSecAgg(bits=16)
    with pytest.raises(ValueError, match="`num_private` is 0; it must be at least 1"):
        LightSecAgg(num_private=0)
