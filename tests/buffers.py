"""Messages that arrive in memory at any address."""

from __future__ import annotations

import itertools

import numpy as np

from hf_federated.engines import LocalEngine
from hf_federated.messages import Message, read_message


SHIFTS = (8, 24, 40)


def shifted(blob: bytes | memoryview, shift: int) -> memoryview:
    """Copy a serialized message to writable memory in which its tensors start `shift` bytes after a multiple of 64."""
    start = 8 + int.from_bytes(blob[:8], "little")
    memory = np.empty(len(blob) + 64, np.uint8)
    offset = (shift - memory.ctypes.data - start) % 64
    view = memory[offset : offset + len(blob)].data
    view[:] = blob
    return view


class ShiftedEngine(LocalEngine):
    """Serializes every message, and reads it from memory at changing addresses."""

    def __init__(self, *shifts: int) -> None:
        super().__init__(serialize=True)
        self._shifts = itertools.cycle(shifts)

    def _deliver(self, message: Message) -> Message:
        return self._receive(self.worker.handle(self._receive(message)))

    def _receive(self, message: Message) -> Message:
        return read_message(shifted(message.to_bytes(), next(self._shifts)))
