"""`RunResult`: the files that a run leaves, and the comparison of two runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..clients.state_history import DIGESTS_FILE
from ..clients.store import SUFFIX
from .engines import TIMING
from .runs import RUN_DIR


_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt): ")


@dataclass(frozen=True)
class RunResult:
    """
    The files of a run.

    Args:
        directory (`pathlib.Path`): Directory of the run.
    """

    directory: Path

    def weights(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """Read the final model of a process."""
        return load_file(self.directory / f"rank-{rank}.safetensors")

    def notes(self, rank: int = 0) -> dict[str, Any]:
        """Read the log, the ledger and the cohorts of a process."""
        return json.loads((self.directory / f"rank-{rank}.json").read_text(encoding="utf-8"))

    def states(self) -> dict[str, bytes]:
        """Read the states of server and clients in the last checkpoint."""
        checkpoints = (self.directory / RUN_DIR).glob("checkpoint-*")
        checkpoint = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]))
        return {
            str(path.relative_to(checkpoint)): path.read_bytes()
            for path in (checkpoint / "federated").rglob("*")
            # The manifest lists the digest of `trainer_state.json`, which contains timings.
            if path.is_file() and path.name != "manifest.json"
        }

    def client_states(self) -> dict[str, bytes]:
        """Read the last state of each client, from the last checkpoint or from the folders of the clients."""
        checkpoints = list((self.directory / RUN_DIR).glob("checkpoint-*/federated/clients"))
        if checkpoints:
            folders = [max(checkpoints, key=lambda path: int(path.parents[1].name.rpartition("-")[2]))]
        else:
            kept: dict[Path, list[Path]] = {}
            for file in self.directory.glob(f"client-*/**/{DIGESTS_FILE}"):
                kept.setdefault(file.parents[1], []).append(file)
            folders = [max(files, key=lambda path: path.stat().st_mtime_ns).parent for files in kept.values()]
        return {path.name: path.read_bytes() for folder in folders for path in folder.glob(f"*{SUFFIX}")}

    def logs(self) -> str:
        """Read the ends of the outputs of all processes."""
        paths = sorted(self.directory.glob("rank-*.log"))
        return "\n".join(f"---- {path.name}\n{path.read_text(encoding='utf-8')[-3000:]}" for path in paths)

    def last_error(self, rank: int = 0) -> str:
        """Return the last line of the traceback that ended a process. Libraries may print further lines at exit."""
        lines = (self.directory / f"rank-{rank}.log").read_text(encoding="utf-8").splitlines()
        return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "no output")


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states have the same names and values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_timings(log: list[dict[str, Any]], *excluded: str) -> list[dict[str, Any]]:
    """Return a log without timings and without the excluded names."""
    return [{name: entry[name] for name in entry if not TIMING.search(name) and name not in excluded} for entry in log]


def differences(
    expected: RunResult,
    found: RunResult,
    num_processes: int = 1,
    excluded: tuple[str, ...] = (),
    states: str = "checkpoint",
) -> list[str]:
    """
    Compare two runs byte by byte.

    Args:
        expected ([`RunResult`]): The reference.
        found ([`RunResult`]): The run to compare.
        num_processes (`int`, *optional*, defaults to `1`): Number of processes with a result of the second run.
        excluded (`tuple[str, ...]`, *optional*): Names of the log that may differ.
        states (`str`, *optional*, defaults to `"checkpoint"`): The states to compare: `"checkpoint"` for the last
            checkpoints, `"clients"` for the states of the clients, or `"none"`.

    Returns:
        `list[str]`: The differences, in words. Empty if there are none.
    """
    found_differences = []
    weights, reference = expected.weights(), expected.notes()
    for rank in range(num_processes):
        where = f" on rank {rank}" if num_processes > 1 else ""
        own_weights, notes = found.weights(rank), found.notes(rank)
        names = weights.keys() | own_weights.keys()
        different = [name for name in names if _bits(weights.get(name)) != _bits(own_weights.get(name))]
        if different:
            found_differences.append(f"{len(different)} of {len(names)} tensors of the final model{where}")
        # A resumed run has recorded its own rounds only.
        cohorts = reference["cohorts"][len(reference["cohorts"]) - len(notes["cohorts"]) :]
        found_differences += [f"the cohorts{where}"] if cohorts != notes["cohorts"] else []
        found_differences += [f"the ledger{where}"] if reference["ledger"] != notes["ledger"] else []
        logs = [without_timings(each["log"], *excluded) for each in (reference, notes)]
        if logs[0] != logs[1]:
            found_differences.append(f"{_first_different_entry(*logs)} of the log{where}")
    if states == "checkpoint":
        before, after = expected.states(), found.states()
    elif states == "clients":
        before, after = expected.client_states(), found.client_states()
    else:
        before = after = {}
    files = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if files:
        found_differences.append(f"{len(files)} files with saved states, such as {files[0]}")
    return found_differences


def _bits(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _first_different_entry(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    for before, after in zip(expected, found, strict=False):
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                return f"`{name}` of step {before.get('step')} ({before.get(name)} and {after.get(name)})"
    return f"the number of entries ({len(expected)} and {len(found)})"
