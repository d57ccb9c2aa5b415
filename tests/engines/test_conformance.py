"""Every algorithm gives the same bytes on every engine: weights, ledger, client states and logs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conformance import ENGINES, REFERENCE, SCENARIOS, SLOW_SCENARIOS, STRICTEST
from launches import logs, notes, same_bits, weights
from workers import without_timings

from hf_federated import AGGREGATIONS, DISTILLATIONS


MARKED_SCENARIOS = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW_SCENARIOS else name for name in SCENARIOS
]
OTHER_ENGINES = [
    pytest.param(name, marks=[] if name == STRICTEST else pytest.mark.slow) for name in ENGINES if name != REFERENCE
]
RESUMED = [pytest.param(name, marks=[] if "every_" in name else pytest.mark.slow) for name in SCENARIOS]


@pytest.fixture(scope="module")
def conform(launch, tmp_path_factory):
    """The directory of a finished run of a scenario on an engine."""
    directories: dict[tuple[str, str], Path] = {}

    def directory(scenario: str, engine: str) -> Path:
        key = (scenario, engine)
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp(f"{scenario} {engine}".replace(" ", "_"))
            num_processes = ENGINES[engine][1]
            answer = launch(directories[key], scenario, num_processes, engine=engine)
            assert answer["codes"] == [0] * num_processes, logs(directories[key])
        return directories[key]

    return directory


def states(directory: Path) -> dict[str, bytes]:
    """The states of server and clients in the last checkpoint."""
    checkpoint = max((directory / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in (checkpoint / "federated").rglob("*")
        if path.is_file() and path.name != "manifest.json"  # lists the digest of `trainer_state.json`, with timings
    }


def assert_same_run(expected: Path, found: Path, num_processes: int, *timings: str) -> None:
    reference = notes(expected)
    for rank in range(num_processes):
        assert same_bits(weights(expected), weights(found, rank))
        result = notes(found, rank)
        for name in ("cohorts", "ledger", "total_flos"):
            assert result[name] == reference[name], name
        assert without_timings(result["log"], *timings) == without_timings(reference["log"], *timings)
    assert states(found) == states(expected)


@pytest.mark.parametrize("engine", OTHER_ENGINES)
@pytest.mark.parametrize("scenario", MARKED_SCENARIOS)
def test_every_engine_gives_the_same_bytes(conform, scenario, engine):
    assert_same_run(conform(scenario, REFERENCE), conform(scenario, engine), ENGINES[engine][1])


@pytest.mark.parametrize("scenario", RESUMED)
def test_a_run_resumed_on_another_engine_gives_the_same_bytes(conform, launch, tmp_path, scenario):
    whole = conform(scenario, REFERENCE)
    num_rounds = notes(whole)["log"][-1]["step"]
    if num_rounds == 1:
        pytest.skip("a run of one round has nothing to resume")
    # The run looks as if it had been stopped after its first round.
    shutil.copytree(whole / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-1")
    num_processes = ENGINES[STRICTEST][1]
    answer = launch(tmp_path, scenario, num_processes, engine=STRICTEST, resume=True)
    assert answer["codes"] == [0] * num_processes, logs(tmp_path)
    assert same_bits(weights(whole), weights(tmp_path))
    assert notes(whole)["ledger"] == notes(tmp_path)["ledger"]
    assert states(tmp_path) == states(whole)
    log, expected = (without_timings(notes(path)["log"], "train_loss") for path in (tmp_path, whole))
    assert log == expected


def test_every_registered_algorithm_has_a_scenario():
    names = {scenario.partition(" ")[2] for scenario in SCENARIOS}
    assert {*AGGREGATIONS, *DISTILLATIONS} <= names


def test_scenarios_train_different_models(conform):
    """A scenario that ignored its algorithm would agree on every engine."""
    scenarios = [scenario for scenario in SCENARIOS if scenario not in SLOW_SCENARIOS]
    models = [json.dumps(notes(conform(scenario, REFERENCE))["log"][:-1]) for scenario in scenarios]
    assert len(set(models)) == len(models)
