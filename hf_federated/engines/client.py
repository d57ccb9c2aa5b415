"""`ClientEngine`: the engine of a process that is one client of a federation on several machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from .local import LocalEngine
from .requests import OpenRequest


class ClientEngine(LocalEngine):
    """
    Builds the worker of a client in this process. It runs no plans, because the server is on another machine.

    Attributes:
        worker ([`ClientWorker`]): The worker, once the engine has started.
    """

    holds_requests: ClassVar[bool] = False

    def _transmit(self, client_id: str, request: OpenRequest) -> None:
        raise RuntimeError("This process is a client. Only the server runs the rounds.")

    def save(self, directory: Path) -> dict[str, str]:
        return {}

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        raise RuntimeError("This process is a client. The server resumes the run.")
