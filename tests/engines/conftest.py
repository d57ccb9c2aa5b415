"""Fixtures that run a federation over several processes, for the tests of `RankEngine`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import Finished, Launch, logs
from workers import worker


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """Call `launch(directory, scenario, world_size, ...)` to get the exit codes and the seconds of a run."""
    with worker("rank_worker.py") as ask:
        yield lambda directory, scenario, world_size, **options: ask(
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
