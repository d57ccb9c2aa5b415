"""Errors of clients: a trainer that cannot train clients, and an error as the server may see it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn


_PACKAGE = Path(__file__).parents[1]


class UnsupportedTrainerError(ValueError):
    """
    The trainer cannot train each client separately. The error ends the run, because it does not depend on the client.
    """


def describe_failure(error: Exception) -> str:
    """
    Describe an error without its text, which may contain an example of the client.

    Args:
        error (`Exception`): The error.

    Returns:
        `str`: Class of the error, and the innermost line of this package in its traceback.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(Path(name).relative_to(_PACKAGE), line) for name, line in frames if Path(name).is_relative_to(_PACKAGE)]
    if not own:
        return type(error).__name__
    path, line = own[-1]
    return f"{type(error).__name__} ({_PACKAGE.name}/{path.as_posix()}, line {line})"


def as_mapping(inputs: Any, part: Any) -> Mapping[str, Any]:
    """
    Check that a method can read a batch.

    Raises:
        UnsupportedTrainerError: If the batch is not a mapping.
    """
    if isinstance(inputs, Mapping):
        return inputs
    raise UnsupportedTrainerError(
        f"{type(part).__name__} reads the tensors of a batch by name, but a batch of this trainer is a "
        f"{type(inputs).__name__}. Use a method that works on parameters or gradients, such as aggregation='fedavg' "
        "or 'fedprox'."
    )


def parameter_name(trainer: Any, parameter: nn.Parameter) -> str:
    """Name of a parameter that an attribute of a trainer has, for an error."""
    for name, value in vars(trainer).items():
        candidates = {"": value} if not isinstance(value, nn.Module) else dict(value.named_parameters(prefix="."))
        for path, candidate in candidates.items():
            if candidate is parameter:
                return repr(f"{name}{path[1:]}")
    return f"a parameter of shape {tuple(parameter.shape)}"
