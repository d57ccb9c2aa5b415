"""Scores of each target token, as TRL's `SFTTrainer` asks a model for them in place of logits.

TRL (1.x) gives the model of such a trainer a forward pass of its own, which asks the blocks for hidden states. A split
model has no such pass, and answers the same question from its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput


@dataclass
class PerTokenOutput(ModelOutput):
    """
    Scores of targets, zero where the label is −100.

    Args:
        loss (`torch.Tensor`): Shape `()`, negative log-likelihood in nats, the sum over the number of targets.
        log_probs (`torch.Tensor`): Shape `(batch, sequence - 1)`, of `float32`, as are all; with `shift_labels`
            `(batch, sequence)`.
        entropy (`torch.Tensor`): The same shape, of the distribution of the next token, in nats. It has no gradient.
        is_top1 (`torch.Tensor`): The same shape, 1 where the target is the likeliest token.
        label_mask (`torch.Tensor`): The same shape, of `bool`, where there is a target.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None


def score_targets(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> PerTokenOutput:
    """
    Score the target tokens of a batch.

    Args:
        logits (`torch.Tensor`): Shape `(batch, sequence, vocabulary)`.
        labels (`torch.Tensor`): Shape `(batch, sequence)`, −100 where there is no target; the first of a row is none.
        shift_labels (`torch.Tensor`, *optional*): Shape `(batch, sequence)`, the target of each position itself, in
            place of `labels`.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): What the loss is divided by; by default the number
            of targets.

    Raises:
        ValueError: If there are no labels.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("Targets are scored by their labels: give `labels`.")
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    mask = shift_labels != -100
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    targets = shift_labels.clamp(min=0)
    own = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(dim=-1).masked_fill(~mask, 0.0)
        is_top1 = ((log_probs.argmax(dim=-1) == targets) & mask).float()
    divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return PerTokenOutput(-own.sum() / divisor, own, entropy, is_top1, mask)
