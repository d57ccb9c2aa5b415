"""Scores of each target token, which TRL's `SFTTrainer` requests from a model in place of logits.

TRL (1.x) replaces the forward pass of the model with a version that computes the scores from hidden states. A split
model does not use that forward pass. It computes the same scores from its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput


@dataclass
class PerTokenOutput(ModelOutput):
    """
    Scores of the target tokens. Scores are zero where the label is −100.

    Args:
        loss (`torch.Tensor`):
            Shape `()`. Sum of the targets' negative log-likelihoods in nats, divided by the number of targets.
        log_probs (`torch.Tensor`):
            Shape `(batch, sequence - 1)`, or `(batch, sequence)` with `shift_labels`; `float32`. Log-probabilities of
            the targets.
        entropy (`torch.Tensor`):
            Same shape, `float32`. Entropy of the next-token distribution in nats, without gradient.
        is_top1 (`torch.Tensor`): Same shape, `float32`. 1 where the target is the most likely token.
        label_mask (`torch.Tensor`): Same shape, `bool`. `True` where there is a target.
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
        labels (`torch.Tensor`):
            Shape `(batch, sequence)`, −100 where there is no target. The first label of a sequence is not a target.
        shift_labels (`torch.Tensor`, *optional*):
            Shape `(batch, sequence)`. The target of each position, in place of `labels`.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*):
            Divisor of the loss. Defaults to the number of targets.

    Raises:
        ValueError: If there are no labels.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("Scoring the target tokens needs labels, but none were passed: give `labels`.")
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    mask = shift_labels != -100
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    targets = shift_labels.clamp(min=0)
    target_log_probs = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(dim=-1).masked_fill(~mask, 0.0)
        is_top1 = ((log_probs.argmax(dim=-1) == targets) & mask).float()
    divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return PerTokenOutput(-target_log_probs.sum() / divisor, target_log_probs, entropy, is_top1, mask)
