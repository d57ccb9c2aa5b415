"""`LeanOptimizers`: the optimizer of a model, which the clients of a process use one after the other.

`Trainer` builds an optimizer and a schedule for each client. Here, the factory of the trainer builds them once, and
each client starts from the settings and the empty state that the factory returned.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


# The arguments that define the optimizer and the schedule of a client.
_ARGUMENTS = (
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
)

# Sets the learning rates of the next step from the number of finished steps of the round, and returns the first one.
Schedule = Callable[[int], float]


@dataclass
class _SharedOptimizer:
    """
    An optimizer and its settings before the first step.

    Args:
        key (`tuple`): What the optimizer was built from.
        optimizer (`torch.optim.Optimizer`): The optimizer.
        groups (`list[dict[str, Any]]`): The settings of its parameter groups, without the parameters.
        schedules (`dict[int, LambdaLR]`): The schedules with a closed form, by number of steps of a round.
    """

    key: tuple[Any, ...]
    optimizer: Any
    groups: list[dict[str, Any]]
    schedules: dict[int, LambdaLR] = field(default_factory=dict)

    def reset(self) -> None:
        """Restore the optimizer as it was built."""
        self.optimizer.state.clear()
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(settings, params=parameters)


class LeanOptimizers:
    """
    Provides the optimizers of lean trainings.

    Args:
        keeps_state (`bool`): Whether clients keep the state of their optimizer, which has the groups of the factory.
    """

    def __init__(self, keeps_state: bool) -> None:
        self._keeps_state = keeps_state
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, _SharedOptimizer] = weakref.WeakKeyDictionary()

    def start(self, trainer: Any, parameters: Sequence[nn.Parameter], num_steps: int) -> Schedule:
        """
        Set the optimizer of a client, with the state that the client kept, and return its schedule.

        Args:
            trainer (`transformers.Trainer`): The trainer of the client.
            parameters (`Sequence[torch.nn.Parameter]`): The parameters of its model.
            num_steps (`int`): Number of steps of this round.
        """
        local, values = trainer.local_training, vars(trainer.args)
        one_group = not self._keeps_state and not local.changes_gradients
        trained = [id(parameter) for parameter in parameters if parameter.requires_grad]
        key = (trained, one_group, trainer.optimizer_cls_and_kwargs, [values.get(name) for name in _ARGUMENTS])
        shared = self._optimizers.get(trainer.model)
        if shared is None or shared.key != key:
            shared = self._optimizers[trainer.model] = _build(trainer, copy.deepcopy(key), one_group)
        shared.reset()
        trainer.optimizer = shared.optimizer
        local.load_optimizer(shared.optimizer)
        if num_steps not in shared.schedules:
            schedule = trainer.create_scheduler(num_steps)
            if type(schedule) is not LambdaLR:
                return functools.partial(_advance, schedule)
            shared.schedules[num_steps] = schedule
        rates = [
            (group, group.setdefault("initial_lr", group["lr"]), factor)
            for group, factor in zip(
                shared.optimizer.param_groups, shared.schedules[num_steps].lr_lambdas, strict=True
            )
        ]
        return functools.partial(_set_rates, rates, local.schedule_position(num_steps))


def _build(trainer: Any, key: tuple[Any, ...], one_group: bool) -> _SharedOptimizer:
    """Build the optimizer of a client, without the state that the client kept."""
    local = trainer.local_training
    kept, local.optimizer_state = local.optimizer_state, None
    optimizer = trainer.create_optimizer()
    local.optimizer_state = kept
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if one_group and all(group == groups[0] for group in groups):
        # An optimizer computes each parameter by itself, and each group costs time.
        first, *others = optimizer.param_groups
        first["params"] = [*first["params"], *(parameter for group in others for parameter in group["params"])]
        del optimizer.param_groups[1:], groups[1:]
    return _SharedOptimizer(key, optimizer, groups)


def _advance(schedule: LRScheduler, num_finished: int) -> float:
    if num_finished:
        schedule.step()
    return float(schedule.get_last_lr()[0])


def _set_rates(rates: list[tuple[dict[str, Any], float, Callable[[int], float]]], start: int, finished: int) -> float:
    for group, initial, factor in rates:
        group["lr"] = initial * factor(start + finished)
    return float(rates[0][0]["lr"])
