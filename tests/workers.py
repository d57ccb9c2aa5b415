"""Processes that train for a test, and what their logs have in common."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def worker(name: str) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """
    A script beside this file that imports the libraries once and then answers a request a line.

    Args:
        name (`str`): Of the file.

    Yields:
        `Callable`: Takes a request, whose `"directory"` is made if need be, and returns the answer.
    """
    folder = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(folder / name)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(request: dict[str, Any]) -> Any:
        assert process.stdin is not None and process.stdout is not None
        Path(request["directory"]).mkdir(parents=True, exist_ok=True)
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.kill()
    process.wait()


def without_timings(log: list[dict[str, Any]], *others: str) -> list[dict[str, Any]]:
    """A log without what it says of how fast a process was, and without entries of other names."""
    timing = re.compile(r"(_runtime|_per_second)$")
    return [{name: entry[name] for name in entry if not timing.search(name) and name not in others} for entry in log]
