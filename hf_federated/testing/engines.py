"""Engines that show whether a method depends on more than its messages, and the engines that the kit compares."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..clients.models import SharedModel
from ..clients.state_history import StateHistory
from ..engines import Engine, EngineContext, LocalEngine, Plan, RankEngine
from ..messages import ClientUpdate, Fit, Message, Metrics, read_message
from .processes import fork, wait


# Names of metrics that differ between two equal runs.
TIMING = re.compile(r"(_runtime|_per_second)$")
# Bytes between the address of the tensors of a message and a multiple of 64.
SHIFTS = (8, 24, 40)


def shifted(blob: bytes | memoryview, shift: int) -> memoryview:
    """Copy a serialized message to writable memory in which its tensors start `shift` bytes after a multiple of 64."""
    start = 8 + int.from_bytes(blob[:8], "little")
    memory = np.empty(len(blob) + 64, np.uint8)
    offset = (shift - memory.ctypes.data - start) % 64
    view = memory[offset : offset + len(blob)].data
    view[:] = blob
    return view


class ShiftedMessages(LocalEngine):
    """
    Serializes every message, and reads it from memory at changing addresses.

    Args:
        shifts (`int`): The shifts of the messages, in turn.
    """

    def __init__(self, *shifts: int) -> None:
        super().__init__(serialize=True)
        self._shifts = itertools.cycle(shifts)

    def _deliver(self, message: Message) -> Message:
        return self._read(self.worker.handle(self._read(message)))

    def _read(self, message: Message) -> Message:
        return read_message(shifted(message.to_bytes(), next(self._shifts)), self.kinds)


class RecordingEngine(LocalEngine):
    """
    Records which messages each client receives and sends.

    Attributes:
        transcript (`dict[str, list[list[str]]]`): The digests of each request and its reply, by client id.
        unreadable (`dict[str, str]`): What is wrong with messages of a class that another process could not read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transcript: dict[str, list[list[str]]] = {}
        self.unreadable: dict[str, str] = {}

    def _deliver(self, message: Message) -> Message:
        request = self._digest(message)
        reply = super()._deliver(message)
        self.transcript.setdefault(message.client_id, []).append([request, self._digest(reply)])
        return reply

    def _digest(self, message: Message) -> str:
        name, blob = type(message).__name__, replace(message, nonce="").to_bytes()
        if self.kinds.get(message.kind) is not type(message):
            self.unreadable[name] = f"the kind {message.kind!r} is not declared"
        else:
            try:
                if read_message(blob, self.kinds).to_bytes() != blob:
                    self.unreadable[name] = "the message that is read from the bytes has other bytes"
            except ValueError as error:
                self.unreadable[name] = str(error)
        if isinstance(message, (ClientUpdate, Metrics)):
            metrics = {key: value for key, value in message.metrics.items() if not TIMING.search(key)}
            blob = replace(message, metrics=metrics, nonce="").to_bytes()
        return hashlib.sha256(blob).hexdigest()


class DisturbedGenerators(LocalEngine):
    """Draws from the global random generators before each message."""

    def _deliver(self, message: Message) -> Message:
        torch.rand(3), np.random.rand(3), random.random()
        return super()._deliver(message)


class OverwrittenModel(LocalEngine):
    """Overwrites the shared model before a client receives the parameters of the server."""

    @torch.no_grad()
    def _deliver(self, message: Message) -> Message:
        if isinstance(message, Fit) and message.state and isinstance(self.worker.models, SharedModel):
            for parameter in self.worker.models.open(message.client_id).trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(7.0)
        with torch.enable_grad():
            return super()._deliver(message)


class ReversedReplies(LocalEngine):
    """Yields the replies of a plan in the reverse order."""

    def run(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> Generator[Message, None, None]:
        yield from reversed(list(super().run(plan, on_dispatch)))


class SeparateClients(LocalEngine):
    """
    Runs each client in its own process, which starts before the first round.

    Args:
        is_renewed (`bool`, *optional*, defaults to `False`): Whether a new process answers each message. It starts
            with the state that the client has saved, and knows nothing else of earlier messages.
    """

    def __init__(self, is_renewed: bool = False) -> None:
        super().__init__()
        self.is_renewed = is_renewed
        self._connections: dict[str, Connection] = {}

    def start(self, context: EngineContext) -> None:
        super().start(context)
        for number, client_id in enumerate(context.costs):
            here, there = Pipe()
            self._fork(self._serve, here, there, Path(f"client-{number}"))
            there.close()
            self._connections[client_id] = here

    def _deliver(self, message: Message) -> Message:
        connection = self._connections[message.client_id]
        connection.send_bytes(message.to_bytes())
        return read_message(connection.recv_bytes(), self.kinds)

    def _fork(self, run: Callable[..., None], *args: Any) -> int:
        return fork(functools.partial(run, *args), ".", "rank-0-clients.log")

    def _serve(self, here: Connection, connection: Connection, folder: Path) -> None:
        """Answer the messages of a client until the server ends."""
        here.close()
        history, name = StateHistory(folder, self.worker.models), ""
        with contextlib.suppress(EOFError):
            while True:
                message = read_message(connection.recv_bytes(), self.kinds)
                if not self.is_renewed:
                    connection.send_bytes(self.worker.handle(message).to_bytes())
                elif wait(self._fork(self._answer, connection, message, history, name), math.inf):
                    break
                name = message.nonce

    def _answer(self, connection: Connection, message: Message, history: StateHistory, name: str) -> None:
        history.restore(name)
        reply = self.worker.handle(message).to_bytes()
        history.record(message.nonce, reply)
        connection.send_bytes(reply)


# The engines of the conformance kit, each with its number of processes. A new engine adds its line here.
ENGINES: dict[str, tuple[Callable[[], Engine], int]] = {
    "local": (LocalEngine, 1),
    "serialized": (lambda: LocalEngine(serialize=True), 1),
    "serialized at any address": (lambda: ShiftedMessages(*SHIFTS), 1),
    "1 rank": (RankEngine, 1),
    "2 ranks": (RankEngine, 2),
    "2 serialized ranks": (lambda: RankEngine(serialize=True), 2),
}
# Engines with which a run must end in the bytes of `LocalEngine`, by the name in a request.
PROBES: dict[str, Callable[[], LocalEngine]] = {
    "recording": RecordingEngine,
    "disturbed generators": DisturbedGenerators,
    "overwritten model": OverwrittenModel,
    "reversed replies": ReversedReplies,
    "separate clients": SeparateClients,
    "renewed clients": lambda: SeparateClients(is_renewed=True),
}
