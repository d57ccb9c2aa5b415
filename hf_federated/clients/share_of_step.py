"""`ShareOfStep`: how the loss of a batch is scaled if gradients are accumulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from .._compat import num_items_in_batch
from ..utils.random import isolated_rng


class ShareOfStep:
    """Computes the share of a batch in the loss of a step, for one local training."""

    _divides_by_items: bool | None = None

    def __call__(self, trainer: Any, inputs: Mapping[str, Any], num_items: Any) -> Any:
        """
        Return the factor by which the trainer's loss on a batch differs from the mean loss of the batch.

        The trainer's loss is the mean loss times this factor. The factor is 1 unless gradients are accumulated and the
        model divides its loss by the number of items (tokens with a label) of the whole step. In this case the factor
        is the share of the batch in these items.

        Args:
            trainer (`transformers.Trainer`): The client's trainer, during a step.
            inputs (`Mapping[str, Any]`): The batch.
            num_items (`torch.Tensor` or `int`, *optional*): Number of items of all batches of the step.
        """
        if trainer.current_gradient_accumulation_steps == 1 or num_items is None or "labels" not in inputs:
            return 1.0
        if self._divides_by_items is None:
            self._divides_by_items = trainer.model_accepts_loss_kwargs and _divides_loss_by_items(trainer, inputs)
        if not self._divides_by_items:
            return 1.0
        return num_items_in_batch(trainer, [inputs], trainer.args.device) / num_items


def _divides_loss_by_items(trainer: Trainer, inputs: Mapping[str, Any]) -> bool:
    """
    Find out whether the model's loss depends on `num_items_in_batch`.

    Many models accept the argument and ignore it, so the losses of two values are compared.
    """
    losses = []
    for num_items in (1, 2):
        with torch.no_grad(), trainer.compute_loss_context_manager(), isolated_rng(0):
            losses.append(float(trainer.model(**inputs, num_items_in_batch=num_items)["loss"]))
    return losses[0] != losses[1]
