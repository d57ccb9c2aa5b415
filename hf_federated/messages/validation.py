"""Checks of client updates: keys, shapes, dtypes and finite values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .training import ClientUpdate


# Function that raises `ValueError` for unusable values of `extra`. Names, shapes and dtypes are already checked.
CheckExtra = Callable[[Mapping[str, torch.Tensor]], None]


class InvalidUpdateError(ValueError):
    """The server rejected an update. The message names the client, the round, the key and the expected value."""


def first_non_finite(state: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinite values, or `None`."""
    floating = {name: value for name, value in state.items() if value.is_floating_point() and value.numel()}
    if not floating:
        return None
    # A finite sum implies finite values, and a sum is the cheapest check. Sums of finite values may overflow, so the
    # exact check below decides.
    sums = torch.stack(
        [value.sum(dtype=torch.promote_types(value.dtype, torch.float32)) for value in floating.values()]
    )
    if bool(sums.isfinite().all()):
        return None
    return next((name for name, value in floating.items() if not value.isfinite().all()), None)


def _check_state(state: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], where: str) -> None:
    missing = [name for name in reference if name not in state]
    unexpected = [name for name in state if name not in reference]
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{len(missing)} keys are missing, the first is {missing[0]!r}")
        if unexpected:
            parts.append(f"{len(unexpected)} keys are unexpected, the first is {unexpected[0]!r}")
        raise InvalidUpdateError(f"{where}: {'; '.join(parts)}. Train the same adapter or layers on all clients.")
    for name, expected in reference.items():
        value = state[name]
        if value.shape != expected.shape:
            raise InvalidUpdateError(
                f"{where}: {name!r} has shape {tuple(value.shape)}, expected {tuple(expected.shape)}."
            )
        if value.dtype != expected.dtype:
            raise InvalidUpdateError(f"{where}: {name!r} is {value.dtype}, expected {expected.dtype}.")
    non_finite_name = first_non_finite(state)
    if non_finite_name is not None:
        raise InvalidUpdateError(
            f"{where}: {non_finite_name!r} holds NaN or infinite values, expected finite values. Lower the learning "
            "rate of this client, clip its gradients (`max_grad_norm`), or check its data."
        )


def check_update(
    update: ClientUpdate,
    round: int,
    reference: Mapping[str, torch.Tensor],
    extra_reference: Mapping[str, torch.Tensor],
    extra_checks: Sequence[CheckExtra] = (),
) -> None:
    """
    Check an update before it is aggregated.

    Args:
        update ([`ClientUpdate`]): Update of the client.
        round (`int`): Current round.
        reference (`Mapping[str, torch.Tensor]`): The global state that was sent. Keys, shapes and dtypes of the update
            must be equal.
        extra_reference (`Mapping[str, torch.Tensor]`): Tensors with the keys, shapes and dtypes that `extra` of the
            update must have.
        extra_checks (`Sequence[Callable]`, *optional*): Functions that raise `ValueError` for values of `extra` that
            an algorithm cannot use.

    Raises:
        InvalidUpdateError: If a key, shape or dtype differs, if a value is not finite, if the algorithm cannot use a
            value, if a count or metric is invalid, or if the update is a reply to another round.
    """
    where = f"Client {update.client_id!r}, round {round + 1}"
    if update.round != round:
        raise InvalidUpdateError(f"{where}: the update is a reply to round {update.round + 1}.")
    if update.num_examples < 1 or update.num_tokens < 0 or update.num_steps < 1:
        raise InvalidUpdateError(
            f"{where}: {update.num_examples} examples, {update.num_tokens} tokens and {update.num_steps} steps; "
            "expected at least one example and one step. An update without data cannot be weighted."
        )
    for name, value in update.metrics.items():
        if not isinstance(value, (int, float)):
            raise InvalidUpdateError(f"{where}: the metric {name!r} is {value!r}, expected a number.")
    _check_state(update.state, reference, where)
    extra_where = f"{where}, additional tensors"
    _check_state(update.extra, extra_reference, extra_where)
    for check_extra in extra_checks:
        try:
            check_extra(update.extra)
        except ValueError as error:
            raise InvalidUpdateError(f"{extra_where}: {error}") from error
