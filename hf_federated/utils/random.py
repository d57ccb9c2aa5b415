"""The global generators of Python, numpy and torch, and seeds for them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(seed: int, *purpose: str | int) -> int:
    """
    A seed of its own for each purpose, below 2**32.

    A hash of all: sums would collide (client 1 in round 2 with client 2 in round 1), and places in a list would
    change when a client joins.
    """
    digest = hashlib.sha256("\0".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """
    `torch.manual_seed`, without its cost where there is no accelerator: for each backend that is absent it formats a
    stack trace and queues the seed, which takes longer than a small training step.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def torch_state() -> list[torch.Tensor]:
    """The state of torch's global generators, on the CPU and on this process's accelerator."""
    state = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        state.append(torch.get_device_module().get_rng_state())
    return state


def set_torch_state(state: list[torch.Tensor]) -> None:
    """Take back what `torch_state` gave."""
    torch.set_rng_state(state[0])
    for own in state[1:]:
        torch.get_device_module().set_rng_state(own)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put back the global generators of Python, numpy and torch, on the CPU and on this process's accelerator."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Apple's has one generator, which has no number and cannot be forked.
    if accelerator is None or accelerator.type == "mps":
        forked = torch.random.fork_rng(devices=[])
    else:
        # Not those of other processes, which share the machine.
        device = torch.accelerator.current_device_index()
        forked = torch.random.fork_rng(devices=[device], device_type=accelerator.type)
    with forked:
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """What is drawn in the body follows from a seed, and nothing that is drawn elsewhere notices."""
    with preserved_generators():
        seed_generators(seed)
        yield
