"""A hostile server of secure aggregation on a connection: the client refuses each request, by name, and goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLIENTS
from secure_server import PEERS, VICTIM, SecureServer, build, honest_requests, peer_identity

from hf_federated.clients.journal import JOURNAL_FILE, JournalError
from hf_federated.clients.request_record import REQUESTS_FILE
from hf_federated.messages import ClientFailure, Distill, Evaluate, Fit, Message, Predict
from hf_federated.messages.secure_aggregation import ConfirmSurvivors, OpenFit
from hf_federated.secure_aggregation.client_session import survivors_content
from hf_federated.secure_aggregation.content import byte_strings, fit_digest, roster_digest, to_tensor
from hf_federated.security.certificates import create_certificates
from hf_federated.security.keys import Identity
from hf_federated.trainer.join import STATES_DIR, ServerRefusedError
from hf_federated.trainer.output_lock import LOCK_FILE, OutputDirInUseError
from hf_federated.utils.file_lock import FileLock


Attack = Callable[[SecureServer], Message]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    """A server whose client has answered an honest session."""
    with SecureServer(tmp_path_factory.mktemp("client")) as opened:
        opened.begin().run()
        yield opened


def replaced(**changes: Callable[[Any], Any]) -> Callable[[Any], Message]:
    return lambda request: dataclasses.replace(
        request, **{field: change(getattr(request, field)) for field, change in changes.items()}
    )


def flipped(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {**tensors, name: tensors[name] ^ 1}


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {key: value for key, value in values.items() if key not in names}


def swapped(first: str, second: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {**values, first: values[second], second: values[first]}


def as_kind(cls: type[Message], **more: Any) -> Attack:
    """The request of local training as another kind."""
    names = {field.name for field in dataclasses.fields(cls)}
    fields = {name: value for name, value in vars(honest_requests()[0]).items() if name in names}
    return lambda server: server.ask(cls(**{**fields, **more}))


def other_model() -> dict[str, torch.Tensor]:
    """A model that differs from the model of the round by much less than a training step."""
    return {name: value + 1e-7 for name, value in honest_requests()[0].state.items()}


def rolled_back(server: SecureServer) -> Message:
    """The client returns to its state before the first request, and then gets other content."""
    return server.begin(state="", settings={"x": 1.0}).keys


def second_consent(server: SecureServer, state: str | None = None) -> Message:
    """The same local training, and one client less in the sum."""
    return server.begin(state=state).run("submit", lost=["west"]).confirm()


def two_models(server: SecureServer) -> Message:
    """The peers train on another model than the client."""
    session = server.begin()
    other = fit_digest(dataclasses.replace(honest_requests()[0], state=other_model()))
    for peer in session.peers.values():
        peer.fit_digest = other
    signed = {name: peer.advertise().signature for name, peer in session.peers.items()}
    return session.share(replaced(signatures=lambda _: signed))


def small_roster(server: SecureServer) -> Message:
    drop = without(*PEERS[1:])
    return server.begin().share(replaced(keys=drop, signatures=drop, identities=drop))


def few_survivors(*names: str) -> Attack:
    return survivors(lambda _: sorted([VICTIM, *names]))


def envelope(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Attack:
    return lambda server: server.begin().run("share").submit(replaced(envelopes=change))


def roster(**changes: Callable[[Any], Any]) -> Attack:
    return lambda server: server.begin().share(replaced(**changes))


def survivors(change: Callable[[list[str]], list[str]]) -> Attack:
    return lambda server: server.begin().run("submit").confirm(replaced(survivors=change))


def signatures(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Attack:
    return lambda server: server.begin().run("confirm").unmask(replaced(signatures=change))


def split_view(server: SecureServer) -> Message:
    """The peers have signed another set of survivors than the client."""
    session = server.begin().run("confirm").session
    roster = roster_digest(byte_strings(session.share_keys(VICTIM).keys))
    digest = fit_digest(honest_requests()[0])
    content = survivors_content(session.session, 0, digest, roster, sorted([VICTIM, *PEERS[1:]]))
    other = to_tensor(peer_identity().sign(content))
    return server.ask(replaced(signatures=lambda each: dict.fromkeys(each, other))(session.unmask(VICTIM)))


def of_the_session_before(phase: str) -> Attack:
    """A request of a session that the server has ended by a later one."""

    def attack(server: SecureServer) -> Message:
        before = server.begin().run("share")
        server.begin().run("share")
        return getattr(before, phase)()

    return attack


def replayed(server: SecureServer) -> Message:
    """The envelopes are sent twice, with other content."""
    session = server.begin().run("submit")
    return server.ask(replaced(envelopes=without("west"))(session.session.submit(VICTIM)))


def skipped(server: SecureServer) -> Message:
    session = server.begin().run("share")
    return server.ask(ConfirmSurvivors(0, VICTIM, session.request.session, sorted([VICTIM, *PEERS])))


def old_envelopes(server: SecureServer) -> Message:
    """Envelopes of an earlier session with the same clients."""
    before = server.begin().run("share")
    old = before.session.submit(VICTIM).envelopes
    return server.begin().run("share").submit(replaced(envelopes=lambda _: old))


def unmask_twice(server: SecureServer) -> Message:
    """After the seeds of all clients, the key of one of them."""
    session = server.begin().run()
    return server.ask(replaced(signatures=without("west"))(session.session.unmask(VICTIM)))


ATTACKS: dict[str, tuple[Attack, str]] = {
    "a plain request of local training": (as_kind(Fit), "`kind` .* is no request of the methods.*secure_fit"),
    "an update without masks": (as_kind(OpenFit), "`kind` of a request of kind 'open_fit' is no request"),
    "an evaluation": (as_kind(Evaluate), "`kind` of a request of kind 'evaluate' is no request"),
    "one client": (lambda server: server.begin(num_clients=1).keys, "`num_clients` .* is 1.* 3 to 65536 clients"),
    "many clients": (lambda server: server.begin(num_clients=2**17).keys, "`num_clients` .* is 131072"),
    "another number of clients": (lambda server: server.begin(num_clients=6).keys, "one training in a round"),
    "another model in the round": (
        lambda server: server.begin(state=None, model=other_model()).keys,
        "differs from the request that the client has answered",
    ),
    "other settings after a return to an earlier state": (rolled_back, "`state` .* differs from the request that"),
    "another client": (lambda server: server.begin(client_id="south").keys, "`client_id` .* is 'south'"),
    "a round after the last one": (
        lambda server: server.ask(dataclasses.replace(honest_requests()[0], round=2)),
        "`round` .* is 2",
    ),
    "a seed of the server": (lambda server: server.begin(seed=1).keys, "`seed` .* is 1"),
    "the model without local training": (lambda server: server.begin(returns_state=False).keys, "`returns_state`"),
    "a roster without signatures": (roster(signatures=lambda _: {}), "`signatures` .* lacks client 'east'"),
    "a roster with empty signatures": (
        roster(signatures=lambda each: dict.fromkeys(each, to_tensor(b""))),
        "not valid",
    ),
    "a changed signature": (roster(signatures=flipped("south")), "signature of client 'south' that is not valid"),
    "swapped signatures": (roster(signatures=swapped("south", "west")), "signature of client 'south' that is not"),
    "another certificate": (
        roster(identities=lambda each: {**each, "west": to_tensor(Identity.generate("x", 2048).public_key)}),
        "another certificate of client 'west' than the known one",
    ),
    "changed keys of a peer": (roster(keys=flipped("west")), "signature of client 'west' that is not valid"),
    "changed keys of the client": (roster(keys=flipped(VICTIM)), "lacks the keys of this client"),
    "an unknown client": (
        roster(
            **dict.fromkeys(
                ("keys", "identities", "signatures"), lambda each: {**without("west")(each), "stranger": each["west"]}
            )
        ),
        "contains client 'stranger', whose fingerprint is not known",
    ),
    "a roster below `min_survivors`": (small_roster, "contains 2 clients.* 3 .`min_survivors`."),
    "different models to different clients": (two_models, "a signature of client 'east' that is not valid"),
    "a changed envelope": (envelope(flipped("west")), "an envelope of client 'west' that is not authentic"),
    "swapped envelopes": (envelope(swapped("south", "west")), "an envelope of client .* that is not authentic"),
    "a truncated envelope": (
        envelope(lambda each: {**each, "west": each["west"][:-1]}),
        "'west' that is not authentic",
    ),
    "an empty envelope": (envelope(lambda each: {**each, "west": to_tensor(b"")}), "'west' that is not authentic"),
    "an envelope of another session": (old_envelopes, "an envelope of client 'east' that is not authentic"),
    "too few envelopes": (envelope(without("south", "west")), "contains 2 clients.* at least 3 clients"),
    "the own envelope": (envelope(lambda each: {**each, VICTIM: each["west"]}), "contains client 'north'"),
    "two survivors": (few_survivors("west"), "has 2 clients"),
    "survivors below the threshold": (few_survivors("south", "west"), "has 3 clients.* at least 4 clients"),
    "survivors without the client": (survivors(lambda names: names[:1] + names[2:]), "lacks this client"),
    "a survivor twice": (survivors(lambda names: sorted([*names, names[0]])), "is no such list"),
    "an unknown survivor": (survivors(lambda names: sorted([*names, "x"])), "is no such list"),
    "a second sum with one client less": (second_consent, "agreed to the sum of 5 clients, and refuses a second sum"),
    "a second sum after a return to an earlier state": (
        lambda server: second_consent(server, state=""),
        "refuses a second sum, of 4 clients",
    ),
    "no signatures": (signatures(lambda _: {}), "has 1 valid signatures"),
    "too few signatures": (signatures(without("south", "west")), "has 3 valid signatures.* at least 4"),
    "a changed signature of the survivors": (signatures(flipped("west")), "of client 'west' that is not valid"),
    "signatures of other survivors": (split_view, "a signature of client 'east' that is not valid"),
    "a request of an earlier session": (of_the_session_before("submit"), "takes no part in the session"),
    "a repeated phase": (replayed, "`session` .* has a request out of order"),
    "a skipped phase": (skipped, "has a request out of order.* 'submit_masked'"),
    "both shares of a client": (unmask_twice, "takes no part in the session"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_client_refuses(server, name):
    attack, message = ATTACKS[name]
    reply = attack(server)
    assert isinstance(reply, ClientFailure), reply
    assert re.search(message, reply.error), reply.error
    assert "The client agreed to" in reply.error or "takes no part in the session" in reply.error
    assert len(reply.to_bytes()) < 3000


def test_update_is_the_same_after_all_refusals(server):
    """The peers send zeros, so the server learns the update of the client: the collusion of all other clients."""
    session = server.begin().run()
    # The zeros count as no vector.
    _, statistics = session.encoding.decode(session.sum(), 1)
    assert statistics["num_examples"] == len(CLIENTS[VICTIM])


@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param(lambda: Predict(0, VICTIM, None, 0, 1, seed=0), id="predict"),
        pytest.param(lambda: Distill(0, VICTIM, None, 0, 1, 0, {"x": torch.ones(1)}, 1, 1), id="distill"),
    ],
)
def test_client_leaves_if_the_kind_of_a_request_is_unknown(tmp_path, request_of):
    with SecureServer(tmp_path) as server:
        server.ask(request_of())
    assert isinstance(server.error, ServerRefusedError)
    assert f"Unknown message kind {request_of().kind!r}" in str(server.error)


def test_client_reads_the_keys_of_all_clients_that_it_knows(tmp_path):
    """Three tensors for each of 700 clients, which are more than the tensors of all other messages."""
    number = 700

    def with_absent(each: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**{f"absent {index}": to_tensor(bytes(64)) for index in range(number)}, **each}

    fields = dict.fromkeys(("keys", "identities", "signatures"), with_absent)
    with SecureServer(tmp_path, num_known=number) as server:
        reply = server.begin().share(replaced(**fields))
    assert isinstance(reply, ClientFailure) and "contains a key twice" in reply.error


# ---- After a restart of the client


def state_dir(directory: Path) -> Path:
    return directory / STATES_DIR / VICTIM


def run_and_stop(directory: Path, is_complete: bool = False) -> None:
    """The client agrees to the sum of all clients. Then the server fails, or calls the run complete."""
    with SecureServer(directory) as server:
        server.begin().run()
        server.end = "" if is_complete else server.end


@pytest.mark.parametrize(
    ("run", "state"),
    [
        ("the same run", None),
        pytest.param("the same run", "", marks=pytest.mark.slow),
        ("after a complete run", ""),
        pytest.param("without a record of requests", None, marks=pytest.mark.slow),
    ],
)
def test_restarted_client_refuses_a_second_sum(tmp_path, run, state):
    """The journal counts in all runs, and in each state to which a server returns the client."""
    run_and_stop(tmp_path, is_complete=run == "after a complete run")
    if run == "without a record of requests":
        (state_dir(tmp_path) / REQUESTS_FILE).unlink()
    with SecureServer(tmp_path) as server:
        reply = second_consent(server, state)
        assert isinstance(reply, ClientFailure)
        assert "agreed to the sum of 5 clients, and refuses a second sum, of 4 clients" in reply.error
        # The same sum may be repeated, as by a server that resumes.
        assert not isinstance(server.begin().run("submit").confirm(), ClientFailure)


def test_refusal_of_a_second_sum_says_why_and_what_to_do(server):
    reply = second_consent(server)
    assert "the difference of two sums" in reply.error and "another `federation_seed`" in reply.error


def test_restarted_client_refuses_the_phases_of_its_earlier_process(tmp_path):
    """Its secrets were in memory only."""
    with SecureServer(tmp_path) as server:
        before = server.begin().run("submit")
    with SecureServer(tmp_path) as server:
        before.server = server
        for phase in ("confirm", "share"):
            reply = getattr(before, phase)()
            assert isinstance(reply, ClientFailure) and "was started again" in reply.error


def test_client_leaves_after_three_refusals_also_across_restarts(tmp_path):
    with SecureServer(tmp_path, refusals=3) as server:
        # Another client may have sent the envelope, so the refusal does not count against the server.
        for name in ["a changed envelope"] * 3 + ["too few envelopes"] * 2:
            assert isinstance(ATTACKS[name][0](server), ClientFailure)
    with SecureServer(tmp_path, refusals=3) as server:
        assert isinstance(ATTACKS["a plain request of local training"][0](server), ClientFailure)
    assert isinstance(server.error, ServerRefusedError)
    assert "after 3 requests" in str(server.error) and "secure_fit" in str(server.error)


# ---- The journal


@pytest.mark.parametrize("damage", [lambda text: "x" + text, lambda text: text.replace("consent", "agreed", 1)])
def test_client_with_a_damaged_journal_does_not_join(tmp_path, damage):
    run_and_stop(tmp_path)
    path = state_dir(tmp_path) / JOURNAL_FILE
    path.write_text(damage(path.read_text()))
    with SecureServer(tmp_path) as server:
        server.ask(honest_requests()[0])
    assert isinstance(server.error, JournalError)
    assert "is damaged" in str(server.error) and "another `federation_seed`" in str(server.error)


def test_incomplete_last_line_of_a_journal_is_no_consent(tmp_path):
    """The client was killed before the entry was on disk, so it had not signed."""
    run_and_stop(tmp_path)
    path = state_dir(tmp_path) / JOURNAL_FILE
    path.write_text(path.read_text()[:-5])
    with SecureServer(tmp_path) as server:
        assert not isinstance(second_consent(server), ClientFailure)
        assert isinstance(server.begin().run("submit").confirm(), ClientFailure)


def test_client_does_not_sign_if_the_journal_cannot_be_written(tmp_path):
    with SecureServer(tmp_path) as server:
        session = server.begin().run("submit")
        path = state_dir(tmp_path) / JOURNAL_FILE
        path.unlink()
        path.mkdir()
        reply = session.confirm()
    assert isinstance(reply, ClientFailure)


def test_two_processes_do_not_share_a_state_dir(tmp_path):
    """Each of them would agree to a sum that the other one does not know."""
    states = tmp_path / "states"
    states.mkdir()
    lock = FileLock(states / LOCK_FILE)
    lock.acquire()
    trainer = build(tmp_path / "client", {VICTIM: CLIENTS[VICTIM]})
    known = dict.fromkeys(PEERS, peer_identity().fingerprint)
    with pytest.raises(OutputDirInUseError, match="Another run uses the state directory .*set another `state_dir`"):
        trainer.join("127.0.0.1:1", client_id=VICTIM, insecure=True, state_dir=str(states), fingerprints=known)
    lock.release()


# ---- With certificates


def test_client_with_a_certificate_refuses_a_second_sum(tmp_path):
    tls = tmp_path / "tls"
    create_certificates(tls, ["localhost", "127.0.0.1"], [VICTIM], rsa_bits=2048)
    with SecureServer(tmp_path, tls) as server:
        session = server.begin().run()
        assert session.encoding.decode(session.sum(), 1)
        for name in ("a plain request of local training", "a changed envelope", "a roster without signatures"):
            assert re.search(ATTACKS[name][1], ATTACKS[name][0](server).error)
        assert "refuses a second sum" in second_consent(server).error
