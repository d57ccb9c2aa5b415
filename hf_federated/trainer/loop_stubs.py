"""How a round is a step of the parent's `train()`.

The parent's loop runs one epoch of one step per round over the stand-ins below: a loader that yields nothing to train
on, an optimizer that has nothing to step and a schedule that repeats what the clients last used. The work is done in
`training_step`. Logging, evaluation, saving, early stopping and resuming follow from the loop as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy


# `TrainingArguments`' default for `logging_steps`, `eval_steps` and `save_steps`; of rounds it means every one.
DEFAULT_STEPS = 500


def round_arguments(args: TrainingArguments, num_rounds: int) -> TrainingArguments:
    """
    The user's arguments as the loop over rounds sees them.

    Args:
        args (`TrainingArguments`): The user's, which are not changed.
        num_rounds (`int`): Rounds of the run.
    """
    outer = copy.copy(args)
    outer.num_train_epochs = float(num_rounds)
    outer.max_steps = -1
    outer.gradient_accumulation_steps = 1
    outer.max_grad_norm = 0.0
    # What acts on batches happens inside clients.
    outer.use_liger_kernel = False
    outer.include_num_input_tokens_seen = "no"
    # Old checkpoints are deleted by us, whole or not at all.
    outer.save_total_limit = None
    # An epoch of the loop is a round as a step is. As steps, all three happen before the round ends.
    for kind, strategy_class in (("logging", IntervalStrategy), ("eval", IntervalStrategy), ("save", SaveStrategy)):
        if getattr(outer, f"{kind}_strategy") == strategy_class.EPOCH:
            setattr(outer, f"{kind}_strategy", strategy_class.STEPS)
            setattr(outer, f"{kind}_steps", 1)
        elif getattr(outer, f"{kind}_steps") == DEFAULT_STEPS:
            setattr(outer, f"{kind}_steps", 1)
    return outer


class RoundDataLoader:
    """
    One step an epoch, with no data. Not a torch `DataLoader`, which would draw from the global generator.

    Args:
        num_examples (`int`): Rows that the clients of a round train on, for the parent's log.
    """

    def __init__(self, num_examples: int) -> None:
        self.dataset = range(num_examples)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {}


class ServerOptimizer:
    """In the optimizer's place: the server's step is part of the round, so there is nothing left to do."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None:
        """Nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the server's state lies in the checkpoint's `federated/` folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class RoundScheduler:
    """In the schedule's place: the learning rate that the clients last used."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def get_last_lr(self) -> list[float]:
        """The clients' mean learning rate in their last steps."""
        return [self.learning_rate]

    def step(self) -> None:
        """Nothing: each client's place on its curve follows from the round."""

    def state_dict(self) -> dict[str, Any]:
        """The learning rate, for the first log after a resume."""
        return {"learning_rate": self.learning_rate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.learning_rate = state_dict["learning_rate"]
