"""Worker processes that train for a test, and logs without timings."""

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
    Start a script of this folder that imports the libraries once and then answers one request per line.

    Args:
        name (`str`): File name of the script.

    Yields:
        `Callable`: Sends a request and returns the answer. Creates the folder `request["directory"]` if necessary.
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


def without_timings(log: list[dict[str, Any]], *excluded: str) -> list[dict[str, Any]]:
    """A log without timings and without the excluded names."""
    timing = re.compile(r"(_runtime|_per_second)$")
    return [{name: entry[name] for name in entry if not timing.search(name) and name not in excluded} for entry in log]
