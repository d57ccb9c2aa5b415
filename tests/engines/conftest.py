"""Fixtures that run a federation over several processes, for the tests of `RankEngine`."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import Finished, Launch, logs

from hf_federated.testing.processes import WorkerProcess


@pytest.fixture(scope="session")
def launch(rank_worker: WorkerProcess) -> Launch:
    """Call `launch(directory, scenario, world_size, ...)` to get the exit codes and the seconds of a run."""
    return lambda directory, scenario, world_size, **options: rank_worker.ask(
        {"directory": str(directory), "scenario": scenario, "world_size": world_size, **options}
    )


@pytest.fixture(scope="session")
def finished(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Call `finished(scenario, world_size)` to get the directory of a successful run."""
    directories: dict[tuple[str, int], Path] = {}

    def directory(scenario: str, world_size: int) -> Path:
        key = (scenario, world_size)
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp(f"{scenario}-{world_size}".replace(" ", "_"))
            answer = launch(directories[key], scenario, world_size)
            assert answer["codes"] == [0] * world_size, logs(directories[key])
        return directories[key]

    return directory
