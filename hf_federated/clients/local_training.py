"""Local training: the user's own Trainer, run for one client without a trace on anything else.

A client trains in a shallow copy of the federated trainer. Whatever `train()` assigns on it (optimizer, scheduler,
state, control, counters, and attributes of future versions) lands on the copy and goes with it, as it would on another
machine. Only what the copy shares with the original has to be put back: the accelerator's lists, accelerate's gradient
state, the model's mode and the global generators.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, TrainerMemoryTracker, has_length

from ..utils.random import derived_seed, isolated_rng, seed_generators
from .sampling import at_most


class UnsupportedTrainerError(ValueError):
    """What a trainer does cannot be done for each client apart. It ends the run: it is no one client's fault."""


@dataclass
class LocalTraining:
    """
    What one local training needs beyond the user's arguments. Its methods are called by the trainer's overrides.

    Args:
        round (`int`): Round number, from 0.
        num_rounds (`int`): Rounds of the run, over which the learning-rate curve extends.
        global_schedule (`bool`): One learning-rate curve over all rounds instead of one a round.
        parameters (`Mapping[str, torch.nn.Parameter]`): The exchanged parameters by name.
        hook (`LocalHook`, *optional*): The algorithm's client side.
        optimizer_state (`dict`, *optional*): The optimizer's state to go on from.
        distillation (`LocalDistillation`, *optional*): The part of a distillation algorithm in this training.
    """

    round: int
    num_rounds: int
    global_schedule: bool
    parameters: Mapping[str, nn.Parameter]
    hook: Any = None
    optimizer_state: dict[str, Any] | None = None
    distillation: Any = None
    _divides_by_items: bool | None = None

    def on_batch(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        """Called before the loss of a micro-batch is computed."""
        if self.distillation is not None:
            self.distillation.on_batch(trainer, model, inputs, num_items)

    def on_gradients(self, trainer: Trainer) -> None:
        """
        Called when the gradients of a micro-batch have been added to those in `.grad`.

        Args:
            trainer (`transformers.Trainer`): The client's trainer.
        """
        for parameter in () if self.distillation is None else self.distillation.frozen:
            # Without a gradient there is no weight decay either.
            parameter.grad = None
        if self.hook is not None and trainer.accelerator.sync_gradients:
            self.hook.on_gradients(self.parameters)
            self.hook.on_step(trainer.optimizer.param_groups)

    def share_of_step(self, trainer: Any, inputs: Mapping[str, Any], num_items: Any) -> Any:
        """
        What the trainer's loss on a batch is of the mean over this batch: 1, but where batches are accumulated whose
        items (tokens with a label) the model divides its loss by. It is then this batch's share of these items.

        Args:
            trainer (`transformers.Trainer`): The client's, amid a step.
            inputs (`Mapping[str, Any]`): The batch.
            num_items (`torch.Tensor` or `int`, *optional*): Items of all batches of the step.
        """
        if trainer.current_gradient_accumulation_steps == 1 or num_items is None or "labels" not in inputs:
            return 1.0
        if self._divides_by_items is None:
            self._divides_by_items = trainer.model_accepts_loss_kwargs and _divides_by_items(trainer, inputs)
        if not self._divides_by_items:
            return 1.0
        return trainer._get_num_items_in_batch([inputs], trainer.args.device) / num_items

    def count_epochs_over_run(self, loader: Any, args: TrainingArguments) -> EpochOffsetLoader:
        """
        The loader with its epochs numbered over the run, so that every round shuffles as one long run would.

        Args:
            loader (`Any`): What `get_train_dataloader` returned.
            args (`TrainingArguments`): The client's. A round of steps uses up every epoch that it enters.
        """
        epochs_per_round = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:
            batches = args.max_steps * args.gradient_accumulation_steps
            epochs_per_round = math.ceil(batches / len(loader)) if has_length(loader) else 1
        return EpochOffsetLoader(loader, self.round * epochs_per_round)

    def num_schedule_steps(self, num_training_steps: int) -> int:
        """Length of the learning-rate curve, in optimizer steps of this client."""
        return num_training_steps * self.num_rounds if self.global_schedule else num_training_steps

    def check_optimizer(self, trainer: Trainer) -> None:
        """
        Refuse an optimizer that trains something beside the exchanged parameters.

        Args:
            trainer (`transformers.Trainer`): The client's, with its optimizer.

        Raises:
            UnsupportedTrainerError: If it does. The message names the parameter.
        """
        exchanged = {id(parameter) for parameter in self.parameters.values()}
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in exchanged and parameter.requires_grad:
                    raise UnsupportedTrainerError(
                        f"The optimizer trains {_name_on(trainer, parameter)}, which is no part of the model: it "
                        "would not travel, and one client's would reach the next. Put it into the model before the "
                        "trainer is built (a loss with parameters as a module of the model), or leave it out."
                    )

    def place_schedule(self, scheduler: LRScheduler, num_training_steps: int) -> None:
        """Move a fresh schedule to this client's place in the run: round × its local steps."""
        place_schedule(scheduler, self.round * num_training_steps if self.global_schedule else 0)


def place_schedule(scheduler: LRScheduler, position: int) -> None:
    """
    Move a schedule ahead, as if so many steps had been taken.

    Args:
        scheduler (`LRScheduler`): Not beyond the place yet.
        position (`int`): Steps from the beginning of the curve.
    """
    if position <= scheduler.last_epoch:
        return
    if isinstance(scheduler, LambdaLR):
        # Closed form: one step from just before the place.
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": position - 1, "_step_count": position + 1})
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of steps before the optimizer's first; that is the point.
        for _ in range(position - scheduler.last_epoch):
            scheduler.step()


def _divides_by_items(trainer: Trainer, inputs: Mapping[str, Any]) -> bool:
    """Tried out: many models take a number of items and have no use for it."""
    losses = []
    for num_items in (1, 2):
        with torch.no_grad(), trainer.compute_loss_context_manager(), isolated_rng(0):
            losses.append(float(trainer.model(**inputs, num_items_in_batch=num_items)["loss"]))
    return losses[0] != losses[1]


def _name_on(trainer: Trainer, parameter: nn.Parameter) -> str:
    for name, value in vars(trainer).items():
        inside = {"": value} if not isinstance(value, nn.Module) else dict(value.named_parameters(prefix="."))
        for path, candidate in inside.items():
            if candidate is parameter:
                return repr(f"{name}{path[1:]}")
    return f"a parameter of shape {tuple(parameter.shape)}"


class EpochOffsetLoader:
    """
    A data loader whose epochs are counted over the run instead of over one `train()` call.

    A proxy, because accelerate's loader sets its epoch again whenever it is iterated.

    Args:
        loader (`Any`): What `get_train_dataloader` returned.
        offset (`int`): Epochs of this client before this call.
    """

    # `Trainer` would set the bare epoch on a nested batch sampler; `set_epoch` below does it with the offset.
    batch_sampler = None

    def __init__(self, loader: Any, offset: int) -> None:
        self._loader = loader
        self._offset = offset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the sampler shuffles by."""
        epoch += self._offset
        for target in (self._loader, getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)):
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class LocalTrainingCallback(TrainerCallback):
    """
    Inside a client: seeds the generators once the shuffling is set up, and logs at the last step.

    Args:
        seed (`int`, *optional*): `None` leaves the global generators alone, which one client needs to equal the plain
            Trainer.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._seed is not None:
            seed_generators(self._seed)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True


def client_arguments(args: TrainingArguments, local_epochs: int, local_steps: int | None) -> TrainingArguments:
    """
    The user's arguments as one client sees them: its share of a round, and nothing that belongs to the whole run.

    Args:
        args (`TrainingArguments`): The user's.
        local_epochs (`int`): Passes over the data.
        local_steps (`int`, *optional*): Optimizer steps instead.
    """
    local = copy.copy(args)
    local.num_train_epochs = float(local_epochs)
    local.max_steps = -1 if local_steps is None else local_steps
    local.eval_strategy = IntervalStrategy.NO
    local.save_strategy = SaveStrategy.NO
    local.logging_strategy = IntervalStrategy.NO
    local.logging_first_step = False
    local.load_best_model_at_end = False
    local.eval_on_start = False
    local.push_to_hub = False
    local.skip_memory_metrics = True
    local.save_total_limit = None
    return local


def batches_per_round(
    num_rows: Mapping[str, int | None],
    local_epochs: int,
    local_steps: int | None,
    args: TrainingArguments,
    max_rows: int | None = None,
) -> dict[str, float]:
    """
    Batches of each client in a round.

    Args:
        num_rows (`Mapping[str, int]`): Rows of each client; `None` for a stream, which needs `local_steps`.
        local_epochs (`int`): Passes over the data.
        local_steps (`int`, *optional*): Optimizer steps instead.
        args (`TrainingArguments`): The user's.
        max_rows (`int`, *optional*): Rows that a client trains on at most.
    """
    if local_steps is not None:
        return dict.fromkeys(num_rows, float(local_steps * args.gradient_accumulation_steps))
    return {
        client_id: float(local_epochs * math.ceil(at_most(rows or 0, max_rows) / args.train_batch_size))
        for client_id, rows in num_rows.items()
    }


def local_trainer(
    trainer: Trainer,
    args: TrainingArguments,
    train_dataset: Any,
    local: LocalTraining,
    callbacks: list[TrainerCallback],
) -> Trainer:
    """
    A trainer for one client's local training, which shares the model and accelerator of the federated one.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        args (`TrainingArguments`): From [`client_arguments`].
        train_dataset (`datasets.Dataset`): The client's rows.
        local ([`LocalTraining`]): The client's place in the run.
        callbacks (`list[TrainerCallback]`): Run inside the client, besides the flow of steps.
    """
    client = copy.copy(trainer)
    client.args = args
    client.train_dataset = train_dataset
    client.local_training = local
    client.optimizer = None
    client.lr_scheduler = None
    client._created_lr_scheduler = False
    client.model_init = None
    client.state = TrainerState()
    client.control = TrainerControl()
    client.callback_handler = CallbackHandler(
        [DefaultFlowCallback(), *callbacks], client.model, client.processing_class, None, None
    )
    client.neftune_noise_alpha = args.neftune_noise_alpha
    client.current_flos = 0
    client.hub_model_id = None
    client.push_in_progress = None
    client.hp_search_backend = None
    client._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
    return client


def fresh_collator(collator: Any, seed: int | None = None) -> Any:
    """
    A collator that has drawn nothing yet, where it masks from a seed of its own; any other as it is.

    Args:
        collator (`Any`): The trainer's, which is not changed.
        seed (`int`, *optional*): A client's, on which the masks then depend too.
    """
    if not isinstance(collator, DataCollatorForLanguageModeling) or collator.seed is None:
        return collator
    fresh = copy.copy(collator)
    fresh.generator = None
    if seed is not None:
        fresh.seed = derived_seed(seed, "collator", collator.seed)
    return fresh


@contextmanager
def preserved_process_state(trainer: Trainer) -> Iterator[None]:
    """Put back what a nested `train()` or `evaluate()` changes outside the trainer object."""
    accelerator, model = trainer.accelerator, trainer.model
    lists = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    step = accelerator.step
    shared = GradientState._shared_state
    gradient_state = {key: list(value) if isinstance(value, list) else value for key, value in shared.items()}
    training = model.training
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders = lists
        accelerator.step = step
        shared.clear()
        shared.update(gradient_state)
        if model.training != training:
            model.train(training)
