"""`NoticeBoard`: short notices that the processes of a launch leave for one another.

They hang in the key-value store through which the processes met. It works before their first collective and after a
connection broke, so it is where a process says that it has come, that it failed and that it has ended. The store may
lie in the main process and go with it; what was seen until then is kept.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import torch.distributed as dist


PREFIX = "hf_federated/"
FAILURE = f"{PREFIX}failure"
SECONDS_BETWEEN_LOOKS = 0.25


class NoticeBoard:
    """
    The notices of a launch.

    Args:
        store (`torch.distributed.Store`): Shared by all processes.
        rank (`int`): Number of this process.
        world_size (`int`): How many there are.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store: dist.Store | None = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        # The first failure of the launch as far as this process knows: `"rank"` and `"error"`.
        self.known_failure: dict[str, Any] | None = None
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def say(self, what: str) -> None:
        """Leave the notice that this process did something: `"came"`, `"ended"`, `"knows"` (of the failure)."""
        self._ask("set", f"{PREFIX}{what}/{self._rank}", "1")

    def others_without(self, *whats: str) -> list[int]:
        """The other processes that left none of these notices."""
        return [rank for rank in self._others if not any(self._hangs(f"{PREFIX}{what}/{rank}") for what in whats)]

    def wait_for_others(self, *whats: str, seconds: float) -> list[int]:
        """Wait until each of the others left one of these notices, or for some seconds; who did not."""
        deadline = time.monotonic() + seconds
        while (missing := self.others_without(*whats)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return missing

    def report(self, error: str) -> None:
        """Say that this process failed. Only the first such notice of a launch is kept."""
        self._ask("compare_set", FAILURE, "", json.dumps({"rank": self._rank, "error": error}))

    def failure(self) -> dict[str, Any] | None:
        """Look for the first failure of the launch."""
        if self.known_failure is None and self._hangs(FAILURE):
            text = self._ask("get", FAILURE)
            self.known_failure = None if text is None else json.loads(text)
            self.say("knows")
        return self.known_failure

    def watch(self) -> None:
        """Look for a failure from now on, also while this process waits inside a library."""
        self._watcher = threading.Thread(target=self._watch, name="hf_federated-notices", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._is_closed.wait(SECONDS_BETWEEN_LOOKS) and self.failure() is None:
            pass

    def close(self) -> None:
        """Stop looking. A thread must not be in the store while the interpreter ends."""
        self._is_closed.set()
        if self._watcher is not None:
            self._watcher.join()

    def _hangs(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the store; `None` once the store has gone with its process."""
        store = self._store
        try:
            return None if store is None else getattr(store, method)(*args)
        except RuntimeError:
            self._store = None
            return None
