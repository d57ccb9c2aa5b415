"""A federation as an NVFlare job gives the bytes of one process. The clients are processes of NVFlare."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance import SCENARIOS
from launches import notes, same_bits, weights
from rank_troubles import SIZES
from workers import without_timings


pytestmark = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs the extra nvflare")

CLIENTS = [f"client-{number}" for number in range(len(SIZES))]
TESTS = Path(__file__).parent.parent


def run_job(folder: Path, environment: str, scenarios: list[str], timeout: int = 300, **request: Any) -> str:
    """Run scenarios in one job, and return what it prints."""
    request = {
        "folder": str(folder),
        "environment": environment,
        "scenarios": scenarios,
        "clients": CLIENTS,
        "server": {},
        "client": {},
        **request,
    }
    result = subprocess.run(
        [sys.executable, str(TESTS / "nvflare_worker.py"), json.dumps(request)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            # The start scripts of a proof of concept call `python3`.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
            # NVFlare writes a configuration to the home folder.
            "HOME": str(folder),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a scenario, which has the results of one process in `local` and of the simulator in `server`."""
    folder = tmp_path_factory.mktemp("simulated")
    run_job(folder, "local", SCENARIOS, timeout=900)
    run_job(folder, "simulator", SCENARIOS, timeout=1800)
    return lambda scenario: folder / scenario


def assert_same_run(folder: Path) -> None:
    log = folder / "rank-0.log"
    assert not log.exists(), log.read_text()
    assert same_bits(weights(folder / "local"), weights(folder / "server"))
    expected, found = notes(folder / "local"), notes(folder / "server")
    assert found["ledger"] == expected["ledger"]
    assert without_timings(found["log"]) == without_timings(expected["log"])


def test_three_clients_in_the_simulator_give_the_bytes_of_one_process(tmp_path):
    request = {"clients": CLIENTS[:3], "client": {"federation": {"clients_per_round": 1.0}}}
    request["server"] = request["client"]
    for environment in ("local", "simulator"):
        run_job(tmp_path, environment, ["aggregation fedavg"], **request)
    assert_same_run(tmp_path / "aggregation fedavg")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_simulator_gives_the_bytes_of_one_process(simulated, scenario):
    assert_same_run(simulated(scenario))


@pytest.mark.slow
def test_proof_of_concept_gives_the_bytes_of_one_process(tmp_path):
    """The parties are provisioned: they have certificates, and the job is submitted by an administrator."""
    scenarios = ["aggregation fedavg", "distillation fedid"]
    run_job(tmp_path, "local", scenarios)
    output = run_job(tmp_path, "poc", scenarios, timeout=550)
    assert "FINISHED:COMPLETED" in output
    for scenario in scenarios:
        assert_same_run(tmp_path / scenario)


@pytest.mark.slow
def test_run_continues_without_a_killed_client(tmp_path):
    federation = {"clients_per_round": 1.0, "min_clients": 3}
    server = {"rejoin_timeout": 2, "call_timeout": 6, "federation": federation}
    client = {"killed": "client-3", "federation": federation}
    run_job(tmp_path, "simulator", ["fedprox"], server=server, client=client, min_clients=3)
    rejected = notes(tmp_path / "fedprox" / "server")["rejected"]
    assert [list(names) for names in rejected] == [[], ["client-3"], ["client-3"]]
    assert all("the client was absent for 2 s" in names["client-3"] for names in rejected[1:])


@pytest.mark.slow
def test_client_with_other_settings_is_refused_by_name(tmp_path):
    """Clients cannot call each other either: only the server may ask a client to train."""
    run_job(tmp_path, "simulator", ["fedprox"], client={"differs": "client-1", "spies": "client-2"})
    error = (tmp_path / "fedprox" / "client-1.log").read_text()
    assert "ClientRefusedError" in error and "learning_rate: 0.001 at the server, 0.5 at the client" in error
    failure = (tmp_path / "fedprox" / "rank-0.log").read_text()
    assert "The run needs 5 clients, but these clients cannot join: 'client-1': it was refused." in failure
    assert "Only the server calls this method, not 'client-2'." in (tmp_path / "spy.log").read_text()
