"""Sums over the processes of which each holds a shard of the tensors of a client.

Under FSDP2, the states and messages of a process contain its shards only. Most methods work value by value and need
nothing else. What depends on all values of a state, such as a norm, adds one number over the processes here. Without
FSDP2, the functions return their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shards:
    """
    How the exchanged tensors are divided over the processes of a launch.

    Args:
        shapes (`Mapping[str, torch.Size]`): Shapes of the whole tensors, by name.
        add (`Callable[[list[torch.Tensor]], Any]`): Replaces tensors by their sums over the processes, in place. All
            processes must call it.
        rank (`int`): Rank of this process.
    """

    shapes: Mapping[str, torch.Size]
    add: Callable[[list[torch.Tensor]], Any]
    rank: int


# The shards of this process, or empty if states contain whole tensors. The processes of a launch train one model.
ACTIVE: list[Shards] = []


@contextmanager
def states_in_shards(shards: Shards | None) -> Iterator[None]:
    """
    Declare that the states and messages of this process contain shards.

    Args:
        shards ([`Shards`], *optional*): The shards, or `None` if states and messages contain whole tensors.
    """
    before = list(ACTIVE)
    ACTIVE[:] = [] if shards is None else [shards]
    try:
        yield
    finally:
        ACTIVE[:] = before


def shard_rank() -> int:
    """Return the rank of this process, or 0 if states contain whole tensors."""
    return ACTIVE[0].rank if ACTIVE else 0


def sum_over_shards(values: torch.Tensor) -> torch.Tensor:
    """
    Add values over the processes that hold shards. All processes must call this function.

    Args:
        values (`torch.Tensor`): Numbers of this process, of any shape.

    Returns:
        `torch.Tensor`: The sums, in float64 on the CPU. `values` itself if states contain whole tensors.
    """
    if not ACTIVE:
        return values
    sums = values.detach().to("cpu", torch.float64, copy=True)
    ACTIVE[0].add([sums])
    return sums


def norm_over_shards(norm: torch.Tensor) -> torch.Tensor:
    """
    Return the norm of a state from the norm of the values of this process. All processes must call this function.

    Args:
        norm (`torch.Tensor`): A scalar. It is returned if states contain whole tensors.
    """
    return sum_over_shards(norm.double().square()).sqrt().to(norm.dtype) if ACTIVE else norm


def first_over_shards(names: Iterable[str], found: str | None) -> str | None:
    """
    Return the first of the names that any process has found. All processes must call this function.

    Args:
        names (`Iterable[str]`): Names, in the same order in all processes.
        found (`str`, *optional*): The name that this process has found. It is returned if states contain whole
            tensors.
    """
    if not ACTIVE:
        return found
    ordered = list(names)
    counts = sum_over_shards(torch.tensor([name == found for name in ordered])).tolist()
    return next((name for name, count in zip(ordered, counts, strict=True) if count), None)


def with_whole_shapes(tree: Any) -> Any:
    """
    Replace the shards in the fields of a message by tensors without values that have the shapes of the whole tensors.

    Args:
        tree (`Any`): The tree of a message. It is returned if states contain whole tensors.
    """
    if not ACTIVE:
        return tree
    shapes = ACTIVE[0].shapes
    # A tensor that occurs twice is serialized once.
    found: dict[tuple[str, int], torch.Tensor] = {}

    def whole(name: str, value: Any) -> Any:
        if name not in shapes or not isinstance(value, torch.Tensor):
            return value
        return found.setdefault((name, id(value)), torch.empty(shapes[name], dtype=value.dtype, device="meta"))

    fields = {
        field: {name: whole(name, value) for name, value in values.items()} if isinstance(values, dict) else values
        for field, values in tree["fields"].items()
    }
    return {**tree, "fields": fields}
