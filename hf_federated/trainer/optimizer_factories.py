"""Functions in `optimizers=`, which build the optimizer and the learning-rate schedule of each client.

`Trainer` takes one optimizer and one schedule. The clients of a federation need one of each per local training, so the
federated trainer also takes functions that build them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..clients import UnsupportedTrainerError


ADVICE = (
    "Pass functions that build them, `optimizers=(lambda model: SGD(model.parameters(), lr=0.1), lambda optimizer, "
    "num_training_steps: LinearLR(optimizer, total_iters=num_training_steps))`, pass a class and its arguments, "
    "`optimizer_cls_and_kwargs=(SGD, {'lr': 0.1})`, set `optim` and `lr_scheduler_type` of the training arguments, or "
    "override `create_optimizer` and `create_scheduler`."
)


class OptimizerFactories:
    """
    The functions in `optimizers=`.

    Args:
        optimizer (`Callable[[nn.Module], Optimizer]`, *optional*): Builds the optimizer of a model. By default the
            training arguments define the optimizer.
        scheduler (`Callable[[Optimizer, int], LRScheduler]`, *optional*): Builds the schedule of an optimizer, for a
            number of training steps. By default the training arguments define the schedule.
    """

    def __init__(
        self,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._last_built: Callable[[], Optimizer | None] = lambda: None
        # Whether `optimizers` contains no function.
        self.is_empty = optimizer is None and scheduler is None

    @classmethod
    def take(cls, arguments: dict[str, Any], accepts_instances: bool) -> OptimizerFactories:
        """
        Remove the functions from the `optimizers` among the constructor arguments of a trainer.

        Args:
            arguments (`dict[str, Any]`): The constructor arguments by name. `optimizers` is changed in place.
            accepts_instances (`bool`): Whether `optimizers` may contain an optimizer or a schedule, as in `Trainer`.

        Raises:
            ValueError: If `optimizers` contains a class, or an instance that is not accepted. The message names the
                alternatives.
        """
        given = arguments.get("optimizers")
        if given is None:
            return cls()
        parts = tuple(given)
        for part in parts:
            if isinstance(part, type):
                raise ValueError(f"`optimizers` contains the class {part.__name__}. {ADVICE}")
            if part is not None and not callable(part) and not accepts_instances:
                raise ValueError(
                    f"`optimizers` contains one {type(part).__name__}, but every client needs its own. {ADVICE}"
                )
        if callable(parts[0]) and arguments.get("optimizer_cls_and_kwargs") is not None:
            raise ValueError(
                "`optimizers` and `optimizer_cls_and_kwargs` both define the optimizer. Pass one of them."
            )
        arguments["optimizers"] = tuple(None if callable(part) else part for part in parts)
        return cls(*(part if callable(part) else None for part in parts))

    def build_optimizer(self, trainer: Any, model: nn.Module | None) -> None:
        """
        Set the optimizer of a trainer, if it has none and there is a function that builds it.

        Args:
            trainer (`transformers.Trainer`): A trainer before its training.
            model (`torch.nn.Module`, *optional*): The model to optimize. Defaults to the model of the trainer.

        Raises:
            UnsupportedTrainerError: If the function returns no optimizer, or the same optimizer again.
        """
        if self._optimizer is None or trainer.optimizer is not None:
            return
        optimizer = self._optimizer(trainer.model if model is None else model)
        if not isinstance(optimizer, Optimizer):
            raise UnsupportedTrainerError(
                f"The function in `optimizers` returned an object of type {type(optimizer).__name__}. It must return "
                "a torch.optim.Optimizer."
            )
        if self._last_built() is optimizer:
            raise UnsupportedTrainerError(
                f"The function in `optimizers` returned the same {type(optimizer).__name__} as in its previous call, "
                "so that a client would continue with the moments of another client. Build a new optimizer in each "
                "call."
            )
        self._last_built = weakref.ref(optimizer)
        trainer.optimizer = optimizer

    def build_scheduler(self, trainer: Any, num_training_steps: int, optimizer: Optimizer | None) -> None:
        """
        Set the schedule of a trainer, if it has none and there is a function that builds it.

        Args:
            trainer (`transformers.Trainer`): A trainer with an optimizer.
            num_training_steps (`int`): Number of steps of the schedule.
            optimizer (`torch.optim.Optimizer`, *optional*): Defaults to the optimizer of the trainer.

        Raises:
            UnsupportedTrainerError: If the function returns no schedule, or a schedule that depends on evaluations.
        """
        if self._scheduler is None or trainer.lr_scheduler is not None:
            return
        scheduler = self._scheduler(trainer.optimizer if optimizer is None else optimizer, num_training_steps)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise UnsupportedTrainerError(
                f"The function in `optimizers` returned an object of type {type(scheduler).__name__}. It must return "
                "a torch.optim.lr_scheduler.LRScheduler whose learning rates depend on the step only."
            )
        trainer.lr_scheduler = scheduler
        # The next `train()` builds a new schedule, as `Trainer` does for the schedule of the training arguments.
        trainer._created_lr_scheduler = True
