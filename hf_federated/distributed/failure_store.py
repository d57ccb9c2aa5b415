"""`FailureStore`: events and the first failure of a launch, shared by its processes.

The events are keys of the key-value store with which `torch.distributed` connects the processes. The store works
before the first collective operation and after a connection is lost. Each process posts that it joined, failed or
finished. The store may run inside the main process and end with that process, so each process keeps the failure that
it has read.
"""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import torch.distributed as dist

from .ranks import format_ranks


PREFIX = "hf_federated/"
FAILURE_KEY = f"{PREFIX}failure"
POLL_INTERVAL_SECONDS = 0.25
# Gloo raises plain RuntimeErrors, and so does DistributedDataParallel for its process group.
LOST_CONNECTION = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|process group", re.IGNORECASE)


class FailureStore:
    """
    Events of a launch, such as the first failure.

    Each process posts events by name: `"joined"`, `"finished"`, and `"acknowledged"` for a process that has read the
    failure.

    Args:
        store (`torch.distributed.Store`): Store that all processes share.
        rank (`int`): Rank of this process.
        world_size (`int`): Number of processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store: dist.Store | None = store
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        # The first failure of the launch that this process has read: a dictionary with `"rank"` and `"error"`.
        self.known_failure: dict[str, Any] | None = None
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def post(self, event: str) -> None:
        """Post an event of this process: `"joined"`, `"finished"` or `"acknowledged"`."""
        self._call_store("set", f"{PREFIX}{event}/{self._rank}", "1")

    def ranks_without(self, *events: str) -> list[int]:
        """Return the ranks of the other processes that posted none of the events."""
        return [rank for rank in self._peers if not any(self._exists(f"{PREFIX}{event}/{rank}") for event in events)]

    def wait_for_peers(self, *events: str, seconds: float) -> list[int]:
        """
        Wait until each other process has posted one of the events, or until the time is over.

        Args:
            events (`str`): Names of the events.
            seconds (`float`): Longest time to wait, in seconds.

        Returns:
            `list[int]`: Ranks of the processes that posted none of the events.
        """
        deadline = time.monotonic() + seconds
        while (missing := self.ranks_without(*events)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return missing

    def report_failure(self, error: str) -> None:
        """Report that this process failed. The store keeps only the first failure of a launch."""
        self._call_store("compare_set", FAILURE_KEY, "", json.dumps({"rank": self._rank, "error": error}))

    def get_failure(self) -> dict[str, Any] | None:
        """
        Read the first failure of the launch, and post that this process has read it.

        Returns:
            `dict[str, Any]`, *optional*: `"rank"` and `"error"` of the failure, or `None` if no process has failed.
        """
        if self.known_failure is None and self._exists(FAILURE_KEY):
            text = self._call_store("get", FAILURE_KEY)
            self.known_failure = None if text is None else json.loads(text)
            self.post("acknowledged")
        return self.known_failure

    def explain(self, error: RuntimeError, where: str = "") -> str:
        """
        Explain the error of a lost connection.

        Args:
            error (`RuntimeError`): The error of a communication library.
            where (`str`, *optional*, defaults to `""`): When the connection was lost, after a space.

        Returns:
            `str`: The error of the process that failed, if it reported one, or the process that ended.
        """
        if (failure := self.get_failure()) is not None:
            return describe_failure(failure)
        missing = self.ranks_without("finished")
        finished = [rank for rank in self._peers if rank not in missing]
        if finished:
            return (
                f"{format_ranks(finished).capitalize()} reached the end of the script{where}. Build, train, evaluate "
                "and save in every process."
            )
        return (
            f"A process of the launch ended without a report{where}. It may have been killed, run out of memory or "
            f"reached the end of the script: {error}"
        )

    def start_watching(self) -> None:
        """Poll for a failure in a thread, so that `known_failure` is updated while this process waits in a library."""
        self._watcher = threading.Thread(target=self._watch, name="hf_federated-failures", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._is_closed.wait(POLL_INTERVAL_SECONDS) and self.get_failure() is None:
            pass

    def close(self) -> None:
        """Stop the polling thread. No thread may use the store while the interpreter shuts down."""
        self._is_closed.set()
        if self._watcher is not None:
            self._watcher.join()

    def _exists(self, key: str) -> bool:
        return bool(self._call_store("check", [key]))

    def _call_store(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Return `None` if the process that ran the store has ended."""
        store = self._store
        try:
            return None if store is None else getattr(store, method)(*args)
        except RuntimeError:
            self._store = None
            return None


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error of a communication library is about a lost connection."""
    return isinstance(error, dist.DistError) or LOST_CONNECTION.search(str(error)) is not None


def describe_failure(failure: dict[str, Any]) -> str:
    """Return the text for a failure that [`FailureStore.get_failure`] returned."""
    return f"Process {failure['rank']} failed: {failure['error']}"
