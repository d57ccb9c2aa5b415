"""Model copies that share frozen parameters, so that all clients of an adapter need only one base model in memory."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn


M = TypeVar("M", bound=nn.Module)


def copy_model(model: M) -> M:
    """
    Copy a model and share its frozen parameters with the copy.

    Args:
        model (`torch.nn.Module`): The model. It is not changed.

    Returns:
        `torch.nn.Module`: A copy with the same class.
    """
    shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, memo=dict(shared))
