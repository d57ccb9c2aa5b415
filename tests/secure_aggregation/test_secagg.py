"""Secure aggregation: the sums are exact, and nothing but the sums can be read from what clients send."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from secure_sessions import PHASES, Exchange, names, sum_of, updates

from hf_federated.messages.secure_aggregation import MaskedUpdate
from hf_federated.secure_aggregation import LightSecAgg, SecAgg, SecAggPlus, SecureAggregation
from hf_federated.secure_aggregation.ring import Ring
from hf_federated.secure_aggregation.server_session import SessionFailedError


PROTOCOLS = [SecAgg, SecAggPlus, LightSecAgg]


def check_sum(protocol: SecureAggregation, number: int, lost: dict[str, str]) -> None:
    """Check that the sum is exact, or that too few clients are left for a sum."""
    values, threshold = updates(number, modulus=protocol.modulus), protocol.threshold
    exchange = Exchange(protocol, values, lost)
    submitted = [name for name in values if lost.get(name) not in PHASES[:3]]
    left = [name for name in values if name not in lost]
    # The default needs all clients that advertised keys to be above the majority.
    num_advertised = sum(phase != "keys" for phase in lost.values()) + len(left)
    is_possible = len(left) >= threshold and threshold > num_advertised / 2 and num_advertised >= threshold
    if not is_possible:
        with pytest.raises((SessionFailedError, ValueError)):
            exchange.run()
        return
    total = exchange.run()
    assert exchange.server.survivors == submitted
    assert torch.equal(total, sum_of([values[name] for name in submitted], protocol.modulus))
    assert not exchange.refusals


def losses(number: int):
    """All sets of lost clients, with each phase for each of them."""
    for phases in itertools.product([None, *PHASES], repeat=number):
        yield {name: phase for name, phase in zip(names(number), phases, strict=True) if phase is not None}


@pytest.mark.parametrize(
    ("cls", "threshold"), [(SecAgg, 2), (SecAgg, 3), (SecAggPlus, 2), (LightSecAgg, 2), (LightSecAgg, 3)]
)
@pytest.mark.sampled(3)
def test_sum_is_exact_for_each_set_of_lost_clients_in_each_phase(cls, threshold):
    for lost in losses(3):
        check_sum(cls(threshold=threshold, min_survivors=2), 3, lost)


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("cls", [SecAgg, LightSecAgg])
def test_sum_is_exact_for_each_set_of_lost_clients_of_more_clients(cls, number):
    for lost in losses(number):
        check_sum(cls(threshold=number // 2 + 1, min_survivors=2), number, lost)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [SecAgg, LightSecAgg])
def test_sum_is_exact_for_each_set_of_eight_clients_lost_in_one_phase(cls):
    for phase, size in itertools.product(PHASES, range(9)):
        for lost in itertools.combinations(names(8), size):
            check_sum(cls(threshold=5, min_survivors=2), 8, dict.fromkeys(lost, phase))


@pytest.mark.parametrize("number", [9, 16, 32])
@pytest.mark.parametrize("cls", [SecAgg, LightSecAgg])
def test_sum_is_exact_for_sampled_losses_of_many_clients(cls, number):
    rng = random.Random(number)
    lost = {name: rng.choice(PHASES) for name in rng.sample(names(number), number // 4)}
    check_sum(cls(threshold=number // 2 + 1, min_survivors=2), number, lost)


@pytest.mark.parametrize("cls", PROTOCOLS)
def test_masked_update_of_constant_values_is_uniform(cls):
    """Chi-squared test of the lower three bytes of one masked update, whose encoded update is zero."""
    values = {name: torch.zeros(100_000, dtype=torch.int32) for name in names(3)}
    exchange = Exchange(cls(), values)
    exchange.run()
    masked = exchange.first_masked
    assert isinstance(masked, MaskedUpdate)
    counts = sum(torch.bincount((masked.masked >> place & 255).long(), minlength=256).double() for place in (0, 8, 16))
    expected = counts.sum() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    # 255 degrees of freedom: mean 255, standard deviation 22.6. The bounds are at 6 standard deviations.
    assert 120 < chi_squared < 391


@pytest.mark.parametrize("cls", PROTOCOLS)
def test_masked_updates_of_two_sessions_are_independent(cls):
    modulus = cls().modulus
    values = updates(3, num_values=100_000, modulus=modulus)
    first, second = Exchange(cls(), values), Exchange(cls(), values)
    assert torch.equal(first.run(), second.run())
    bits, num_bits = first.first_masked.masked ^ second.first_masked.masked, Ring(modulus).bits
    share = sum(int((bits >> place & 1).sum()) for place in range(num_bits)) / (num_bits * len(bits))
    # The standard deviation of the share of equal bits is 0.5 / √3 200 000 = 2.8e-4.
    assert abs(share - 0.5) < 1.7e-3


def test_sixteen_bits_wrap_around():
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randint(-(2**15), 2**15, (50,), generator=generator).to(torch.int16) for name in names(4)}
    total = Exchange(SecAgg(bits=16), values, {"client 02": "masked update"}).run()
    assert torch.equal(total, sum(values[name] for name in values if name != "client 02"))


@pytest.mark.parametrize("cls", PROTOCOLS)
def test_update_without_masks_returns_when_a_session_is_withdrawn(cls):
    values = updates(4, modulus=cls().modulus)
    exchange = Exchange(cls(), values)
    exchange.run()
    for name, session in exchange.clients.items():
        assert not torch.equal(exchange.encoded[name], values[name])
        session.withdraw(exchange.encoded[name])
        assert torch.equal(exchange.encoded[name], values[name])


def test_wrong_share_of_one_client_does_not_change_the_sum():
    values = updates(6)

    def spoil(reply):
        shares = {name: share.flip(0) for name, share in reply.seeds.items()}
        return type(reply)(reply.round, reply.client_id, reply.session, shares, reply.mask_keys)

    protocol = SecAgg(threshold=4)
    exchange = Exchange(protocol, values, {"client 05": "masked update"}, spoil={"client 00": spoil})
    total = exchange.run()
    assert torch.equal(total, sum(values[name] for name in exchange.server.survivors))


def test_wrong_shares_of_too_many_clients_fail_the_session():
    values = updates(3)

    def spoil(reply):
        return type(reply)(reply.round, reply.client_id, reply.session, {}, reply.mask_keys)

    with pytest.raises(SessionFailedError, match="2 clients sent a share of a secret of client 'client 00', 3 are"):
        Exchange(SecAgg(), values, spoil={"client 00": spoil}).run()


def test_threshold_protects_against_two_sets_of_survivors():
    assert SecAgg(num_colluding=3).threshold_of(10) == 7
    assert SecAgg(num_colluding=4).threshold_of(10) == 8
    with pytest.raises(ValueError, match="threshold=5 of 10 clients .* Set `threshold` to at least 6"):
        SecAgg(threshold=5).threshold_of(10)
    with pytest.raises(ValueError, match="threshold=11 is above the 10 clients"):
        SecAgg(threshold=11).threshold_of(10)


def test_sum_has_updates_of_two_clients_that_do_not_work_with_the_server():
    """A dishonest server could otherwise form a session of one client and its own clients."""
    assert SecAgg(num_colluding=3).threshold_of(5) == 5
    with pytest.raises(ValueError, match="threshold=5 is above the 4 clients"):
        SecAgg(num_colluding=3).threshold_of(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_weight": 0}, "`max_weight` is 0; it must be positive"),
        ({"clip": -1.0}, "`clip` is -1.0; it must be positive"),
        ({"clip": {"state": 0.0}}, "`clip` is .* it must be positive"),
        ({"bits": 8}, "`bits` is 8; allowed are 16, 32"),
        ({"min_survivors": 1}, "`min_survivors` is 1; it must be at least 2"),
        ({"pins": "maybe"}, "`pins` is 'maybe'; allowed are 'required', 'none'"),
        ({"threshold": 1}, "`threshold` is 1; it must be at least 2"),
        ({"num_colluding": -1}, "`num_colluding` is -1; it must be at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SecAgg(**settings)
