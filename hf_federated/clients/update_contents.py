"""The contents of an update after a local training: examples, tokens, steps and metrics."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from .._compat import train_tokens
from ..messages import ClientUpdate, Fit
from ..utils.weighted_mean import State


# Keys of log entries that are not metrics: the progress of training, and token counts, which have a separate field.
NON_METRIC_KEYS = {"epoch", "step", "num_input_tokens_seen", "num_tokens"}


def update_of(message: Fit, trainer: Any, state: State) -> ClientUpdate:
    """
    Return the result of a local training.

    Args:
        message ([`Fit`]): The request.
        trainer (`transformers.Trainer`): The client's trainer, after the training.
        state (`dict[str, torch.Tensor]`): The trained parameters.
    """
    stream = trainer.local_training.stream
    return ClientUpdate(
        round=message.round,
        client_id=message.client_id,
        state=state,
        num_examples=len(trainer.train_dataset) if stream is None else stream.num_examples,
        num_tokens=_num_tokens(trainer),
        num_steps=trainer.state.global_step,
        metrics=_training_metrics(trainer),
    )


def _num_tokens(trainer: Trainer) -> int:
    """Return the number of tokens of a local training, if `Trainer` or a trainer of TRL counts them."""
    if trainer.args.include_num_input_tokens_seen == "no" and (counted := train_tokens(trainer)):
        return counted
    # The trainers of TRL that generate completions count their tokens here, with every setting.
    return trainer.state.num_input_tokens_seen


def _training_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the metrics of a local training: the last entry of the trainer's log that has a loss."""
    metrics = {"total_flos": float(trainer.state.total_flos)}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name, value in (entries[-1] if entries else {}).items():
        if name not in NON_METRIC_KEYS and isinstance(value, (int, float)):
            metrics[name] = float(value)
    return metrics
