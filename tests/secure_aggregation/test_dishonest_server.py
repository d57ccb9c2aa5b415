"""What each client refuses to a server that breaks the protocol of secure aggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from secure_sessions import Exchange, names, request_for

from hf_federated.messages import Message
from hf_federated.messages.secure_aggregation import (
    ConfirmSurvivors,
    KeyShares,
    ShareKeys,
    SubmitMasked,
    Unmask,
    UnmaskShares,
)
from hf_federated.secure_aggregation import SecAgg
from hf_federated.secure_aggregation.client_session import ClientSession, keys_content
from hf_federated.secure_aggregation.content import fit_digest, settings_digest, to_bytes, to_tensor
from hf_federated.secure_aggregation.credentials import Credentials, simulated_identity
from hf_federated.secure_aggregation.server_session import SessionFailedError
from hf_federated.security.keys import Identity
from hf_federated.security.masks import generate_exchange_key


VICTIM = "client 00"
VALUES = {name: torch.arange(20, dtype=torch.int32) for name in names(5)}
Change = Callable[[Any], Message]


def refusal(kind: type[Message], change: Change, lost: Mapping[str, str] | None = None, **settings: Any) -> str:
    """Run a session in which the server changes its request of one kind to one client. Return why it is refused."""

    def dishonest(request: Message) -> Message:
        is_changed = isinstance(request, kind) and request.client_id == VICTIM
        return change(request) if is_changed else request

    exchange = Exchange(SecAgg(**settings), VALUES, lost or {}, dishonest)
    try:
        exchange.run()
    except SessionFailedError:
        pass
    assert exchange.refusals.keys() == {VICTIM}
    return exchange.refusals[VICTIM]


def replaced(field: str, change: Callable[[Any], Any]) -> Change:
    return lambda request: dataclasses.replace(request, **{field: change(getattr(request, field))})


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {key: value for key, value in values.items() if key != name}


def flipped(name: str, place: int = 0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(values: dict[str, Any]) -> dict[str, Any]:
        value = values[name].clone()
        value[place] ^= 1
        return {**values, name: value}

    return change


# ---- The roster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("keys", without(VICTIM)), "lacks the keys of this client"),
        (replaced("keys", flipped(VICTIM)), "lacks the keys of this client"),
        (replaced("keys", lambda keys: {**keys, "client 01": keys["client 02"]}), "contains a key twice"),
        (replaced("keys", lambda keys: {**keys, "client 01": keys[VICTIM]}), "contains a key twice"),
        (replaced("keys", flipped("client 01")), "a signature of client 'client 01' that is not valid"),
        (replaced("keys", lambda keys: {**keys, "client 01": keys["client 01"][:63]}), "no byte string of 64 bytes"),
        (replaced("keys", lambda keys: {**keys, "client 01": torch.zeros(64)}), "no byte string of 64 bytes"),
        (replaced("keys", lambda keys: {**keys, "x": keys["client 01"] + 1}), "contains 6 clients"),
        (replaced("signatures", flipped("client 03")), "a signature of client 'client 03' that is not valid"),
        (replaced("signatures", without("client 03")), "lacks client 'client 03'"),
        (replaced("identities", without("client 03")), "lacks client 'client 03'"),
        (replaced("identities", lambda each: {**each, "client 03": to_tensor(b"?")}), "another certificate of client"),
    ],
)
def test_roster_is_refused(change, message):
    assert message in refusal(ShareKeys, change)


def test_roster_smaller_than_the_smallest_sum_is_refused():
    def small(request: ShareKeys) -> ShareKeys:
        kept = [VICTIM, "client 01", "client 02"]
        fields = {name: getattr(request, name) for name in ("keys", "identities", "signatures")}
        return dataclasses.replace(
            request, **{name: {key: value[key] for key in kept if key in value} for name, value in fields.items()}
        )

    assert "contains 3 clients" in refusal(ShareKeys, small, min_survivors=4)


def test_keys_that_a_server_signs_in_the_name_of_a_client_are_refused():
    """A server in the middle replaces the keys of a client by its own keys, with its own certificate."""
    own, intruder = generate_exchange_key()[1] + generate_exchange_key()[1], Identity.generate("intruder", 2048)

    def replace(request: ShareKeys) -> ShareKeys:
        return dataclasses.replace(
            request,
            keys={**request.keys, "client 01": to_tensor(own)},
            identities={**request.identities, "client 01": to_tensor(intruder.public_key)},
            signatures={**request.signatures, "client 01": to_tensor(intruder.sign(b"anything"))},
        )

    assert "another certificate of client 'client 01' than the known one" in refusal(ShareKeys, replace)


def test_client_without_a_known_fingerprint_is_refused():
    identity = simulated_identity()
    exchange = Exchange(SecAgg(), VALUES)
    request = request_for(VICTIM, 5)
    credentials = Credentials(identity, {"client 01": identity.fingerprint})
    exchange.clients[VICTIM] = ClientSession(
        SecAgg(), request, fit_digest(request), credentials, 20, lambda: VALUES[VICTIM].clone(), lambda survivors: None
    )
    exchange.run()
    assert "contains client 'client 02', whose fingerprint is not known" in exchange.refusals[VICTIM]


def test_point_that_gives_the_same_secret_with_each_key_is_refused():
    def zero(request: ShareKeys) -> ShareKeys:
        exchange.credentials[VICTIM].problem = lambda *args: None  # the client accepts each signature
        keys = {
            **request.keys,
            "client 01": torch.cat([torch.zeros(32).to(torch.uint8), request.keys["client 01"][32:]]),
        }
        return dataclasses.replace(request, keys=keys)

    exchange = Exchange(
        SecAgg(),
        VALUES,
        change=lambda each: zero(each) if isinstance(each, ShareKeys) and each.client_id == VICTIM else each,
    )
    exchange.run()
    assert "cannot be used" in exchange.refusals[VICTIM]


# ---- The settings and the model


def test_clients_with_other_settings_are_not_in_the_same_session():
    """A server that weakens the settings of one client gets keys whose signature the other clients refuse."""
    exchange = Exchange(SecAgg(), VALUES)
    weak = Exchange(SecAgg(clip=2.0), VALUES)
    exchange.clients["client 01"] = weak.clients["client 01"]
    exchange.run()
    assert exchange.server.failures["client 01"] == "the signature of its keys is not valid"
    assert not exchange.refusals


def test_client_that_receives_another_model_is_not_in_the_same_session():
    """[Eluding Secure Aggregation](https://arxiv.org/abs/2111.07380) (Pasquini et al., CCS 2022)."""
    exchange = Exchange(SecAgg(), VALUES)
    request = dataclasses.replace(request_for(VICTIM, 5), state={"w": torch.ones(3)})
    credentials = exchange.credentials[VICTIM]
    exchange.clients[VICTIM] = ClientSession(
        SecAgg(), request, fit_digest(request), credentials, 20, lambda: VALUES[VICTIM].clone(), lambda survivors: None
    )
    exchange.run()
    assert "trained on another state" in exchange.server.failures[VICTIM]


def test_dishonest_server_cannot_mix_clients_with_different_models():
    """The server forwards the keys of a client with another model as if it had the same model."""

    def merge(request: ShareKeys) -> ShareKeys:
        advertised = other.clients["client 01"].advertise()
        changed = {"keys": advertised.keys, "identities": advertised.identity, "signatures": advertised.signature}
        return dataclasses.replace(
            request, **{name: {**getattr(request, name), "client 01": value} for name, value in changed.items()}
        )

    other = Exchange(SecAgg(), VALUES)
    other.clients["client 01"].fit_digest = bytes(32)
    assert "a signature of client 'client 01' that is not valid" in refusal(ShareKeys, merge)


def test_digest_of_a_request_covers_what_is_the_same_for_all_clients():
    request = request_for("a", 5)
    changes = [
        {"round": 1},
        {"state": {"w": torch.full((3,), 1e-30)}},
        {"extra": {"w": torch.zeros(3)}},
        {"settings": {"weight": 1.0}},
        {"max_rows": 3},
        {"num_clients": 6},
    ]
    digests = {fit_digest(dataclasses.replace(request, **change)) for change in changes}
    assert len(digests | {fit_digest(request)}) == len(changes) + 1
    own = [{"client_id": "b"}, {"seed": 1}, {"nonce": "n"}, {"session": "t"}, {"accepted_round": 0}]
    assert {fit_digest(dataclasses.replace(request, **change)) for change in own} == {fit_digest(request)}


# ---- Envelopes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flipped("client 01", 20), "an envelope of client 'client 01' that is not authentic"),
        (flipped("client 01", 0), "an envelope of client 'client 01' that is not authentic"),
        (lambda each: {**each, "client 01": each["client 01"][:-1]}, "'client 01' that is not authentic"),
        (lambda each: {**each, "client 01": each["client 01"][:5]}, "'client 01' that is not authentic"),
        (
            lambda each: {**each, "client 01": each["client 02"], "client 02": each["client 01"]},
            "that is not authentic",
        ),
        (lambda each: {**each, "client 01": torch.zeros(3)}, "no byte string"),
        (lambda each: {**each, "x": each["client 01"]}, "contains client 'x'"),
        (lambda each: {**each, VICTIM: each["client 01"]}, "contains client 'client 00'"),
        (lambda each: {"client 01": each["client 01"]}, "contains 1 clients"),
        (lambda each: {}, "contains 0 clients"),
    ],
)
def test_envelopes_are_refused(change, message):
    assert message in refusal(SubmitMasked, replaced("envelopes", change))


def test_envelope_of_another_session_is_refused():
    earlier = Exchange(SecAgg(), VALUES)
    earlier.run()
    old = earlier.server.submit(VICTIM).envelopes
    assert "that is not authentic" in refusal(SubmitMasked, replaced("envelopes", lambda each: {**each, **old}))


# ---- Survivors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda survivors: survivors[1:], "lacks this client"),
        (lambda survivors: survivors[:3], "has 3 clients"),
        (lambda survivors: [], "lacks this client"),
        (lambda survivors: [*survivors, "x"], "is no such list"),
        (lambda survivors: survivors[::-1], "is no such list"),
        (lambda survivors: [*survivors, survivors[-1]], "is no such list"),
    ],
)
def test_survivors_are_refused(change, message):
    assert message in refusal(ConfirmSurvivors, replaced("survivors", change))


def test_survivor_that_sent_no_shares_is_refused():
    change = replaced("survivors", lambda survivors: sorted([*survivors, "client 04"]))
    assert "client 'client 04', which has sent no shares" in refusal(ConfirmSurvivors, change, {"client 04": "shares"})


def test_split_view_of_the_survivors_reveals_nothing():
    """The server shows one client a set without another one. The signatures of the others do not match."""
    exchange = Exchange(
        SecAgg(),
        VALUES,
        change=lambda each: (
            dataclasses.replace(each, survivors=each.survivors[:-1])
            if isinstance(each, ConfirmSurvivors) and each.client_id == VICTIM
            else each
        ),
    )
    exchange.server.add_signatures = lambda replies: collect(exchange, replies)  # forwards all signatures
    with pytest.raises(SessionFailedError):
        exchange.run()
    assert "is not valid" in exchange.refusals[VICTIM]
    assert all("is not valid" in text for text in exchange.refusals.values())


def collect(exchange: Exchange, replies: Mapping[str, Message]) -> None:
    exchange.server.signatures = {name: reply.signature for name, reply in replies.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flipped("client 01"), "a signature of client 'client 01' that is not valid"),
        (lambda each: {"client 01": each["client 01"]}, "has 2 valid signatures"),
        (lambda each: {}, "has 1 valid signatures"),
        (lambda each: dict.fromkeys(["x", "y", "z", VICTIM], each["client 01"]), "has 1 valid signatures"),
    ],
)
def test_signatures_of_the_survivors_are_refused(change, message):
    assert message in refusal(Unmask, replaced("signatures", change))


def test_second_consent_is_asked_for_and_can_be_refused():
    def consent(client_id: str, survivors: list[str]) -> None:
        raise ValueError("the client has agreed to another sum")

    exchange = Exchange(SecAgg(), VALUES, consent=consent)
    with pytest.raises(SessionFailedError):
        exchange.run()
    assert all("the client has agreed to another sum" in text for text in exchange.refusals.values())


# ---- The order of the requests


def test_request_that_is_repeated_or_out_of_order_ends_the_session():
    exchange = Exchange(SecAgg(), VALUES)
    exchange.run()
    session = exchange.clients[VICTIM]
    for request in (exchange.server.unmask(VICTIM), exchange.server.confirm(VICTIM), exchange.server.submit(VICTIM)):
        with pytest.raises(ValueError, match="has a request out of order"):
            session.answer(request)


@pytest.mark.parametrize("kind", [SubmitMasked, ConfirmSurvivors, Unmask])
def test_phase_that_is_left_out_is_refused(kind):
    exchange = Exchange(SecAgg(), VALUES)
    exchange.advertise()
    requests = {
        SubmitMasked: SubmitMasked(0, VICTIM, "s", {}),
        ConfirmSurvivors: ConfirmSurvivors(0, VICTIM, "s", names(5)),
        Unmask: Unmask(0, VICTIM, "s", {}),
    }
    with pytest.raises(ValueError, match="has a request out of order"):
        exchange.clients[VICTIM].answer(requests[kind])
    # A session that was attacked is over.
    with pytest.raises(ValueError, match="no further request of this session"):
        exchange.clients[VICTIM].answer(exchange.server.share_keys(VICTIM))


def test_shares_of_both_secrets_of_a_client_never_leave_a_client():
    """A lost client whose masked update arrives late: its seed stays secret, and its update with it."""
    exchange = Exchange(SecAgg(threshold=3), VALUES, {"client 04": "masked update"})
    exchange.run()
    for reply in exchange.shares.values():
        assert isinstance(reply, UnmaskShares)
        assert reply.seeds.keys() == set(names(4))
        assert reply.mask_keys.keys() == {"client 04"}
    # The late update still has the mask that follows from its seed.
    late = exchange.clients["client 04"].answer(exchange.server.submit("client 04"))
    assert not torch.equal(late.masked, VALUES["client 04"])


# ---- Hostile clients


def test_key_of_another_client_is_refused_by_the_server():
    exchange = Exchange(SecAgg(), VALUES)
    replies = {name: session.advertise() for name, session in exchange.clients.items()}
    replies["client 04"] = dataclasses.replace(replies["client 03"], client_id="client 04")
    exchange.server.add_keys(replies)
    assert exchange.server.failures == {"client 04": "the signature of its keys is not valid"}


def test_invalid_point_of_a_client_is_refused_by_the_server():
    exchange = Exchange(SecAgg(), VALUES)
    replies = {name: session.advertise() for name, session in exchange.clients.items()}
    reply, keys = replies["client 04"], bytes(64)
    content = keys_content(settings_digest(SecAgg().agreed()), "s", 0, "client 04", to_bytes(reply.fit_digest), keys)
    signature = to_tensor(exchange.credentials["client 04"].sign(content))
    replies["client 04"] = dataclasses.replace(reply, keys=to_tensor(keys), signature=signature)
    exchange.server.add_keys(replies)
    assert exchange.server.failures.keys() == {"client 04"}
    assert "signature" not in exchange.server.failures["client 04"]


def test_reply_of_another_session_is_a_failure_of_its_client():
    exchange = Exchange(SecAgg(), VALUES)
    exchange.clients["client 04"].session = "another"
    exchange.advertise()
    assert exchange.server.failures == {"client 04": "its reply belongs to another session"}


def test_shares_for_some_clients_only_are_a_failure_of_their_client():
    exchange = Exchange(SecAgg(), VALUES)
    exchange.advertise()
    replies = exchange.ask("shares", exchange.server.advertised, exchange.server.share_keys)
    shares = replies["client 04"]
    assert isinstance(shares, KeyShares)
    replies["client 04"] = dataclasses.replace(shares, envelopes=without(VICTIM)(shares.envelopes))
    exchange.server.add_shares(replies)
    assert exchange.server.failures == {"client 04": "it sent no share for a client"}


class WrongCommitments(SecAgg):
    """Shares other seeds than those of the commitments."""

    def client_masks(self):
        masks = super().client_masks()
        masks.commitment = bytes(32)
        return masks


def test_secret_that_does_not_match_its_commitment_fails_the_session():
    """A client that shares another seed than the one of its mask would make the sum wrong."""
    with pytest.raises(SessionFailedError, match="shares of a secret of client 'client 00' do not belong together"):
        Exchange(WrongCommitments(), VALUES).run()


def test_keys_of_two_sessions_differ():
    first, second = (Exchange(SecAgg(), VALUES).clients[VICTIM].advertise() for _ in range(2))
    assert not set(to_bytes(first.keys)[i : i + 32] for i in (0, 32)) & {
        to_bytes(second.keys)[i : i + 32] for i in (0, 32)
    }
