"""A federation over a network gives the bytes of an undisturbed run, also if the network fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import logs, notes, same_bits, weights
from network_faults import REPORT_FILE
from workers import without_timings, worker


pytestmark = pytest.mark.slow

NUM_PARTIES = 4
SCENARIOS = ("aggregation fedavg", "distillation fedid")
# A client is lost after a heartbeat timeout of 4 seconds. Faults happen after each `share` of the bytes of a run.
FAULTS: dict[str, dict[str, Any]] = {
    "cut for longer than the heartbeat": {"kind": "cut", "share": 0.3, "seconds": 6.0, "times": 2},
    "short cuts": {"kind": "cut", "share": 0.08, "seconds": 0.1, "times": 10},
    "half-open connection": {"kind": "hold", "share": 0.3, "times": 2},
    "slow link": {"kind": "slow", "delay": 0.1, "bytes_per_second": 1e6},
    "calls": {"kind": "calls", "seed": 0},
}


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call `run(directory, scenario, ...)` to train with three clients, and get the answer of the worker."""
    with worker("network_worker.py") as ask:

        def start(directory: Path, scenario: str, **options: Any) -> dict[str, Any]:
            federation = {"clients_per_round": 1.0, **options.pop("federation", {})}
            request = {"scenario": scenario, "num_parties": NUM_PARTIES, "federation": federation, **options}
            return ask({"directory": str(directory), "reconnect_timeout": 3, **request})

        yield start


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory) -> Callable[[str], Path]:
    """The directory of a run without faults."""
    directories: dict[str, Path] = {}

    def directory(scenario: str) -> Path:
        if scenario not in directories:
            directories[scenario] = tmp_path_factory.mktemp("undisturbed")
            answer = run(directories[scenario], scenario)
            assert answer["codes"] == [0] * NUM_PARTIES, logs(directories[scenario])
        return directories[scenario]

    return directory


def assert_same_run(expected: Path, found: Path) -> None:
    assert same_bits(weights(expected), weights(found)), logs(found)
    reference, result = notes(expected), notes(found)
    assert result["ledger"] == reference["ledger"]
    assert result["rejected"] == [{}] * len(result["rejected"])
    assert without_timings(result["log"]) == without_timings(reference["log"])


def bytes_of(directory: Path) -> int:
    rounds = notes(directory)["ledger"]["rounds"].values()
    return sum(sum(up_and_down) for clients in rounds for up_and_down in clients.values())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_faults_of_the_network_do_not_change_a_byte(run, undisturbed, tmp_path, scenario, fault):
    expected = undisturbed(scenario)
    faults = {**FAULTS[fault], "every": FAULTS[fault].get("share", 0) * bytes_of(expected)}
    answer = run(tmp_path, scenario, faults=faults)
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    print(f"{scenario}, {fault}: {answer['seconds']:.1f} s, {report}")
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    assert_same_run(expected, tmp_path)
    if FAULTS[fault]["kind"] == "calls":
        assert len(report) == 7 and min(report.values()) > 0
    else:
        assert report["faults"] == FAULTS[fault].get("times", 0)


def test_second_process_of_a_client_is_refused_and_does_not_change_a_byte(run, undisturbed, tmp_path):
    """The second process has its own output directory, like a client that was started on two machines."""
    answer = run(tmp_path, "aggregation fedavg", twin=2)
    assert answer["codes"] == [0] * NUM_PARTIES and answer["twin"] == 1, logs(tmp_path)
    assert "ClientRefusedError" in (tmp_path / "rank-2.log").read_text()
    assert_same_run(undisturbed("aggregation fedavg"), tmp_path)


def test_client_that_joins_in_the_third_round_takes_part_in_it(run, tmp_path):
    answer = run(tmp_path, "aggregation fedprox", late={"party": 3, "round": 2}, federation={"min_clients": 2})
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    rejected = notes(tmp_path)["rejected"]
    assert [list(names) for names in rejected] == [["client 2"], ["client 2"], []]
    assert all("the client has not joined" in names["client 2"] for names in rejected[:2])


def test_killed_server_resumes_with_a_client_that_joined_late(run, tmp_path):
    """The checkpoint does not know the number of examples of the client."""
    options = {"late": {"party": 3, "round": 2}, "federation": {"min_clients": 2}}
    for name, kill in (("undisturbed", None), ("killed", {"party": 0, "round": 2})):
        answer = run(tmp_path / name, "aggregation fedprox", kill=kill, **options)
        assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path / name)
    assert answer["is_killed"]
    assert same_bits(weights(tmp_path / "undisturbed"), weights(tmp_path / "killed"))


def test_complete_run_resumes_without_its_clients(run, tmp_path):
    assert run(tmp_path, "aggregation fedavg")["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    expected = weights(tmp_path)
    (tmp_path / "rank-0.safetensors").unlink()
    answer = run(tmp_path, "aggregation fedavg", absent=[1, 2, 3], resume=True)
    assert answer["codes"] == [0], logs(tmp_path)
    assert same_bits(weights(tmp_path), expected)


def test_run_goes_on_without_a_client_that_leaves_for_ever(run, tmp_path):
    kill = {"party": 3, "round": 1, "stays_away": True}
    answer = run(tmp_path, "aggregation fedprox", kill=kill, federation={"min_clients": 2}, rejoin_timeout=1)
    assert answer["codes"] == [0, 0, 0, -9], logs(tmp_path)
    rejected = notes(tmp_path)["rejected"]
    assert [list(names) for names in rejected] == [[], ["client 2"], ["client 2"]]
    assert all("the client was absent for 1 s" in names["client 2"] for names in rejected[1:])
