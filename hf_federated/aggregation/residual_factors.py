"""The factors of the residual adapter in the global state: append a change, and limit the rank.

The change of a module in all rounds is `L R` with the left factor `L` of shape `(out, k)` and the right factor `R` of
shape `(k, in)`. The factors of a convolution have more axes.
"""

from __future__ import annotations

import math

import torch

from ..utils.lora_modules import LoraModule
from ..utils.weighted_mean import State, Tensors
from .lora_factors import factored_svd


def with_change(module: LoraModule, state: Tensors, left: torch.Tensor, right: torch.Tensor) -> State:
    """
    Return the factors of a module after a change, `[L, L_new]` and `[R; R_new]`.

    Args:
        module ([`LoraModule`]): The module.
        state (`Mapping[str, torch.Tensor]`): A state with the factors `L` and `R` of the module.
        left (`torch.Tensor` of shape `(out, k)`): The left factor of the change.
        right (`torch.Tensor` of shape `(k, in)`): The right factor of the change.
    """
    left_name, right_name = module.changed_names
    old_left, old_right = state[left_name], state[right_name]
    left = left.reshape(*left.shape, *(1 for _ in old_left.shape[2:])).to(old_left)
    right = right.reshape(len(right), *old_right.shape[1:]).to(old_right)
    return {left_name: torch.cat([old_left, left], 1), right_name: torch.cat([old_right, right])}


def largest_rank(module: LoraModule, state: Tensors, limit: int | None) -> int:
    """
    Return the largest rank of the factors of a module: the limit, and at most the smaller dimension of the module.

    Args:
        module ([`LoraModule`]): The module.
        state (`Mapping[str, torch.Tensor]`): A state with the factors of the module.
        limit (`int`, *optional*): The limit of a method.
    """
    left, right = (state[name] for name in module.changed_names)
    smaller = min(len(left), math.prod(right.shape[1:]))
    return smaller if limit is None else min(limit, smaller)


def with_limited_rank(module: LoraModule, state: Tensors, limit: int | None) -> tuple[State, float]:
    """
    Return factors with at most the [`largest_rank`], and the norm of the lost part as a share of the norm of `L R`.

    Nothing is lost at the rank of the smaller dimension: one factor is then the product, and the other one the
    identity. Below, the factors have the largest singular values.

    Args:
        module ([`LoraModule`]): The module.
        state (`Mapping[str, torch.Tensor]`): A state with the factors of the module.
        limit (`int`, *optional*): The limit of a method.
    """
    names, rank = module.changed_names, largest_rank(module, state, limit)
    before = [state[name] for name in names]
    left, right = (value.detach().cpu().double().flatten(1) for value in before)
    num_out, num_in = len(left), right.shape[1]
    error = 0.0
    if rank < min(num_out, num_in):
        u, s, v = factored_svd(left, right)
        left, right = u[:, :rank] * s[:rank], v[:, :rank].T
        error = float(s[rank:].norm() / s.norm()) if s.any() else 0.0
    elif num_out <= num_in:
        left, right = torch.eye(num_out, dtype=torch.float64), left @ right
    else:
        left, right = left @ right, torch.eye(num_in, dtype=torch.float64)
    shapes = (num_out, rank, *before[0].shape[2:]), (rank, *before[1].shape[1:])
    pairs = zip(names, (left, right), shapes, before, strict=True)
    return {name: value.reshape(shape).to(old) for name, value, shape, old in pairs}, error


def check_factors(module: LoraModule, found: Tensors, known: Tensors, limit: int | None) -> None:
    """
    Check the factors of a module that a server sent, or that a client has after the changes of the server.

    Args:
        module ([`LoraModule`]): The module.
        found (`Mapping[str, torch.Tensor]`): The factors.
        known (`Mapping[str, torch.Tensor]`): Factors of the module with any rank.
        limit (`int`, *optional*): The limit of the method.

    Raises:
        ValueError: If a shape does not match, or the rank is above the limit.
    """
    left, right = (found[name] for name in module.changed_names)
    old_left, old_right = (known[name] for name in module.changed_names)
    rank, largest = left.shape[1] if left.ndim > 1 else 0, largest_rank(module, known, limit)
    expected = (len(old_left), rank, *old_left.shape[2:]), (rank, *old_right.shape[1:])
    if (tuple(left.shape), tuple(right.shape)) != expected:
        raise ValueError(
            f"the factors of the changes of {module.base!r} have the shapes {tuple(left.shape)} and "
            f"{tuple(right.shape)}, expected {expected[0]} and {expected[1]}"
        )
    if rank > largest:
        raise ValueError(f"the changes of {module.base!r} have the rank {rank}, at most {largest} is allowed")
