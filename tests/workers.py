"""Worker processes that train for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_federated.testing.processes import WorkerProcess
from hf_federated.testing.results import without_timings


__all__ = ["without_timings", "worker"]


@contextmanager
def worker(name: str) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """
    Start a script of this folder that imports the libraries once and then answers one request per line.

    Args:
        name (`str`): File name of the script.

    Yields:
        `Callable`: Sends a request and returns the answer. Creates the folder `request["directory"]` if necessary.
    """
    process = WorkerProcess([str(Path(__file__).parent / name)])
    yield process.ask
    process.stop()
