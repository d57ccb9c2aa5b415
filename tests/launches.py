"""Read the files that a run of `rank_worker.py` leaves in its directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


# `launch(directory, scenario, world_size, ...)` runs a scenario and returns the exit codes and the duration.
Launch = Callable[..., dict[str, Any]]
# `finished(scenario, world_size)` returns the directory of an undisturbed run.
Finished = Callable[[str, int], Path]


def logs(directory: Path) -> str:
    return "\n".join(f"---- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob("rank-*.log")))


def notes(directory: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((directory / f"rank-{rank}.json").read_text())


def weights(directory: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(directory / f"rank-{rank}.safetensors")


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def last_error(directory: Path, rank: int) -> str:
    """The last line of the traceback that ended a process. Libraries may print further lines at exit."""
    log = (directory / f"rank-{rank}.log").read_text()
    return [line for line in log.splitlines() if re.match(r"[\w.]+Error: ", line)][-1]
