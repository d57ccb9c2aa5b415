"""Check of the global state that an aggregation algorithm returns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..utils.weighted_mean import State


# Number of names of tensors in an error message.
MAX_LISTED_NAMES = 5


def check_aggregate(algorithm: Any, aggregated: Any, state: State, resized: Collection[str] = ()) -> None:
    """
    Check that an algorithm returned a state with the names and shapes of the global state.

    Args:
        algorithm ([`Aggregation`]): The algorithm, for the message.
        aggregated (`Any`): The return value of [`Aggregation.aggregate`].
        state (`dict[str, torch.Tensor]`): The global state.
        resized (`Collection[str]`, *optional*): Names of tensors whose shape may change.

    Raises:
        TypeError: If the algorithm did not return a dictionary.
        ValueError: If a name is missing or unknown, or a value is not a tensor of the expected shape. The message
            lists the names.
    """
    method = f"{type(algorithm).__name__}.aggregate"
    if not isinstance(aggregated, dict):
        raise TypeError(
            f"`{method}` returned {type(aggregated).__name__}; it must return a dictionary from the names of `state` "
            "to tensors."
        )
    wrong = [
        f"{name} is {_describe(aggregated[name])} instead of {_describe(value)}"
        for name, value in state.items()
        if name in aggregated
        and not (
            isinstance(aggregated[name], torch.Tensor) and (name in resized or aggregated[name].shape == value.shape)
        )
    ]
    problems = [
        ("no value for", [name for name in state if name not in aggregated]),
        ("the unknown names", [name for name in aggregated if name not in state]),
        ("wrong values:", wrong),
    ]
    found = "; ".join(f"{problem} {_listed(names)}" for problem, names in problems if names)
    if found:
        raise ValueError(
            f"`{method}` returned a state with {found}. It must return a tensor of the same shape for each name of "
            "`state`."
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _listed(names: list[Any]) -> str:
    more = len(names) - MAX_LISTED_NAMES
    return ", ".join(map(str, names[:MAX_LISTED_NAMES])) + (f" and {more} more" if more > 0 else "")
