"""What a server without a `Trainer` loop takes from `Trainer`: optimizers, schedules, and when to save."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..split.parts import Part
from .parties import Party


def number_of_steps(args: TrainingArguments, steps_in_epoch: int) -> int:
    """Optimizer steps of a run, as `Trainer` counts them."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_in_epoch)


def saves_at(args: TrainingArguments, step: int, max_steps: int, steps_in_epoch: int) -> bool:
    """Whether `Trainer` writes a checkpoint after so many steps."""
    if args.save_strategy == SaveStrategy.STEPS:
        every = args.save_steps if args.save_steps >= 1 else math.ceil(max_steps * args.save_steps)
        return step % int(every) == 0 or step >= max_steps
    return args.save_strategy == SaveStrategy.EPOCH and (step % steps_in_epoch == 0 or step >= max_steps)


def kept_checkpoints(args: TrainingArguments) -> int | None:
    """`save_total_limit` of a networked run: two or more, for a party may break off before it has the newest too."""
    return args.save_total_limit and max(args.save_total_limit, 2)


def create_optimizers(parties: Iterable[Party], args: TrainingArguments, max_steps: int) -> list[Any]:
    """
    Give every party that trains anything the optimizer that `Trainer` would make.

    Returns:
        `list[LRScheduler]`: The schedule of each.
    """
    args = copy.copy(args)
    # A trainer that may push creates its repository when it is built, and one that evaluates asks for rows.
    args.push_to_hub = False
    args.eval_strategy = IntervalStrategy.NO
    schedulers = []
    for party in parties:
        if not party.trained():
            continue
        trainer = Trainer(_Unused(), args)
        party.optimizer = trainer.create_optimizer(party.module)
        schedulers.append(trainer.create_scheduler(max_steps, party.optimizer))
    return schedulers


def enable_checkpointing(part: Part, args: TrainingArguments) -> None:
    """Activation checkpointing as `Trainer` reads it from the arguments."""
    if args.activation_checkpointing:
        settings = dict(args.activation_checkpointing_kwargs or {})
        every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
        part.enable_checkpointing(settings or None, every_n_layers=every, offload=offload)


class _Unused(nn.Module):
    """In the place of a model: an optimizer is made for a part."""
