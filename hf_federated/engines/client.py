"""`ClientEngine`: the engine of a process that is one client of a federation on several machines."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from ..clients import ClientWorker
from ..messages import Message
from .base import Engine
from .context import EngineContext
from .requests import OpenRequest


class ClientEngine(Engine):
    """
    Builds the worker of a client. It runs no plans, because the server is on another machine.

    Attributes:
        worker ([`ClientWorker`]): The worker, once the engine has started.
    """

    worker: ClientWorker

    def start(self, context: EngineContext) -> None:
        super().start(context)
        self.worker = context.build_worker()
        self.worker.models.clear()

    def _transmit(self, client_id: str, request: OpenRequest) -> None:
        raise RuntimeError("This process is a client. Only the server runs the rounds.")

    def _receive(self, clients: Set[str] | None, until: float | None) -> tuple[str, Message] | None:
        return None  # No request is ever open.

    def save(self, directory: Path) -> dict[str, str]:
        return {}

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        raise RuntimeError("This process is a client. The server resumes the run.")
