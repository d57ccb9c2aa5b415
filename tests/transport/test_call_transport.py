"""A federation over remote calls: lost calls, restarted clients, late and large replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from hf_federated.engines import NetworkEngine
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import CallEndpoint, CallTransport, ClientRefusedError, LinkError
from hf_federated.transport.framing import frame


SETTINGS = NetworkSettings({"learning_rate": "0.1", "aggregation": "FedAvg"})


class Client:
    """A client in a thread, and the line on which the server calls it."""

    def __init__(self, reply: Callable[[bytes], bytes] = bytes.upper, settings: NetworkSettings = SETTINGS) -> None:
        self.received: list[bytes] = []
        self.calls = 0
        # Called before and after a call is carried out. An error is a failure of the line.
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int], None] = lambda number: None
        self._reply, self._settings = reply, settings
        self.restart()

    def restart(self) -> None:
        self.endpoint, self.end, self.error = CallEndpoint(), None, None
        self.thread = threading.Thread(target=self.run, args=[self.endpoint], daemon=True)
        self.thread.start()

    def run(self, endpoint: CallEndpoint) -> None:
        try:
            connection = endpoint.connect(self._settings, frame({"num_examples": 3}))
            reply = None
            while (content := connection.receive(reply)) is not None:
                self.received.append(bytes(content))
                reply = self._reply(bytes(content))
            connection.close()
            self.end = connection.end
        except LinkError as error:
            self.error = error
            endpoint.fail(str(error))

    def call(self, request: bytes, timeout: float) -> bytes:
        self.calls += 1
        number = self.calls
        self.before(number)
        answer = self.endpoint.handle(request)
        self.after(number)
        return answer


@pytest.fixture
def started() -> Iterator[Callable[..., CallTransport]]:
    """Start a transport that calls the given clients."""
    with ExitStack() as stack:

        def start(timeout: float = 3.0, **clients: Client) -> CallTransport:
            transport = CallTransport({name: client.call for name, client in clients.items()}, call_timeout=timeout)
            transport.start(list(clients), SETTINGS)
            stack.callback(transport.stop)
            return transport

        yield start


def events(transport: CallTransport, number: int) -> list[tuple[str, str, bytes]]:
    found = [transport.receive(10) for _ in range(number)]
    assert None not in found
    return [(event.kind, event.client_id, event.blob) for event in found]


def test_replies_arrive_in_any_order_and_the_end_reaches_the_clients(started):
    may_reply = threading.Event()

    def reply(content: bytes) -> bytes:
        may_reply.wait()
        return content.upper()

    north, south = Client(reply), Client()
    transport = started(north=north, south=south)
    joined = events(transport, 2)
    assert sorted(joined) == [("joined", name, frame({"num_examples": 3})) for name in ("north", "south")]
    for name in ("north", "south"):
        transport.send(name, lambda: b"fit")
    assert events(transport, 1) == [("reply", "south", b"FIT")]
    may_reply.set()
    assert events(transport, 1) == [("reply", "north", b"FIT")]
    transport.stop("out of memory")
    for client in (north, south):
        client.thread.join(10)
        assert client.end == "out of memory"


def test_client_with_other_settings_is_refused_by_name(started):
    north = Client(settings=NetworkSettings({"learning_rate": "0.5", "aggregation": "FedAvg"}))
    transport = started(north=north)
    north.thread.join(10)
    assert isinstance(north.error, ClientRefusedError)
    assert "learning_rate: 0.1 at the server, 0.5 at the client" in str(north.error)
    assert "aggregation" not in str(north.error)
    assert transport.receive(0.3) is None and not transport.is_connected("north")
    assert "learning_rate: 0.1 at the server" in transport.failures["north"]


def test_training_may_last_longer_than_the_call_timeout(started):
    north = Client(lambda content: time.sleep(1.0) or b"trained")
    transport = started(0.3, north=north)
    assert [kind for kind, _, _ in events(transport, 1)] == ["joined"]
    transport.send("north", lambda: b"fit")
    assert events(transport, 1) == [("reply", "north", b"trained")]


def test_lost_calls_and_answers_do_not_repeat_the_work(started):
    """One of seven calls does not arrive, and one of seven answers is lost. The client joins again each time."""
    north = Client()
    transport = started(north=north)
    assert [kind for kind, _, _ in events(transport, 1)] == ["joined"]

    def lose(remainder: int) -> Callable[[int], None]:
        def fail(number: int) -> None:
            if number % 7 == remainder:
                raise TimeoutError(f"call {number} was lost")

        return fail

    north.before, north.after = lose(5), lose(3)
    kinds = []
    for number in range(6):
        transport.send("north", lambda number=number: b"request %d" % number)
        kind = ""
        while kind != "reply":
            ((kind, _, blob),) = events(transport, 1)
            kinds.append(kind)
        assert blob == b"REQUEST %d" % number
    assert north.received == [b"request %d" % number for number in range(6)]
    assert kinds.count("reply") == 6 and kinds.count("lost") >= 2


def test_restarted_client_receives_the_open_request_again(started):
    is_first = [True]

    def reply(content: bytes) -> bytes:
        if is_first.pop() if is_first else False:
            threading.Event().wait()
        return content.upper()

    north = Client(reply)
    transport = started(0.6, north=north)
    events(transport, 1)
    transport.send("north", lambda: b"fit")
    while not north.received:
        time.sleep(0.01)
    north.restart()
    assert [kind for kind, _, _ in events(transport, 3)] == ["lost", "joined", "reply"]
    assert north.received == [b"fit", b"fit"] and transport.is_connected("north")


def test_client_that_restarts_between_two_requests_joins_again(started):
    north = Client()
    transport = started(north=north)
    events(transport, 1)
    north.restart()
    transport.send("north", lambda: b"fit")
    assert [kind for kind, _, _ in events(transport, 3)] == ["lost", "joined", "reply"]


def test_client_whose_trainer_leaves_is_lost(started):
    """A trainer that leaves without an error may join again, so its endpoint answers no failure."""
    endpoint, connections = CallEndpoint(), []
    north = Client()
    north.endpoint = endpoint
    trainer = threading.Thread(target=lambda: connections.append(endpoint.connect(SETTINGS, b"")), daemon=True)
    trainer.start()
    transport = started(north=north)
    events(transport, 1)
    trainer.join(10)
    connections[0].close()
    transport.send("north", lambda: b"fit")
    assert [kind for kind, _, _ in events(transport, 1)] == ["lost"]


@pytest.mark.parametrize("arrives_first", ["the reply", "the next request"])
def test_late_reply_is_ignored_and_the_client_continues(started, arrives_first):
    may_reply = threading.Event()

    def reply(content: bytes) -> bytes:
        may_reply.wait()
        time.sleep(0.1)
        return content.upper()

    north = Client(reply)
    transport = started(0.6, north=north)
    events(transport, 1)
    transport.send("north", lambda: b"round 1")
    while not north.received:
        time.sleep(0.01)
    transport.withdraw("north")
    transport.send("north", lambda: b"round 2")
    if arrives_first == "the next request":
        time.sleep(0.5)
    may_reply.set()
    assert events(transport, 1) == [("reply", "north", b"ROUND 2")]
    assert transport.receive(0.2) is None


def test_server_holds_one_large_reply_at_a_time(started):
    large = {name: Client(lambda content: content * (1 << 20)) for name in ("north", "south")}
    transport = started(**large)
    events(transport, 2)
    for name in large:
        transport.send(name, lambda: b"ab")
    first = transport.receive(10)
    assert first.kind == "reply" and len(first.blob) == 2 << 20
    time.sleep(0.5)
    assert transport._events.empty()
    second = transport.receive(10)
    assert {first.client_id, second.client_id} == set(large) and second.blob == first.blob


def test_trainer_that_fails_is_not_connected_and_its_reason_is_logged(caplog, started):
    north = Client()
    north.endpoint.fail("ValueError: no examples")
    transport = started(north=north)
    assert transport.receive(0.3) is None and not transport.is_connected("north")
    assert caplog.text.count("Client 'north' cannot be reached: its trainer ended: ValueError: no examples") == 1
    assert transport.failures == {"north": "its trainer ended: ValueError: no examples"}


def test_trainer_that_joins_twice_takes_part_in_both_runs(started):
    north = Client()
    for number in range(2):
        transport = started(north=north)
        transport.send("north", lambda number=number: b"run %d" % number)
        assert events(transport, 2)[-1] == ("reply", "north", b"RUN %d" % number)
        transport.stop()
        north.thread.join(10)
        assert north.end == ""
        north.thread = threading.Thread(target=north.run, args=[north.endpoint], daemon=True)
        north.thread.start()


def test_expelled_client_ends_and_does_not_return(started):
    north, south = Client(), Client()
    transport = started(north=north, south=south)
    events(transport, 2)
    assert 0 <= transport.seconds_since_heard("north") < 5
    transport.expel("north")
    north.thread.join(10)
    assert north.end == "the server expelled the client"
    north.restart()
    transport.send("north", lambda: b"fit")
    transport.send("south", lambda: b"fit")
    assert events(transport, 2)[-1] == ("reply", "south", b"FIT")
    assert transport.receive(0.5) is None and not transport.is_connected("north")
    assert transport.seconds_since_heard("north") is None


def test_closed_endpoint_ends_the_trainer(started):
    waiting, working = Client(), Client()
    transport = started(working=working)
    events(transport, 1)
    for client in (waiting, working):
        client.endpoint.close()
        client.thread.join(10)
        assert isinstance(client.error, LinkError)


def test_error_of_the_check_ends_the_run(tmp_path):
    def check() -> None:
        raise RuntimeError("The job was aborted.")

    engine = NetworkEngine(["north"], transport=CallTransport({}, check=check), join_timeout=5)
    with pytest.raises(RuntimeError, match="aborted"):
        engine.connect(lambda: SETTINGS, tmp_path, 1)


def test_client_that_cannot_be_called_does_not_join(caplog, tmp_path):
    engine = NetworkEngine(["north", "south"], transport=CallTransport({"south": Client().call}), join_timeout=0.5)
    with pytest.raises(TimeoutError, match=r"Clients \['north'\] have not joined"):
        engine.connect(lambda: SETTINGS, tmp_path, 1)
    assert "Clients ['north'] do not take part in the run" in caplog.text
    engine.stop()
