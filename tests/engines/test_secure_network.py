"""Secure aggregation over a network: the sums of one process, also if a party is killed in any phase."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import secure_memory
from launches import logs, notes, same_bits, weights
from rank_troubles import SIZES
from workers import without_timings, worker

from hf_federated.server.collectors.round_records import FOLDER


SCENARIO = "secure_aggregation secagg"
NUM_PARTIES = 1 + len(SIZES)
NUM_KILLS = 40
# Phases of a client in a round. A client that is killed after the first one loses its secrets.
PHASES = 5


@pytest.fixture(scope="module")
def network() -> Iterator[Callable[..., dict[str, Any]]]:
    with worker("network_worker.py") as ask:
        yield lambda directory, **options: ask(
            {"directory": str(directory), "scenario": SCENARIO, "num_parties": NUM_PARTIES, **options}
        )


@pytest.fixture(scope="module")
def reference(launch, network, tmp_path_factory) -> tuple[Path, float]:
    """A run in one process, to which a run over a network is equal, and the seconds of the run over a network."""
    local, remote = (tmp_path_factory.mktemp(name) for name in ("local", "network"))
    assert launch(local, SCENARIO, 1, engine="local")["codes"] == [0]
    answer = network(remote)
    assert answer["codes"] == [0] * NUM_PARTIES, logs(remote)
    assert_same_run(local, remote)
    return local, answer["seconds"]


def assert_same_run(local: Path, remote: Path) -> None:
    assert same_bits(weights(local), weights(remote)), logs(remote)
    expected, found = notes(local), notes(remote)
    assert found["ledger"] == expected["ledger"]
    assert without_timings(found["log"], "train_loss") == without_timings(expected["log"], "train_loss")


def num_clients(directory: Path) -> list[int]:
    """Number of clients in the sum of each round."""
    return [int(entry["federated/num_clients"]) for entry in notes(directory)["log"] if "loss" in entry]


def test_run_over_a_network_has_the_bytes_of_one_process(reference):
    local, _ = reference
    assert num_clients(local) == [4, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_kill_of_the_server_at_a_random_time_does_not_change_a_byte(network, reference, tmp_path, number):
    local, seconds = reference
    choices = random.Random(f"server {number}")
    answer: dict[str, Any] = {"is_killed": False}
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        after = choices.uniform(0.3, 0.95) * seconds
        answer = network(directory, kill={"party": 0, "after": after})
        if answer["is_killed"]:
            break
        seconds = min(seconds, answer["seconds"])
    assert answer["is_killed"], "every run ended before its kill"
    assert answer["codes"] == [0] * NUM_PARTIES, logs(directory)
    assert_same_run(local, directory)


@pytest.mark.slow
@pytest.mark.parametrize("phase", range(2 * PHASES))
def test_client_killed_in_a_phase_is_lost_in_one_round_only(network, reference, tmp_path, phase):
    """The client is killed when its reply is on disk and not yet sent, and starts again."""
    local, _ = reference
    answer = network(tmp_path, kill={"party": 2, "round": phase, "before_reply": True})
    assert answer["is_killed"]
    assert answer["codes"][:2] == [0, 0], logs(tmp_path)
    found = num_clients(tmp_path)
    assert sorted(found) in ([3, 4, 4], [4, 4, 4])
    if found == [4, 4, 4]:
        assert same_bits(weights(local), weights(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="the memory of a process is read from /proc")
def test_memory_of_the_server_has_one_secret_of_each_client(network, tmp_path):
    """The seed of a client in the sum, or the key of a lost client. The other one would reveal an update."""
    lost, federation = 2, {"clients_per_round": len(SIZES), "num_rounds": 1}
    answer = network(tmp_path, memory=lost, federation=federation, rejoin_timeout=0.5)
    assert [code != 0 for code in answer["codes"]] == [number == lost for number in range(NUM_PARTIES)], logs(tmp_path)
    assert num_clients(tmp_path) == [len(SIZES) - 1]
    num_bytes, *found = (tmp_path / secure_memory.FOUND).read_text().splitlines()
    assert int(num_bytes) > 2**24
    expected = {number: "key" if number == lost else "seed" for number in range(1, NUM_PARTIES)}
    assert found == [f"{secure_memory.SECRETS.format(number)} {name}" for number, name in expected.items()]


def test_server_keeps_only_the_sum_of_a_round(network, tmp_path):
    """The record of a round has the values of one update, and no file of the server has more."""
    answer = network(tmp_path)
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    files = list((tmp_path / "run" / FOLDER).iterdir())
    assert files
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
    outcomes = [
        json.loads(line) for line in (tmp_path / "run" / "network" / "outcomes.jsonl").read_text().splitlines()
    ]
    assert all(entry.keys() == {"round", "client_id", "failure"} for entry in outcomes)
