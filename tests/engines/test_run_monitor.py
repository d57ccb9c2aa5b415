"""The status of a federation over a network, and clients that the operator expels."""

from __future__ import annotations

import json
import threading
import time

import pytest
from run_files import write_run
from test_network_engine import SETTINGS, Client, answer, run

from hf_federated.cli.main import main
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, NetworkEngine
from hf_federated.engines.run_monitor import expel_client, read_status
from hf_federated.messages import ClientFailure, Metrics
from hf_federated.reporting.run_view import read_run
from hf_federated.transport import ClientRefusedError, GrpcTransport


@pytest.fixture
def engine(tmp_path):
    """An engine with the clients `north` and `south`, which waits for one of them."""
    transport = GrpcTransport("127.0.0.1:0", insecure=True, heartbeat_timeout=5.0)
    engine = NetworkEngine(["north", "south"], transport=transport, num_to_start=1, rejoin_timeout=30)
    engine.transport.start(engine.remote_clients, SETTINGS)
    address = transport.address
    engine.transport.stop()
    engine.transport.address = address
    yield engine
    engine.stop()


def begin(engine: NetworkEngine, tmp_path, *names: str) -> dict[str, Client]:
    """Start the server, and then the clients."""
    clients: dict[str, Client] = {}

    def join() -> None:
        clients.update({name: Client(engine.transport.address, name) for name in names})

    joining = threading.Thread(target=join)
    joining.start()
    engine.connect(lambda: SETTINGS, tmp_path, num_rounds=3)
    engine.start(EngineContext(lambda: pytest.fail("the server trains no client"), {}, "data", process_group()))
    joining.join(10)
    return clients


def status_when(tmp_path, condition, timeout: float = 10):
    deadline = time.monotonic() + timeout
    while not condition(status := read_status(tmp_path)):
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def test_status_shows_round_clients_and_bytes(engine, tmp_path, capsys):
    begin(engine, tmp_path, "north")
    replies = run(engine, round=1)
    assert isinstance(replies["north"], Metrics) and isinstance(replies["south"], ClientFailure)
    status = status_when(tmp_path, lambda found: found["round"] == 2)
    assert (status["state"], status["num_rounds"], status["phase"]) == ("running", 3, "evaluation")
    north, south = status["clients"]["north"], status["clients"]["south"]
    assert north["state"] == "waiting" and south["state"] == "absent"
    assert north["bytes_down"] > 0 and north["bytes_up"] > 0 and south["bytes_down"] == 0
    assert north["num_examples"] == 3 and north["seconds_since_heard"] < 5
    assert main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "running: round 2 of 3, evaluation" in printed and "south   absent" in printed
    write_run(tmp_path, num_clients=2, names=["north", "south"], ended=None)
    assert {name: client.state for name, client in read_run(tmp_path).clients.items()} == {
        "north": "done",
        "south": "absent",
    }
    engine.stop()
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "complete"


def test_expelled_client_leaves_the_round_and_is_refused(engine, tmp_path, capsys):
    asked = threading.Event()

    def never(message):
        asked.set()
        time.sleep(60)

    clients = begin(engine, tmp_path, "north")
    south = Client(engine.transport.address, "south", reply=never)
    while not engine.transport.is_connected("south"):
        time.sleep(0.01)
    results = {}
    running = threading.Thread(target=lambda: results.update(run(engine)))
    running.start()
    assert asked.wait(10)
    assert main(["expel", str(tmp_path), "south"]) == 0
    running.join(10)
    assert not running.is_alive(), "the round still waits for the expelled client"
    assert "the operator has expelled the client" in results["south"].error
    assert isinstance(results["north"], Metrics)
    with pytest.raises(ClientRefusedError, match="The operator of the server has expelled client 'south'"):
        Client(engine.transport.address, "south")
    assert status_when(tmp_path, lambda found: found["clients"]["south"]["state"] == "expelled")
    # The next round does not ask the client.
    assert isinstance(run(engine, 1)["north"], Metrics) and len(south.received) == 1
    assert clients["north"].thread.is_alive()


def test_unknown_client_cannot_be_expelled(engine, tmp_path, capsys):
    begin(engine, tmp_path, "north")
    assert main(["expel", str(tmp_path), "west"]) == 2
    assert "the run has no client 'west'. Its clients are north, south." in capsys.readouterr().err
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "has no status of a server" in capsys.readouterr().err
    expel_client(tmp_path, "north")
    expel_client(tmp_path, "north")
    assert json.loads((tmp_path / "network" / "expelled.json").read_text()) == ["north"]


@pytest.mark.parametrize("reason", ["", "OSError on the server"])
def test_client_of_an_ended_run_cannot_be_expelled(engine, tmp_path, capsys, reason):
    begin(engine, tmp_path, "north")
    engine.stop(reason)
    assert main(["expel", str(tmp_path), "north"]) == 2
    printed = capsys.readouterr().err
    assert f"the run has ended ({'failed: ' * bool(reason)}{reason or 'complete'}), so no client can" in printed
    assert ("--resume" in printed) == bool(reason) and not (tmp_path / "network" / "expelled.json").exists()


def test_server_without_a_sign_expels_the_client_when_it_continues(engine, tmp_path, capsys):
    begin(engine, tmp_path, "north")
    engine.stop()
    path = tmp_path / "network" / "status.json"
    path.write_text(json.dumps({**read_status(tmp_path), "state": "running", "updated_at": time.time() - 60}))
    assert main(["expel", str(tmp_path), "north"]) == 0
    assert "has not updated its status for 60 s: it has ended or hangs" in capsys.readouterr().out
    assert json.loads((tmp_path / "network" / "expelled.json").read_text()) == ["north"]
    assert main(["status", str(tmp_path)]) == 1


def test_slow_client_is_named_as_late(engine, tmp_path):
    released = threading.Event()

    def slowly(message):
        released.wait(20)
        return answer(message)

    begin(engine, tmp_path, "north")
    Client(engine.transport.address, "south", reply=slowly)
    while not engine.transport.is_connected("south"):
        time.sleep(0.01)
    texts = []
    engine.on_wait = lambda: texts.append(engine.describe_waiting())
    running = threading.Thread(target=run, args=(engine,))
    running.start()
    status_when(tmp_path, lambda found: found["clients"]["south"]["state"] == "late")
    status_when(tmp_path, lambda found: any(text.startswith("late: south (") for text in texts))
    released.set()
    running.join(10)
    assert not running.is_alive()
