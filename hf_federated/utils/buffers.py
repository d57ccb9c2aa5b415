"""Memory for received messages."""

from __future__ import annotations

import numpy as np


# On a CPU, matrix products and attention round differently if the address of an input is not a multiple of 16 bytes.
# torch, numpy and Python allocate memory at such multiples.
ALIGNMENT = 16


def aligned_buffer(num_bytes: int) -> memoryview:
    """
    Return a writable buffer for a message, of which the end is aligned.

    The tensors of a message are at its end, and most tensors have a multiple of 16 bytes. They can then share the
    memory of the message ([`~hf_federated.messages.serialization.unpack`]).
    """
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -(memory.ctypes.data + num_bytes) % ALIGNMENT
    return memory[start : start + num_bytes].data
