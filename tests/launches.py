"""Read the files that a run of `rank_worker.py` leaves in its directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_federated.testing.results import RunResult, same_bits


__all__ = ["Finished", "Launch", "last_error", "logs", "notes", "same_bits", "weights"]

# `launch(directory, scenario, world_size, ...)` runs a scenario and returns the exit codes and the duration.
Launch = Callable[..., dict[str, Any]]
# `finished(scenario, world_size)` returns the directory of an undisturbed run.
Finished = Callable[[str, int], Path]


def logs(directory: Path) -> str:
    return RunResult(directory).logs()


def notes(directory: Path, rank: int = 0) -> dict[str, Any]:
    return RunResult(directory).notes(rank)


def weights(directory: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return RunResult(directory).weights(rank)


def last_error(directory: Path, rank: int) -> str:
    return RunResult(directory).last_error(rank)
