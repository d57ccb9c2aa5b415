"""Global random number generators of Python, numpy and torch, and their seeds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derived_seed(seed: int, *purpose: str | int) -> int:
    """
    Derive a separate seed for a purpose, below 2**32.

    The seed is a hash of `seed` and `purpose`. A sum would give equal seeds (client 1 in round 2 and client 2 in
    round 1), and positions in a list would change when a client joins.

    Args:
        seed (`int`): Seed of the run.
        purpose (`str` or `int`): Values that identify the purpose, such as a client id and a round.

    Returns:
        `int`: The derived seed.
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
    Call `torch.manual_seed`, or seed only the CPU generator if no accelerator is available.

    `torch.manual_seed` formats a stack trace and queues the seed for each missing backend. This takes longer than a
    small training step.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def generator_states() -> tuple[Any, Any, list[torch.Tensor]]:
    """Return the states of the global generators of Python, numpy and torch, on the CPU and the accelerator in use."""
    torch_states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        # Only the device of this process. Other processes of the machine use the other devices.
        torch_states.append(torch.get_device_module().get_rng_state())
    return random.getstate(), np.random.get_state(), torch_states


def set_generator_states(states: tuple[Any, Any, list[torch.Tensor]]) -> None:
    """Restore the states that `generator_states` returned."""
    python_state, numpy_state, torch_states = states
    random.setstate(python_state)
    # numpy reads the key number by number, which is slow for an array. The restore takes place for every client.
    name, key, *others = numpy_state
    np.random.set_state((name, key.tolist(), *others))
    torch.set_rng_state(torch_states[0])
    for accelerator_state in torch_states[1:]:
        torch.get_device_module().set_rng_state(accelerator_state)


def are_equal_states(first: Any, second: Any) -> bool:
    """Whether two return values of `generator_states` are equal."""
    (python_state, numpy_state, torch_states), (other_python, other_numpy, other_torch) = first, second
    return bool(
        python_state == other_python
        and all(map(np.array_equal, numpy_state, other_numpy))
        and all(map(torch.equal, torch_states, other_torch))
    )


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch on exit, as `generator_states` returns them."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seed all global generators inside the context and restore their previous states on exit."""
    with preserved_generators():
        seed_generators(seed)
        yield
