"""Errors of clients: a trainer that cannot train clients, and an error as the server may see it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn

from .._compat import set_signature_columns


_PACKAGE = Path(__file__).parents[1]


class UnsupportedTrainerError(ValueError):
    """
    The trainer cannot train each client separately. The error ends the run, because it does not depend on the client.
    """


class RemovedColumnError(ValueError):
    """A data collator, a transform, a loss or a model read a column that `remove_unused_columns` had removed."""


def removed_column_error(error: BaseException, trainer: Any, examples: Any) -> RemovedColumnError | None:
    """
    Return an error that names `remove_unused_columns`, if a training failed because of a column that was removed.

    Args:
        error (`BaseException`): The error of the training.
        trainer (`transformers.Trainer`): The trainer of a client.
        examples (`Any`): The examples of the client, before the trainer removes columns.

    Returns:
        `RemovedColumnError`, *optional*: If the training read a removed column by its name, or lacks an argument of
            the model while columns were removed.
    """
    # Subclasses are errors of this package or of other libraries with their own meaning.
    if type(error) not in (KeyError, TypeError, ValueError) or not trainer.args.remove_unused_columns:
        return None
    columns = list(examples.column_names or ()) if isinstance(examples, (Dataset, IterableDataset)) else []
    read = read_columns(trainer) if columns else []
    removed = [name for name in columns if name not in read]
    if isinstance(error, KeyError):
        is_about_columns = bool(error.args) and error.args[0] in removed
    else:
        absent = {name for name in read if name not in columns}
        is_about_columns = bool(removed) and not absent.isdisjoint(re.findall(r"\w+", str(error)))
    if not is_about_columns:
        return None
    return RemovedColumnError(
        f"{type(error).__name__}: {error}. The trainer removed the columns {', '.join(removed)}, because "
        f"{type(trainer.model).__name__} has no such arguments. If the data collator, a transform or the loss reads a "
        "removed column, set remove_unused_columns=False in the training arguments. If the model reads it, rename the "
        "column to the argument of the model."
    )


def read_columns(trainer: Any) -> list[str]:
    """Return the columns that a trainer does not remove: the arguments of its model, and the labels."""
    before = trainer._signature_columns
    set_signature_columns(trainer)
    columns = [str(name) for name in trainer._signature_columns or ()]
    # The names of the labels can still change.
    trainer._signature_columns = before
    return columns


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
