"""`LocalEngine`: all clients run one after another in this process."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import ClassVar

from ..clients import ClientWorker
from ..messages import Message, read_message
from .base import Engine
from .context import EngineContext


class LocalEngine(Engine):
    """
    Runs the clients one after another on one model in memory. Only the exchanged parameters are swapped.

    Args:
        serialize (`bool`, *optional*, defaults to `False`):
            Whether to convert every message to bytes and back, as a network does. The results are the same, but the
            run takes longer.

    Example:

    ```python
    >>> from hf_federated.engines import LocalEngine

    >>> LocalEngine(serialize=True).serialize
    True
    ```
    """

    holds_requests: ClassVar[bool] = True
    worker: ClientWorker

    def __init__(self, serialize: bool = False) -> None:
        super().__init__()
        self.serialize = serialize

    def check_launch(self, num_processes: int) -> None:
        if num_processes > 1:
            raise ValueError(
                f"engine=LocalEngine() runs in one process, but the launch has {num_processes} processes. Leave "
                "`engine` out, or pass RankEngine()."
            )

    def start(self, context: EngineContext) -> None:
        super().start(context)
        self.worker = context.build_worker()
        self.worker.models.clear()

    def _receive(self, clients: Set[str] | None, until: float | None) -> tuple[str, Message] | None:
        client_id = next(self._waiting(clients))
        reply = self._deliver(self._dispatch(client_id, self._requests[client_id]))
        self.last_error = self.worker.last_error
        return client_id, reply

    def _deliver(self, message: Message) -> Message:
        if self.serialize:
            message = read_message(message.to_bytes(), self.kinds)
            return read_message(self.worker.handle(message).to_bytes(), self.kinds)
        return self.worker.handle(message)

    def save(self, directory: Path) -> dict[str, str]:
        return self.worker.models.save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self.worker.models.load(directory, digests)
