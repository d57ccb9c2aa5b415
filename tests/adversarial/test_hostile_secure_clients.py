"""What one hostile client can do to a sum of secure aggregation, which hides what it sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from secure_clients import (
    COHORT,
    HOSTILE,
    MAX_WEIGHT,
    NUM_EXAMPLES,
    RoundFailedError,
    SecAgg,
    SecureEngine,
    SecureRounds,
    Spoil,
    change_of,
)

from hf_federated.messages import ClientUpdate, Message
from hf_federated.messages.secure_aggregation import (
    AdvertisedKeys,
    KeyShares,
    MaskedUpdate,
    SurvivorsSignature,
    UnmaskShares,
)
from hf_federated.secure_aggregation.client_session import keys_content
from hf_federated.secure_aggregation.content import settings_digest, to_bytes, to_tensor
from hf_federated.secure_aggregation.digits import Digits
from hf_federated.secure_aggregation.ring import Ring
from hf_federated.security.keys import Identity


OTHERS = set(COHORT) - {HOSTILE}
NUM_VALUES = 11
# Numbers behind the values, in their order.
NUMBERS = (
    "vectors",
    "num_clipped",
    "weight",
    "updates",
    "extra weight",
    "extra updates",
    "num_examples",
    "num_tokens",
    "num_steps",
    "total_flos",
    "loss",
    "loss_weight",
)
REPLIES = (AdvertisedKeys, KeyShares, MaskedUpdate, SurvivorsSignature, UnmaskShares)


def mean_of(clients: set[str]) -> float:
    return sum(change_of(name) for name in clients) / len(clients)


def protocol() -> SecAgg:
    return SecAgg(max_weight=MAX_WEIGHT)


def run(spoil: Spoil = lambda request, reply: reply, **options: Any) -> tuple[SecureRounds, float, set[str]]:
    """Run a round. Return the mean change, and the clients that are not in it."""
    train = options.pop("train", lambda update: update)
    rounds = SecureRounds(SecureEngine(COHORT, protocol(), spoil, train), **options)
    mean, lost, _ = rounds.run()
    return rounds, mean, lost


def changed(kind: type[Message], **changes: Callable[[Any], Any]) -> Spoil:
    """Change fields of one reply."""

    def spoil(request: Message, reply: Message) -> Message:
        if not isinstance(reply, kind):
            return reply
        return dataclasses.replace(reply, **{name: change(getattr(reply, name)) for name, change in changes.items()})

    return spoil


def added(name: str, number: int) -> Spoil:
    """Add a number to one of those behind the values."""
    digits = Digits(Ring(), len(COHORT))
    start = NUM_VALUES + NUMBERS.index(name) * digits.num_digits

    def change(masked: torch.Tensor) -> torch.Tensor:
        masked[start : start + digits.num_digits] += torch.tensor(digits.split(number), dtype=torch.int32)
        return masked

    return changed(MaskedUpdate, masked=change)


# ---- The values


def test_update_at_the_edge_of_the_ring_moves_the_mean_by_a_bounded_amount():
    """The bound is N · clip · max_weight / Σ weights, with N = 1 client."""

    def train(update: ClientUpdate) -> ClientUpdate:
        if update.client_id != HOSTILE:
            return update
        state = {
            name: torch.full_like(value, 1e30) if value.is_floating_point() else value
            for name, value in update.state.items()
        }
        return dataclasses.replace(update, state=state)

    rounds, mean, lost = run(train=train)
    assert not lost
    bound = MAX_WEIGHT / (NUM_EXAMPLES * len(COHORT))
    honest = sum(change_of(name) for name in OTHERS) / len(COHORT)
    assert mean == pytest.approx(honest + bound, rel=1e-6)
    assert rounds.loop.round.logs["federated/num_clipped"] == NUM_VALUES


def test_sum_moves_by_at_most_the_largest_integers_of_all_clients():
    """Without masks, the integers of one client can fill the range of the sum, and not more."""
    largest = 2 ** (31 - 3) - 1
    honest = sum(change_of(name) for name in COHORT) * NUM_EXAMPLES / MAX_WEIGHT
    room = int((len(COHORT) - honest) * largest) - len(COHORT)

    def add(number: int) -> Spoil:
        return changed(
            MaskedUpdate,
            masked=lambda masked: masked.index_add(0, torch.tensor([3]), torch.tensor([number], dtype=torch.int32)),
        )

    rounds, _, _ = run(add(room))
    bound = len(COHORT) * MAX_WEIGHT / (NUM_EXAMPLES * len(COHORT))
    moved = max(float(rounds.loop.state[name].abs().max()) for name in ("w", "v"))
    assert 0.99 * bound < moved <= bound * (1 + 1e-6)
    with pytest.raises(RoundFailedError, match="A client sent values out of range"):
        run(add(room + 10 * len(COHORT)))


def test_random_integers_fail_the_round():
    """
    The sum is then random too, and at most 5/8 of the integers are possible sums.

    All 11 values are possible sums in .6 % of the rounds, so at least one of four rounds practically always fails.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(masked: torch.Tensor) -> torch.Tensor:
        values = torch.randint(-(2**31), 2**31, (NUM_VALUES,), generator=generator, dtype=torch.int32)
        return torch.cat([values, masked[NUM_VALUES:]])

    with pytest.raises(RoundFailedError, match=r"Round 1, secure aggregation: The sum has integers from -?\d+ to "):
        for _ in range(4):
            run(changed(MaskedUpdate, masked=noise))


def test_client_whose_update_has_nan_fails_before_it_masks():
    def train(update: ClientUpdate) -> ClientUpdate:
        is_hostile = update.client_id == HOSTILE
        return (
            dataclasses.replace(update, state={**update.state, "w": torch.full((5,), math.nan)})
            if is_hostile
            else update
        )

    rounds, mean, lost = run(train=train)
    assert lost == {HOSTILE} and "'w'" in rounds.loop.round.rejected[HOSTILE]
    assert mean == pytest.approx(mean_of(OTHERS), abs=1e-6)


# ---- The numbers


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("weight", -(NUM_EXAMPLES * 5) * 2**64, "the weights of 5 clients have the sum 0, .* above 0 and at most 50"),
        ("weight", -(10**6) * 2**64, "the weights of 5 clients have the sum -.* .`max_weight`."),
        ("weight", 10**6 * 2**64, "the weights of 5 clients have the sum 1.00004e.06, .* at most 50"),
        ("vectors", 1, "contains 6 vectors, but 5 are expected"),
        ("vectors", -1, "contains 4 vectors, but 5 are expected"),
        ("num_examples", 2**63, "the sum of `num_examples` of 5 clients is 9.22337e.18, .* from 0 to 4.5036e.16"),
        ("num_examples", -41, "the sum of `num_examples` of 5 clients is -1, "),
        ("num_tokens", 2**63, "the sum of `num_tokens` of 5 clients"),
        ("num_steps", 2**63, "the sum of `num_steps` of 5 clients"),
        ("num_steps", -(2**63), "the sum of `num_steps` of 5 clients"),
        ("total_flos", -(2**70), "the sum of `total_flos` of 5 clients"),
        ("loss_weight", -(10**6) * 2**64, "the sum of `loss_weight` of 5 clients"),
        ("num_clipped", 2**63, "the sum of `num_clipped` of 5 clients"),
        ("updates", 1, "the mean .state. has 6 updates"),
    ],
)
def test_wrong_numbers_fail_the_round_by_name(name, number, message):
    with pytest.raises(RoundFailedError, match=f"Round 1.*{message}"):
        run(added(name, number))


# ---- The keys and the shares


def other_key(request: Message, reply: Message) -> Message:
    """The client has been started again with another key."""
    if not isinstance(reply, AdvertisedKeys):
        return reply
    identity = Identity.generate(HOSTILE, 2048)
    digest, keys = to_bytes(reply.fit_digest), to_bytes(reply.keys)
    content = keys_content(
        settings_digest(protocol().agreed()), reply.session, reply.round, reply.client_id, digest, keys
    )
    return dataclasses.replace(
        reply, identity=to_tensor(identity.public_key), signature=to_tensor(identity.sign(content))
    )


def flipped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value ^ 1 for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_key, "most clients refused its keys"),
        (changed(KeyShares, envelopes=flipped), "most clients refused its keys or its shares"),
        (changed(KeyShares, envelopes=lambda each: {name: value[None] for name, value in each.items()}), "be read"),
        (changed(KeyShares, envelopes=lambda each: dict(list(each.items())[1:])), "no share for a client"),
        (changed(AdvertisedKeys, signature=lambda value: value ^ 1), "the signature of its keys is not valid"),
        (changed(AdvertisedKeys, identity=lambda value: value[:-1]), "the signature of its keys is not valid"),
        (changed(AdvertisedKeys, fit_digest=lambda value: value ^ 1), "the signature of its keys is not valid"),
        (changed(AdvertisedKeys, keys=lambda value: value[:63]), "its keys have another length"),
        (changed(AdvertisedKeys, keys=lambda value: torch.zeros_like(value)), "gives the same secret"),
        (changed(AdvertisedKeys, session=lambda value: "x"), "its reply belongs to another session"),
        (changed(MaskedUpdate, session=lambda value: "x"), "its reply belongs to another session"),
        (changed(MaskedUpdate, masked=lambda value: value[:-1]), "its vector has the shape"),
        (changed(MaskedUpdate, masked=lambda value: value.to(torch.int64)), "the dtype torch.int64"),
    ],
)
def test_client_with_wrong_keys_or_shares_is_lost_and_the_round_goes_on(spoil, message):
    rounds, mean, lost = run(spoil)
    assert lost == {HOSTILE} and message in rounds.loop.round.rejected[HOSTILE]
    assert mean == pytest.approx(mean_of(OTHERS), abs=1e-6)


@pytest.mark.parametrize(
    "spoil",
    [
        changed(SurvivorsSignature, signature=lambda value: value ^ 1),
        changed(UnmaskShares, seeds=flipped),
        changed(UnmaskShares, seeds=lambda each: {}),
        changed(UnmaskShares, mask_keys=lambda each: {"a": torch.zeros(1)}),
    ],
)
def test_wrong_signature_or_share_of_a_survivor_does_not_change_the_sum(spoil):
    _, mean, lost = run(spoil)
    assert not lost and mean == pytest.approx(mean_of(set(COHORT)), abs=1e-6)


def test_wrong_commitment_of_a_survivor_fails_the_round_by_its_name():
    """The other clients have agreed to the sum, so the session cannot be repeated without the client."""
    with pytest.raises(RoundFailedError, match=f"a secret of client '{HOSTILE}' do not belong together"):
        run(changed(KeyShares, commitment=lambda value: value ^ 1))


@pytest.mark.parametrize("phase", range(1, len(REPLIES)))
def test_reply_of_an_earlier_phase_is_no_reply(phase):
    """A client repeats its last reply instead of the next one."""
    earlier: list[Message] = []

    def repeat(request: Message, reply: Message) -> Message:
        earlier.append(reply)
        is_repeated = isinstance(reply, REPLIES[phase])
        return dataclasses.replace(earlier[-2], nonce=reply.nonce) if is_repeated else reply

    _, mean, lost = run(repeat)
    assert lost == ({HOSTILE} if phase < 3 else set())
    assert mean == pytest.approx(mean_of(set(COHORT) - lost), abs=1e-6)


# ---- Few and many clients


@pytest.mark.parametrize("number", [1, 2])
def test_too_few_clients_are_an_error_with_a_cure(number):
    clients = COHORT[:number]
    with pytest.raises(RoundFailedError, match=f"{number} clients .* at least 3 are needed .*`min_survivors`"):
        SecureRounds(SecureEngine(clients, protocol()), clients, min_clients=1).run()


@pytest.mark.slow
def test_sum_of_64_clients_is_exact():
    """The work of all parties grows with the square of the number of clients: 1.4 ms for a pair of clients."""
    clients = tuple(f"client {each}" for each in range(64))
    rounds = SecureRounds(SecureEngine(clients, protocol()), clients)
    mean, lost, _ = rounds.run()
    assert not lost and mean == pytest.approx(0.01, abs=1e-6)
