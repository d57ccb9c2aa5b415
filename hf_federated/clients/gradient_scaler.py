"""The gradient scaler of a client, for `fp16=True`.

In float16, small gradients become zero. `accelerate` therefore multiplies the loss by a scale, which a `GradScaler`
lowers after each overflow and raises again later. The scale depends on the gradients that it has seen, so the clients
must not share a scaler: each local training uses its own copy of the scaler that `accelerate` created.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.amp import GradScaler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


ALL_STEPS_SKIPPED = (
    "fp16=True: in one round, the gradients of a client overflowed in all of its steps, so its parameters did not "
    "change. The scaler lowers the loss scale after each overflow, but the round ended before the scale was low "
    "enough. Set client_optimizer_state='carry' to keep the scale between rounds, raise `local_steps` or "
    "`local_epochs`, or use bf16=True."
)


def copy_scaler(accelerator: Accelerator) -> GradScaler:
    """
    Copy the gradient scaler of an accelerator as it was before its first step.

    Args:
        accelerator (`accelerate.Accelerator`): An accelerator. Its scaler is not changed.

    Returns:
        `torch.amp.GradScaler`: The copy, or a disabled scaler if the training does not scale its loss.
    """
    if accelerator.scaler is None or not accelerator.scaler.is_enabled():
        return GradScaler("cpu", enabled=False)
    # A copy has the same scale and settings, and no gradients of an interrupted step.
    return copy.deepcopy(accelerator.scaler)


class ClientScaler(TrainerCallback):
    """
    The gradient scaler of one local training.

    It is also the callback of the local training that counts the steps for which the learning rate does not change.
    As in `Trainer`, a step whose gradients overflow counts as a step, but the optimizer and the schedule skip it.
    (Fused optimizers, such as the default `"adamw_torch_fused"`, do not report the overflow to `accelerate`. Their
    schedule advances, as in `Trainer`.)

    Args:
        accelerator (`accelerate.Accelerator`): The accelerator of the federated trainer. Its scaler is not changed.
        state (`dict`, *optional*): State of the client's scaler after its last round, from [`state_dict`]. By default
            the client starts with the initial scale.
    """

    def __init__(self, accelerator: Accelerator, state: Mapping[str, Any] | None = None) -> None:
        self._accelerator = accelerator
        self._scaler = copy_scaler(accelerator)
        self.num_skipped_steps = 0
        if state is not None:
            self._scaler.load_state_dict(dict(state["scaler"]))
            self.num_skipped_steps = state["num_skipped_steps"]
        self._initial_scale = self._scaler.get_scale()

    def install(self) -> None:
        """Make the accelerator use this scaler. The caller restores `accelerator.scaler` after the training."""
        self._accelerator.scaler = self._scaler

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.num_skipped_steps += int(self._accelerator.optimizer_step_was_skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the client keeps for its next round, as scalars."""
        return {"scaler": self._scaler.state_dict(), "num_skipped_steps": self.num_skipped_steps}

    def skipped_all(self, num_steps: int) -> bool:
        """
        Whether the gradients of all steps overflowed, so that the training changed no parameter.

        Args:
            num_steps (`int`): Number of steps of this training.
        """
        lowest = self._initial_scale * self._scaler.get_backoff_factor() ** num_steps
        return num_steps > 0 and self._scaler.get_scale() == lowest

    @contextmanager
    def unscaled(self, param_groups: Sequence[Mapping[str, Any]]) -> Iterator[bool]:
        """
        Divide the gradients by the scale inside the context, and multiply them again at its end.

        `GradScaler.unscale_` cannot be used, because it may run only once in a step, and `Trainer` runs it when it
        clips the gradients. With the default settings the scale is a power of two, so both operations are exact.

        Args:
            param_groups (`Sequence[Mapping[str, Any]]`): The parameter groups of the optimizer.

        Yields:
            `bool`: Whether all gradients are finite. Otherwise the optimizer will skip this step, and the gradients
            are unchanged inside the context.
        """
        gradients = [item.grad for group in param_groups for item in group["params"] if item.grad is not None]
        if not _all_finite(gradients):
            yield False
            return
        scale = self._scaler.get_scale()
        with torch.no_grad():
            torch._foreach_mul_(gradients, 1.0 / scale)
        yield True
        # The code in the context may have assigned other tensors to `.grad`.
        gradients = [item.grad for group in param_groups for item in group["params"] if item.grad is not None]
        with torch.no_grad():
            torch._foreach_mul_(gradients, scale)


def _all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    if not gradients:
        return True
    device = gradients[0].device
    return bool(torch.stack([gradient.isfinite().all().to(device) for gradient in gradients]).all())
