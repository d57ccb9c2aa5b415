"""Copies of a model that share what does not train: an adapter's clients need one base in memory."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn


M = TypeVar("M", bound=nn.Module)


def copy_model(model: M) -> M:
    """
    A copy of a model that shares its frozen parameters with it.

    Args:
        model (`torch.nn.Module`): The model, which is not changed.

    Returns:
        `torch.nn.Module`: Of the same class.
    """
    shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, memo=dict(shared))
