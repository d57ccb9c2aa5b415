"""What the server accepts from a client: the right keys, shapes and dtypes, and finite numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .training import ClientUpdate


# Raises `ValueError` for what an update has beside its parameters, of the right names, shapes and dtypes.
CheckExtra = Callable[[Mapping[str, torch.Tensor]], None]


class RoundFailedError(RuntimeError):
    """Too few clients delivered a valid reply. Checkpoints of earlier rounds are untouched."""


class InvalidUpdateError(ValueError):
    """An update that the server refuses. Its text names the client, the round, the key and what was expected."""


def first_non_finite(state: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or `None`."""
    floating = {name: value for name, value in state.items() if value.is_floating_point() and value.numel()}
    if not floating:
        return None
    # A finite sum means finite values, and is the cheapest pass there is. Sums of finite values may overflow, so only
    # the exact look below convicts.
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
            parts.append(f"{len(unexpected)} keys were not asked for, the first is {unexpected[0]!r}")
        raise InvalidUpdateError(f"{where}: {'; '.join(parts)}. All clients must train the same adapter or layers.")
    for name, expected in reference.items():
        value = state[name]
        if value.shape != expected.shape:
            raise InvalidUpdateError(
                f"{where}: {name!r} has shape {tuple(value.shape)}, expected {tuple(expected.shape)}."
            )
        if value.dtype != expected.dtype:
            raise InvalidUpdateError(f"{where}: {name!r} is {value.dtype}, expected {expected.dtype}.")
    name_of_bad = first_non_finite(state)
    if name_of_bad is not None:
        raise InvalidUpdateError(
            f"{where}: {name_of_bad!r} holds NaN or infinite values, expected finite ones. Lower this client's "
            "learning rate, clip its gradients (`max_grad_norm`), or look at its data."
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
        update ([`ClientUpdate`]): The reply.
        round (`int`): The round that asked for it.
        reference (`Mapping[str, torch.Tensor]`): The global state that was sent; keys, shapes and dtypes must agree.
        extra_reference (`Mapping[str, torch.Tensor]`): The same for what the algorithm sends beside it.
        extra_checks (`Sequence[Callable]`, *optional*): Each raises `ValueError` for values of `extra` that an
            algorithm cannot use.

    Raises:
        InvalidUpdateError: If anything differs, a value is not finite, the algorithm cannot use one, or it answers
            another round.
    """
    where = f"Client {update.client_id!r}, round {round}"
    if update.round != round:
        raise InvalidUpdateError(f"{where}: the update answers round {update.round}.")
    if update.num_examples < 1 or update.num_tokens < 0 or update.num_steps < 1:
        raise InvalidUpdateError(
            f"{where}: {update.num_examples} examples, {update.num_tokens} tokens and {update.num_steps} steps; "
            "expected at least one example and one step. An update of no data cannot be weighted."
        )
    for name, value in update.metrics.items():
        if not isinstance(value, (int, float)):
            raise InvalidUpdateError(f"{where}: the metric {name!r} is {value!r}, expected a number.")
    _check_state(update.state, reference, where)
    beside = f"{where}, beside the parameters"
    _check_state(update.extra, extra_reference, beside)
    for check_extra in extra_checks:
        try:
            check_extra(update.extra)
        except ValueError as error:
            raise InvalidUpdateError(f"{beside}: {error}") from error
