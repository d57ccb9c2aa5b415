"""`NetworkEngine` with clients in threads: joining, deadlines, lost clients and invalid replies."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny import arguments, rows, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, FederatedTrainer, federate
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, NetworkEngine, Plan
from hf_federated.messages import Announcement, ClientFailure, Evaluate, Message, Metrics, read_message
from hf_federated.security.certificates import create_certificates
from hf_federated.trainer.client_requests import ClientRequests
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import (
    ClientRefusedError,
    GrpcConnection,
    GrpcServer,
    GrpcTransport,
    ServerUnreachableError,
    grpc_transport,
)
from hf_federated.transport.framing import frame, unframe


SETTINGS = NetworkSettings({"learning_rate": "0.1", "aggregation": "FedAvg"})


def announced(num_examples: int | None = 3, num_eval_examples: int = 3) -> Announcement:
    return Announcement(num_examples, num_examples, num_eval_examples, examples_per_step=8)


def answer(message: Message) -> Message:
    return Metrics(message.round, message.client_id, num_examples=3, metrics={"eval_loss": 0.5}, nonce=message.nonce)


class Client:
    """A client in a thread. It answers each request with a function, until the server ends the run."""

    def __init__(
        self,
        address: str,
        name: str,
        reply: Callable[[Message], Any] = answer,
        settings=SETTINGS,
        announcement: Announcement | None = None,
    ) -> None:
        content = (announcement or announced()).to_bytes()
        self.connection = GrpcConnection(
            address, None, name, settings, content, insecure=True, connect_timeout=5, reconnect_timeout=5
        )
        self.received: list[Message] = []
        self._reply = reply
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        reply = None
        while (blob := self.connection.receive(reply)) is not None:
            _, content = unframe(blob, state=str, keep=list, num_clients=int)
            message = read_message(bytes(content))
            self.received.append(message)
            answered = self._reply(message)
            if answered is None:
                return
            reply = answered if isinstance(answered, bytes) else answered.to_bytes()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    """The engine writes to its output directory, which is relative to the current one in these tests."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def network(tmp_path, monkeypatch) -> Iterator[Callable[..., NetworkEngine]]:
    """Start an engine, whose clients `north` and `south` can join."""
    monkeypatch.chdir(tmp_path)  # for the files of an output directory
    with ExitStack() as stack:

        def start(*clients: str, **options) -> NetworkEngine:
            engine = NetworkEngine(
                clients or ("north", "south"),
                transport=GrpcTransport(
                    options.pop("address", "127.0.0.1:0"),
                    insecure=True,
                    heartbeat_timeout=options.pop("heartbeat", 2.0),
                ),
                **{"join_timeout": 10, "rejoin_timeout": 1, **options},
            )
            engine.transport.start(engine.remote_clients, SETTINGS)
            engine._is_open = True
            stack.callback(engine.stop)
            return engine

        yield start


def begin(engine: NetworkEngine) -> None:
    engine.connect(lambda: SETTINGS, Path("run"), 1)
    engine.start(EngineContext(lambda: pytest.fail("the server trains no client"), {}, "data", process_group()))


def run(engine: NetworkEngine, round: int = 0, **options) -> dict[str, Message]:
    cohort = tuple(engine.remote_clients)
    plan = Plan(round, cohort, lambda client_id: Evaluate(round, client_id, {}), "evaluation", **options)
    return engine.collect(plan)


def test_clients_answer_and_announce_their_sizes(network):
    engine = network()
    north, south = (
        Client(engine.transport.address, name, announcement=announced(size))
        for name, size in (("north", 7), ("south", None))
    )
    begin(engine)
    assert engine.remote_clients.num_rows == {"north": 7, "south": None}
    for round in range(3):
        assert [reply.metrics for reply in run(engine, round).values()] == [{"eval_loss": 0.5}] * 2
    assert [message.round for message in north.received] == [message.round for message in south.received] == [0, 1, 2]
    engine.stop()
    for client in (north, south):
        client.thread.join(10)
        assert client.connection.end == ""


def test_reason_for_the_end_of_the_run_reaches_the_clients(network):
    engine = network("north")
    north = Client(engine.transport.address, "north")
    begin(engine)
    engine.stop("ValueError on the server")
    north.thread.join(10)
    assert north.connection.end == "ValueError on the server"


def test_client_with_other_settings_is_refused_by_name(network):
    engine = network()
    others = NetworkSettings({"learning_rate": "0.5", "aggregation": "FedAvg", "optim": "sgd"})
    with pytest.raises(ClientRefusedError) as error:
        Client(engine.transport.address, "north", settings=others)
    assert "learning_rate: 0.1 at the server, 0.5 at the client" in str(error.value)
    assert "optim: not set at the server, sgd at the client" in str(error.value)
    assert "aggregation" not in str(error.value)


def test_unknown_client_is_refused(network):
    engine = network()
    with pytest.raises(ClientRefusedError, match="does not know a client 'west'"):
        Client(engine.transport.address, "west")


def test_second_process_of_a_client_is_refused_while_the_first_is_active(network):
    engine = network(heartbeat=20.0)
    Client(engine.transport.address, "north")
    with pytest.raises(ClientRefusedError, match="already connected by another link or process"):
        Client(engine.transport.address, "north")


def test_absent_clients_are_named_if_too_few_join(network):
    engine = network(join_timeout=0.5)
    Client(engine.transport.address, "south")
    with pytest.raises(TimeoutError, match=r"Clients \['north'\] have not joined within 0.5 s, and num_to_start is 2"):
        engine.connect(lambda: SETTINGS, Path("run"), 1)


def test_complete_run_does_not_require_its_clients(network):
    engine = network(join_timeout=0.5)
    south = Client(engine.transport.address, "south")
    engine.connect(lambda: SETTINGS, Path("run"), 1, is_complete=True)
    engine.stop()
    south.thread.join(10)
    assert south.connection.end == ""


def test_client_logs_once_what_it_waits_for(network, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    monkeypatch.setattr(grpc_transport, "POLL_SECONDS", 0.05)
    engine = network(join_timeout=10)
    waiting = grpc_transport.WAITING_TEXTS
    Client(engine.transport.address, "north")
    time.sleep(0.5)  # several polls
    Client(engine.transport.address, "south", reply=lambda message: (time.sleep(0.5), answer(message))[1])
    begin(engine)
    for number in range(2):
        run(engine, number)
    time.sleep(0.5)
    lines = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "waiting"]
    assert [line for line in lines if "north" in line] == [
        f"Client 'north' {text}." for text in (waiting[b"S"], waiting[b"O"], waiting[b"N"])
    ]
    assert [line for line in lines if "south" in line] == [f"Client 'south' {waiting[b'N']}."]


def test_run_has_started_although_a_client_is_absent(network, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    monkeypatch.setattr(grpc_transport, "POLL_SECONDS", 0.05)
    engine = network(num_to_start=1)
    Client(engine.transport.address, "north")
    begin(engine)
    assert isinstance(run(engine)["north"], Metrics)
    time.sleep(0.3)
    lines = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "waiting"]
    assert lines[-1] == f"Client 'north' {grpc_transport.WAITING_TEXTS[b'N']}."


def test_client_logs_once_that_it_waits_for_the_server(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ServerUnreachableError):
        GrpcConnection(address, None, "north", SETTINGS, b"", insecure=True, connect_timeout=1)
    (line,) = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "waiting"]
    assert line.startswith(f"Client 'north' waits for the server at {address}, at most 1 s (UNAVAILABLE: ")


def test_client_announces_itself_again_if_the_server_restarts_in_between(network):
    arrived, release = threading.Event(), threading.Event()

    def answer_late(client_id: str, message: bytes) -> bytes:
        arrived.set()
        release.wait(10)
        return b""

    first = GrpcServer(answer_late, None, ["north"], SETTINGS, insecure=True)
    first.start()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Client, first.address, "north")
        assert arrived.wait(10)
        threading.Timer(0.2, release.set).start()
        first.close(grace=0)
        engine = network("north", address=first.address)
        begin(engine)
        assert isinstance(run(engine)["north"], Metrics)
        joining.result(10)


def test_request_that_does_not_arrive_in_time_is_sent_again(network, monkeypatch):
    monkeypatch.setattr(grpc_transport, "_ANSWER_SECONDS", 0.5)
    engine = network("north")
    builds: list[int] = []

    def build() -> bytes:
        builds.append(len(builds))
        time.sleep(1.5 if len(builds) == 1 else 0)
        return frame({"state": "", "keep": [], "num_clients": 1}) + b"content"

    def connect() -> GrpcConnection:
        return GrpcConnection(
            engine.transport.address,
            None,
            "north",
            SETTINGS,
            announced(1).to_bytes(),
            insecure=True,
            connect_timeout=9,
        )

    requests = ClientRequests("north", process_group(), connect)
    engine.transport.send("north", build)
    request = requests.receive()
    assert request is not None and bytes(request.content) == b"content" and len(builds) == 2
    requests.close()


def test_client_that_has_not_joined_fails_at_once_and_takes_part_when_it_joins(network):
    engine = network(num_to_start=1)
    Client(engine.transport.address, "north")
    begin(engine)
    replies = run(engine)
    assert isinstance(replies["north"], Metrics)
    assert replies["south"].error == "the client has not joined"
    Client(engine.transport.address, "south")
    deadline = time.monotonic() + 5
    while not engine.transport.is_connected("south") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(isinstance(reply, Metrics) for reply in run(engine, 1).values())


def test_client_that_leaves_fails_after_the_rejoin_timeout(network):
    engine = network()
    north = Client(engine.transport.address, "north")

    def leave(message: Message) -> None:
        north.connection.close()

    north._reply = leave
    Client(engine.transport.address, "south")
    begin(engine)
    started = time.monotonic()
    replies = run(engine)
    assert isinstance(replies["south"], Metrics)
    assert isinstance(replies["north"], ClientFailure)
    assert replies["north"].error == "the client was absent for 1 s"
    assert time.monotonic() - started < 8
    # The next round does not wait for the client.
    started = time.monotonic()
    assert run(engine, 1)["north"].error == "the client was absent for 1 s"
    assert time.monotonic() - started < 0.5


def test_client_that_joins_again_receives_the_open_request_again(network):
    engine = network("north", rejoin_timeout=10)
    seen: list[str] = []

    def leave_once(message: Message) -> Message | None:
        seen.append(message.nonce)
        if len(seen) == 1:
            first.connection.close()
            threading.Thread(target=lambda: Client(engine.transport.address, "north", leave_once)).start()
            return None
        return answer(message)

    first = Client(engine.transport.address, "north", leave_once)
    begin(engine)
    assert isinstance(run(engine)["north"], Metrics)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_client_that_returns_after_the_rejoin_timeout_does_not_get_the_old_request(network):
    engine = network()
    received: list[int] = []

    def leave(message: Message) -> None:
        north.connection.close()

    def note(message: Message) -> Message:
        received.append(message.round)
        return answer(message)

    north = Client(engine.transport.address, "north", leave)
    Client(engine.transport.address, "south")
    begin(engine)
    assert run(engine)["north"].error == "the client was absent for 1 s"
    Client(engine.transport.address, "north", note)
    deadline = time.monotonic() + 5
    while not engine.transport.is_connected("north") and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # An open request would arrive now.
    assert all(isinstance(reply, Metrics) and reply.round == 1 for reply in run(engine, 1).values())
    assert received == [1]


def test_late_reply_is_ignored_and_its_client_continues_with_the_next_round(network, caplog):
    engine = network()
    slow = threading.Event()

    def wait(message: Message) -> Message:
        if message.round == 0:
            slow.wait(10)
        return answer(message)

    late = Client(engine.transport.address, "north", wait)
    Client(engine.transport.address, "south")
    begin(engine)
    replies = run(engine, deadline=0.5, min_replies=1)
    assert replies["north"].error == "no reply within 0.5 seconds"
    slow.set()
    replies = run(engine, 1)
    assert all(isinstance(reply, Metrics) and reply.round == 1 for reply in replies.values())
    assert [message.round for message in late.received] == [0, 1]
    assert any("Ignored a reply of client 'north'" in text for text in caplog.messages)


def test_second_large_reply_is_read_when_the_first_was_processed(network):
    engine = network()
    large = bytes(3 << 20)
    for name in ("north", "south"):
        Client(engine.transport.address, name, lambda message: large)
    begin(engine)
    request = Evaluate(0, "", {}).to_bytes()
    for name in ("north", "south"):
        engine.transport.send(name, lambda: frame({"state": "", "keep": [], "num_clients": 2}) + request)
    assert engine.transport.receive(10).blob == large
    time.sleep(0.5)
    assert engine.transport._events.empty()
    assert engine.transport.receive(10).blob == large


@pytest.mark.parametrize("reply", [b"\0", b"\0" * 100, b"not a message"], ids=["byte", "zeros", "text"])
def test_damaged_reply_is_a_failure_of_its_client(network, reply):
    engine = network()
    Client(engine.transport.address, "north", lambda message: reply)
    Client(engine.transport.address, "south")
    begin(engine)
    replies = run(engine)
    assert "its reply is damaged" in replies["north"].error
    assert isinstance(replies["south"], Metrics)


def test_invalid_announcement_does_not_count_as_joined_examples(network, caplog):
    engine = network("north")
    with GrpcConnection(engine.transport.address, None, "north", SETTINGS, b"\0\0\0\2{}", insecure=True):
        engine.connect(lambda: SETTINGS, Path("run"), 1)
    assert any("invalid announcement" in text for text in caplog.messages)
    assert engine.remote_clients.num_rows == {"north": None}


def test_first_announcement_of_a_client_counts(network, caplog):
    """A hostile client could otherwise raise the number of examples that limits its weight."""
    engine = network("north", rejoin_timeout=10)

    def leave(message: Message) -> None:
        first.connection.close()

    first = Client(engine.transport.address, "north", leave, announcement=announced(5))
    begin(engine)
    threading.Timer(0.5, lambda: Client(engine.transport.address, "north", announcement=announced(500))).start()
    assert isinstance(run(engine)["north"], Metrics)
    assert engine.remote_clients.num_rows == {"north": 5}
    assert any("num_examples=500 (before: 5)" in text for text in caplog.messages)


def test_parties_authenticate_each_other_with_certificates(tmp_path):
    create_certificates(tmp_path, ["localhost"], ["north", "south"], rsa_bits=2048)
    engine = NetworkEngine(["north"], str(tmp_path), address="localhost:0", join_timeout=20)
    engine.transport.start(engine.remote_clients, SETTINGS)
    engine._is_open = True
    connect = {"session_config": SETTINGS, "announcement": announced(1).to_bytes(), "connect_timeout": 5}
    try:
        with pytest.raises(ClientRefusedError, match="does not know|not among"):
            GrpcConnection(engine.transport.address, str(tmp_path), "south", **connect)
        with GrpcConnection(engine.transport.address, str(tmp_path), "north", **connect) as connection:
            begin(engine)
            assert engine.remote_clients.num_rows == {"north": 1} and connection.end is None
    finally:
        engine.stop()


def test_server_without_certificates_is_refused():
    with pytest.raises(ValueError, match="insecure"):
        NetworkEngine(["north"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": []}, "list of different client ids"),
        ({"clients": "north"}, "list of different client ids"),
        ({"clients": ["a", "a"]}, "list of different client ids"),
        ({"clients": ["a"], "num_to_start": 2}, "num_to_start"),
        ({"clients": ["a"], "rejoin_timeout": 0}, "rejoin_timeout"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NetworkEngine(insecure=True, **options)


def server_arguments(directory) -> dict[str, Any]:
    return {
        "model": tiny_model(),
        "args": arguments(directory),
        "engine": NetworkEngine(["north"], address="127.0.0.1:0", insecure=True),
    }


def test_server_with_training_examples_or_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Leave `train_dataset` out on the server"):
        FederatedTrainer(**server_arguments(tmp_path), train_dataset=rows(4), federation=FederatedConfig(num_rounds=1))
    with pytest.raises(ValueError, match="Pass `federation` too"):
        FederatedTrainer(**server_arguments(tmp_path))


def test_server_whose_trainer_prepares_its_examples_needs_an_evaluation_example(tmp_path):
    class Preparing(Trainer):
        def _prepare_dataset(self, dataset: Any) -> Any:
            return dataset

    with pytest.raises(ValueError, match="Preparing prepares its training examples in the constructor.*eval_dataset"):
        federate(Preparing)(**server_arguments(tmp_path), federation=FederatedConfig(num_rounds=1))


def test_client_of_several_processes_that_would_not_train_together_is_refused(tmp_path, monkeypatch):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=rows(4),
        federation=FederatedConfig(num_rounds=1, parallelism="clients"),
    )
    monkeypatch.setattr(trainer._federation_setup.processes, "world_size", 2)
    with pytest.raises(ValueError, match="parallelism='clients', but the 2 processes of this launch train one client"):
        trainer.join("127.0.0.1:1", client_id="north", insecure=True)


def test_client_with_the_examples_of_other_clients_is_refused(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"north": rows(4), "south": rows(4)},
        federation=FederatedConfig(num_rounds=1),
    )
    with pytest.raises(ValueError, match="client_id='west' is not in `train_dataset`"):
        trainer.join("127.0.0.1:1", client_id="west", insecure=True)


def test_process_with_one_client_raises_errors_of_the_cohort_when_it_trains(tmp_path):
    """Its trainer may be that of a client, which does not know how many clients the federation has."""
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"north": rows(4)},
        federation=FederatedConfig(num_rounds=1, clients_per_round=3),
    )
    with pytest.raises(ValueError, match="clients_per_round=3, but the federation has 1 clients"):
        trainer.train()


# ---- Requests without a plan


def ask(engine: NetworkEngine, client_id: str, round: int) -> None:
    engine.send(client_id, lambda client_id: Evaluate(round, client_id, {}), round=round)


def received(replies: Iterator[Message]) -> list[tuple[str, int]]:
    found = list(replies)
    assert all(isinstance(reply, Metrics) for reply in found), found
    return [(reply.client_id, reply.round) for reply in found]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def asked(network) -> Callable[[], tuple[NetworkEngine, threading.Event, dict[str, Client]]]:
    """Start an engine whose client `north` replies to the request of round 0 when the event is set."""

    def start() -> tuple[NetworkEngine, threading.Event, dict[str, Client]]:
        engine, released = network(), threading.Event()

        def wait(message: Message) -> Message:
            if message.round == 0:
                released.wait(10)
            return answer(message)

        clients = {"north": Client(engine.transport.address, "north", wait)}
        clients["south"] = Client(engine.transport.address, "south")
        begin(engine)
        ask(engine, "north", 0)
        return engine, released, clients

    return start


def test_request_stays_open_beyond_a_round(asked):
    engine, released, _ = asked()
    for round in (1, 2):
        plan = Plan(round, ("south",), lambda client_id, round=round: Evaluate(round, client_id, {}))
        assert received(engine.run(plan)) == [("south", round)]
    assert engine.open_requests == ("north",)
    released.set()
    assert received(engine.replies()) == [("north", 0)]
    assert {round: list(clients) for round, clients in engine.ledger.to_dict()["rounds"].items()} == {
        "0": ["north"],
        "1": ["south"],
        "2": ["south"],
    }
    assert all(engine.ledger.to_dict()["rounds"]["0"]["north"])


def test_reply_that_arrives_while_the_server_waits_for_another_client_is_not_lost(asked):
    engine, released, clients = asked()
    ask(engine, "south", 1)
    threading.Timer(0.5, released.set).start()
    assert received(engine.replies(clients=["north"])) == [("north", 0)]
    assert [message.round for message in clients["south"].received] == [1] and engine.open_requests == ("south",)
    # The next plan begins with the events that have arrived.
    assert received(engine.run(Plan(2, ("north",), lambda name: Evaluate(2, name, {})))) == [("north", 2)]
    assert received(engine.replies()) == [("south", 1)]


def test_caller_that_stops_early_gets_the_other_replies_later(asked):
    engine, released, _ = asked()
    ask(engine, "south", 1)
    assert next(engine.replies()).client_id == "south"
    assert received(engine.replies(deadline=0.2)) == [] and engine.open_requests == ("north",)
    ask(engine, "south", 3)
    released.set()
    assert sorted(received(engine.replies())) == [("north", 0), ("south", 3)]


def test_reply_to_a_withdrawn_request_is_ignored_and_the_client_answers_the_next_one(asked, caplog):
    engine, released, clients = asked()
    wait_until(lambda: len(clients["north"].received) == 1)
    engine.withdraw("north")
    assert engine.open_requests == ()
    released.set()
    ask(engine, "north", 1)
    assert received(engine.replies()) == [("north", 1)]
    assert any("Ignored a reply of client 'north'" in text for text in caplog.messages)


@pytest.mark.parametrize("is_kept", [True, False])
def test_reply_that_arrived_before_its_request_was_withdrawn_is_ignored(asked, caplog, is_kept):
    engine, released, _ = asked()
    released.set()
    wait_until(lambda: not engine.transport._events.empty())
    if is_kept:
        ask(engine, "south", 1)
        assert received(engine.replies(clients=["south"])) == [("south", 1)]
    engine.withdraw("north")
    ask(engine, "north", 2)
    assert received(engine.replies()) == [("north", 2)]
    assert [text for text in caplog.messages if "came too late" in text] == [
        "Ignored a reply of client 'north': it came too late."
    ]


def test_request_to_a_client_that_has_not_joined_is_a_failure_and_other_requests_stay_open(network):
    engine = network(num_to_start=1)
    north = Client(engine.transport.address, "north", lambda message: slow.wait(10) and answer(message))
    slow = threading.Event()
    begin(engine)
    ask(engine, "north", 4)
    ask(engine, "south", 4)
    failure = next(engine.replies())
    assert isinstance(failure, ClientFailure) and (failure.client_id, failure.round) == ("south", 4)
    assert failure.error == "the client has not joined" and engine.open_requests == ("north",)
    south = Client(engine.transport.address, "south")
    wait_until(lambda: engine.transport.is_connected("south"))
    ask(engine, "south", 5)
    slow.set()
    assert sorted(received(engine.replies())) == [("north", 4), ("south", 5)]
    assert [len(client.received) for client in (north, south)] == [1, 1]


def test_request_to_a_client_that_leaves_is_a_failure_after_the_rejoin_timeout(network):
    engine = network()
    north = Client(engine.transport.address, "north", lambda message: north.connection.close())
    Client(engine.transport.address, "south")
    begin(engine)
    ask(engine, "north", 3)
    ask(engine, "south", 4)
    replies = {reply.client_id: reply for reply in engine.replies()}
    assert (replies["north"].error, replies["north"].round) == ("the client was absent for 1 s", 3)
    assert isinstance(replies["south"], Metrics)


def test_client_that_joins_again_answers_a_request_that_was_sent_in_an_earlier_round(network):
    engine = network(rejoin_timeout=10)
    north = Client(engine.transport.address, "north", lambda message: north.connection.close())
    Client(engine.transport.address, "south")
    begin(engine)
    ask(engine, "north", 0)
    wait_until(lambda: not engine.transport.is_connected("north"))
    Client(engine.transport.address, "north")
    assert received(engine.run(Plan(1, ("south",), lambda name: Evaluate(1, name, {})))) == [("south", 1)]
    assert received(engine.replies()) == [("north", 0)]
