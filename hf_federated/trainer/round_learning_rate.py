"""The learning rate of a round relative to the peak of its schedule, as the training arguments define it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler


# Smallest relative learning rate. A change has other parts than the steps of the optimizer, such as buffers.
SMALLEST = 1e-3


def relative_learning_rate(args: TrainingArguments, num_rounds: int, lr_schedule: str) -> Callable[[int], float]:
    """
    Return a function of the round: the learning rate in the middle of the round, relative to `learning_rate`.

    A warmup in steps is left out, because the number of steps differs between clients. The value is 1 if the schedule
    has no closed form. A schedule of `optimizers` or of an overridden `create_scheduler` is not considered.

    Args:
        args (`TrainingArguments`): The user's training arguments.
        num_rounds (`int`): Number of rounds of the run.
        lr_schedule (`str`): `"global"`, or `"round"` for a schedule that starts anew in each round.

    Example:

    ```python
    >>> from transformers import TrainingArguments
    >>> from hf_federated.trainer.round_learning_rate import relative_learning_rate

    >>> args = TrainingArguments("out", lr_scheduler_type="linear", use_cpu=True)
    >>> [relative_learning_rate(args, 4, "global")(round) for round in range(4)]
    [0.875, 0.625, 0.375, 0.125]
    ```
    """
    scheduler = None
    if lr_schedule == "global":
        # Two positions for each round, so that the middle of a round is a position.
        length = 2 * num_rounds
        warmup = args.get_warmup_steps(length) if args.warmup_steps < 1 else 0
        with suppress(TypeError, ValueError):
            scheduler = get_scheduler(
                args.lr_scheduler_type,
                torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
                num_warmup_steps=warmup,
                num_training_steps=length,
                scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
            )
    if not isinstance(scheduler, LambdaLR):
        return lambda round: 1.0
    rate_at = scheduler.lr_lambdas[0]
    return [max(float(rate_at(2 * round + 1)), SMALLEST) for round in range(num_rounds)].__getitem__
