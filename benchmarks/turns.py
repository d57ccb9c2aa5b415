"""Sides of a benchmark that take turns: each side is a process, which works when its turn comes.

`engine.py` starts a [`Side`] for each side and gives one turn after the other, so that other programs disturb all
sides equally. The process of a side has a [`Turns`] and reports the CPU seconds of each turn. This module imports
neither hf_federated nor pfl.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Turns:
    """The turns of this process. The standard output belongs to the answers, so other output goes to the errors."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started_at = 0.0

    def next(self) -> None:
        """
        End this turn, report its CPU seconds, and wait for the next turn.

        The first report has the CPU seconds of the preparations. After the last turn, the process exits.
        """
        print(time.process_time() - self._started_at, file=self._answers, flush=True)
        if not sys.stdin.readline():
            raise SystemExit
        self._started_at = time.process_time()


class Side:
    """
    The process of a side.

    Args:
        command (`Sequence[str]`): Command of the process.
        env (`Mapping[str, str]`): Environment variables of the process.
        output (`pathlib.Path`): File for the output of the process.

    Attributes:
        preparation_seconds (`float`): CPU seconds of the process until its first turn.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self._command = command
        self._output = output
        pipe = subprocess.PIPE
        with output.open("w") as errors:
            self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        self.preparation_seconds = self._read()

    def turn(self) -> float:
        """Give the process a turn, and return its CPU seconds."""
        print(file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process after its last turn."""
        self._process.communicate()

    def _read(self) -> float:
        assert self._process.stdout is not None
        if answer := self._process.stdout.readline():
            return float(answer)
        tail = "\n".join(self._output.read_text().splitlines()[-30:])
        raise RuntimeError(
            f"{' '.join(self._command)} exited with {self._process.wait()} in its turn. Its output ends with:\n{tail}"
        )


def take_turns(sides: Mapping[str, Side], num_turns: int) -> dict[str, list[float]]:
    """
    Give turns to all sides, one side after the other, and close the sides.

    Args:
        sides (`Mapping[str, Side]`): The sides by name.
        num_turns (`int`): Number of turns of each side. The first turn is not counted.

    Returns:
        `dict[str, list[float]]`: CPU seconds of each counted turn, by side.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(num_turns):
        for name, side in sides.items():
            taken = side.turn()
            if turn:
                seconds[name].append(taken)
    for side in sides.values():
        side.close()
    return seconds


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the minimum and the maximum of the ratios of the turns of two sides."""
    ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)
