"""Text of a peer never brings a control character into a log, an error or a result."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading

import pytest
import torch
from loopback import SESSION_CONFIG

from hf_federated.distributed.process_group import process_group
from hf_federated.engines import NetworkEngine
from hf_federated.messages import ClientFailure, ClientUpdate, Evaluate, Fit, Metrics, read_message
from hf_federated.messages.ledger import Ledger
from hf_federated.messages.serialization import pack
from hf_federated.messages.validation import ExpectedReply, checked_reply
from hf_federated.split import SplitSessionConfig, Wire
from hf_federated.trainer.client_requests import ClientRequests
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import (
    CallEndpoint,
    CallTransport,
    ClientRefusedError,
    Connection,
    GrpcLink,
    GrpcServer,
    ServerFailedError,
)
from hf_federated.transport.call_transport import ANSWER_FIELDS
from hf_federated.transport.framing import frame, unframe
from hf_federated.transport.protocol import ConnectResponse
from hf_federated.transport.session_config import format_differences


# An escape sequence, line breaks, a backspace, a mark that reverses the direction of writing, and C0 and C1 controls.
EVIL = "x\x1b]0;owned\x07\x1b[31m\r\nRejected: client 'north'\x08\u202e\x00\x9b2J\u2028\x85\u2066y"
SETTINGS = NetworkSettings({"learning_rate": "0.1"})
FIT = Fit(2, "south", seed=0, state={}, nonce="n")


@pytest.fixture(autouse=True)
def printable_log(caplog, monkeypatch):
    """Check after each test that each entry of the log is printable, apart from the line breaks of tracebacks."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    yield
    for record in caplog.get_records("call"):
        first, *others = record.getMessage().split("\n")
        assert first.isprintable() and record.exc_info is None, record
        assert all(line.isprintable() and line.startswith("    ") for line in others), record


def received(reply):
    """What the server makes of a reply to `FIT`."""
    return checked_reply(ExpectedReply.to(FIT), dataclasses.replace(reply, nonce="n"), Ledger(), None)


def test_error_of_a_client_is_one_printable_line():
    error = received(ClientFailure(2, "south", EVIL)).error
    assert error.isprintable() and "Rejected" in error and r"\x1b[31m" in error


@pytest.mark.parametrize(
    "reply",
    [ClientUpdate(2, "south", {}, 1, 1, 1, metrics={EVIL: 0.5, "loss": 1.0}), Metrics(2, "south", 1, {EVIL: 0.5})],
)
def test_names_of_metrics_are_printable_and_keep_their_values(reply):
    expected = ExpectedReply("south", 2, "n", "")
    checked = checked_reply(expected, dataclasses.replace(reply, nonce="n"), Ledger(), None)
    assert all(map(str.isprintable, checked.metrics)) and list(checked.metrics.values()) == list(
        reply.metrics.values()
    )


def test_refused_reply_names_its_problem_in_one_printable_line():
    for reply in (ClientUpdate(2, EVIL, {}, 1, 1, 1), ClientUpdate(2, "south", {}, 1, 1, 1, metrics={EVIL: "1"})):
        error = received(reply).error
        assert error.isprintable() and error.startswith("the server refused the reply: ")


def test_names_of_metrics_have_a_total_length():
    """10 000 names of 1000 characters would be 10 MB in the log of each round, and four times as much in a summary."""
    names = {f"{number:05d}{'m' * 95}": 0.0 for number in range(3000)}
    assert isinstance(received(ClientUpdate(2, "south", {}, 1, 1, 1, metrics=names)), ClientUpdate)
    refused = received(ClientUpdate(2, "south", {}, 1, 1, 1, metrics={**names, "loss": 1.0}))
    assert isinstance(refused, ClientFailure) and refused.client_id == "south"
    assert "`metrics` has 3001 names with 300004 characters together, at most 300000 are allowed" in refused.error


@pytest.mark.parametrize("view", [bytes, lambda blob: memoryview(bytearray(blob))], ids=["bytes", "view"])
def test_damaged_message_has_a_printable_error(view):
    header = {"__metadata__": {}, EVIL: {"dtype": EVIL, "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(ValueError, match="Not a packed tree") as error:
        read_message(view(len(text).to_bytes(8, "little") + text + bytes(4)))
    assert str(error.value).isprintable() and error.value.__suppress_context__


def test_settings_of_a_client_are_printable():
    network = SETTINGS.differences({"learning_rate": EVIL, EVIL: EVIL})
    split = dataclasses.replace(SESSION_CONFIG, wire=Wire("float16"), more={EVIL: EVIL * 10**5})
    for differences in (network, SESSION_CONFIG.differences(split.to_dict())):
        text = format_differences(differences)
        assert text.isprintable() and "at the client" in text and len(text) < 20_000


def test_names_of_fields_in_errors_are_printable_and_bounded():
    many = {f"{EVIL}{number}": 0 for number in range(1000)}
    readers = [
        lambda: unframe(frame(many), **ANSWER_FIELDS),
        lambda: ConnectResponse.from_json(json.dumps(many)),
        lambda: Metrics.from_bytes(pack({"kind": "metrics", "fields": many})),
    ]
    for read in readers:
        with pytest.raises(ValueError, match="fields") as error:
            read()
        assert str(error.value).isprintable() and len(str(error.value)) < 1000


def connect(server: GrpcServer, settings: NetworkSettings | SplitSessionConfig = SETTINGS) -> GrpcLink:
    return GrpcLink(server.address, None, "north", settings, insecure=True, connect_timeout=5, reconnect_timeout=5)


def refuse(client_id: str) -> None:
    raise ValueError(EVIL)


@pytest.mark.parametrize("on_connected", [refuse, None], ids=["by the caller", "for its settings"])
def test_client_shows_a_refusal_in_one_printable_line(on_connected):
    settings = SETTINGS if on_connected else NetworkSettings({"learning_rate": EVIL})
    server = GrpcServer(
        lambda client_id, blob: b"",
        None,
        ["north"],
        SETTINGS,
        address="127.0.0.1:0",
        insecure=True,
        on_connected=on_connected,
    )
    with server, pytest.raises(ClientRefusedError, match="Rejected") as error:
        connect(server, settings)
    assert str(error.value).isprintable()


def test_client_shows_an_error_of_the_server_in_one_printable_line(caplog):
    errors = {b"value": ValueError(EVIL), b"time": TimeoutError(EVIL), b"other": RuntimeError(EVIL)}

    def answer(client_id: str, message: bytes) -> bytes:
        raise errors[bytes(message)]

    with GrpcServer(answer, None, ["north"], SETTINGS, address="127.0.0.1:0", insecure=True) as server:
        with connect(server) as link:
            for message, kind in ((b"value", ValueError), (b"time", TimeoutError), (b"other", ServerFailedError)):
                with pytest.raises(kind) as error:
                    link.exchange(message)
                assert str(error.value).isprintable()
    assert r"RuntimeError: x\x1b]0;owned\x07" in caplog.text


class EndedConnection(Connection):
    """A connection to a server that has ended the run."""

    end = EVIL

    def receive(self, reply=None):
        return None

    def close(self) -> None:
        pass


def test_reason_of_the_end_is_printable():
    requests = ClientRequests("north", process_group(), EndedConnection)
    assert requests.receive() is None
    assert requests.end.isprintable() and "Rejected" in requests.end


def test_texts_of_remote_calls_are_printable(caplog):
    failed, refused = CallEndpoint(), CallEndpoint()
    failed.fail(EVIL)
    endpoints = {"north": failed, "south": refused}
    calls = {
        name: functools.partial(lambda e, request, timeout: e.handle(request), e) for name, e in endpoints.items()
    }
    transport = CallTransport(calls, call_timeout=1.0)
    transport.start(["north", "south"], SETTINGS)
    with pytest.raises(ClientRefusedError) as error:
        refused.connect(NetworkSettings({"learning_rate": EVIL}), b"")
    transport.receive(0.3)
    transport.stop(EVIL)
    assert str(error.value).isprintable() and "Rejected" in str(error.value)
    assert transport.failures.keys() == endpoints.keys() and all(map(str.isprintable, transport.failures.values()))
    assert "its trainer ended" in caplog.text


def test_call_that_fails_is_logged_in_printable_text(caplog):
    def fail(request, timeout):
        raise OSError(EVIL)

    transport = CallTransport({"north": fail}, call_timeout=1.0)
    transport.start(["north"], SETTINGS)
    transport.receive(0.1)
    transport.stop()
    assert "Client 'north' cannot be reached" in caplog.text


def test_refusal_of_a_hostile_server_is_printable_at_the_client():
    endpoint = CallEndpoint()

    def refuse() -> None:
        call = {"session": "", "name": "", "text": "", "seconds": 5.0}
        header, _ = unframe(endpoint.handle(frame({**call, "kind": "join"})), **ANSWER_FIELDS)
        endpoint.handle(frame({**call, "kind": "refuse", "session": header["session"], "text": EVIL}))

    server = threading.Thread(target=refuse)
    server.start()
    with pytest.raises(ClientRefusedError, match="Rejected") as error:
        endpoint.connect(SETTINGS, b"")
    server.join()
    assert str(error.value).isprintable()


def test_client_shows_a_refused_request_in_printable_text():
    from hf_federated import FedAvg
    from hf_federated.clients import Agreement, RefusedRequestError

    agreement = Agreement([FedAvg()], num_rounds=3)
    requests = [
        Fit(0, "a", seed=0, state={EVIL: torch.zeros(1)}, settings={EVIL: float("nan")}),
        Fit(0, "a", seed=0, state={}),
        Evaluate(0, "a", {}),
    ]
    for request in requests:
        with pytest.raises(RefusedRequestError) as error:
            agreement.check(request)
        assert str(error.value).isprintable()


def test_announcement_that_cannot_be_read_is_logged_in_printable_text(caplog):
    from hf_federated.transport import Event

    engine = NetworkEngine(["north"], address="127.0.0.1:0", insecure=True)
    engine.transport.start(["north"], NetworkSettings({}))
    header = json.dumps({"__metadata__": {EVIL: EVIL}}, ensure_ascii=False).encode()
    engine._note(Event("joined", "north", len(header).to_bytes(8, "little") + header))
    engine.transport.stop()
    assert "sent an invalid announcement" in caplog.text
