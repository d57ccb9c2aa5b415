"""Local training: the user's own `Trainer` runs for one client and leaves all shared state unchanged.

A client trains in a shallow copy of the federated trainer. Attributes that `train()` assigns (optimizer, scheduler,
state, control, counters, and attributes of future versions) are set on the copy and discarded with it. Only the state
that the copy shares with the original is restored: the accelerator's lists and its gradient scaler, accelerate's
gradient state, the model's mode and the global random number generators.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler
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

from .._compat import prepared_objects, set_generation_batch_size, set_prepared_objects, set_train_tokens
from ..adapters.shards import load_optimizer_state, parameters_here, parameters_of_groups
from ..methods import ClientPart
from ..utils.random import derived_seed, seed_generators
from .failures import UnsupportedTrainerError, as_mapping, parameter_name
from .gradient_scaler import ClientScaler
from .sampler_position import SamplerPosition
from .sampling import has_epochs, set_epoch
from .share_of_step import ShareOfStep
from .streams import ClientStream


@dataclass
class LocalTraining:
    """
    Settings of one local training in addition to the user's arguments. The trainer's overrides call its methods.

    Args:
        round (`int`): Round number, from 0.
        num_rounds (`int`): Number of rounds of the run, which is the length of a global learning-rate schedule.
        global_schedule (`bool`): Whether one learning-rate schedule covers all rounds. Otherwise each round has its
            own schedule.
        parameters (`Mapping[str, torch.nn.Parameter]`): The trained parameters that are exchanged, by name. The parts
            see only these.
        local_parameters (`Mapping[str, torch.nn.Parameter]`, *optional*): The trained parameters that the client
            keeps (`keep_local`), by name.
        parts (`Sequence[ClientPart]`, *optional*): The client halves of the methods.
        optimizer_state (`dict`, *optional*): Optimizer state to start from.
        scaler ([`ClientScaler`], *optional*): The client's gradient scaler, if the training scales its loss.
        stream ([`~hf_federated.clients.streams.ClientStream`], *optional*): The client's examples, if they are a
            stream.
        keeps_position (`bool`, *optional*, defaults to `False`): Whether the client continues in its sampler, from
            `kept_position`, its position after the last round.
    """

    round: int
    num_rounds: int
    global_schedule: bool
    parameters: Mapping[str, nn.Parameter]
    local_parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    parts: Sequence[ClientPart] = ()
    optimizer_state: dict[str, Any] | None = None
    scaler: ClientScaler | None = None
    stream: ClientStream | None = None
    keeps_position: bool = False
    kept_position: dict[str, Any] | None = None
    sampler_position: SamplerPosition | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.share_of_step = ShareOfStep()
        self._sharded_groups: list[list[Any]] = []
        # Whether a method computes the loss of a training step from the loss of the trainer.
        self.changes_loss = any([part.changes_loss for part in self.parts])
        self._parts_with_gradients = [part for part in self.parts if part.changes_gradients]
        self._parts_with_batches = [part for part in self.parts if type(part).on_batch is not ClientPart.on_batch]

    @property
    def changes_gradients(self) -> bool:
        """Whether a method reads or changes gradients, or reads the groups of the optimizer."""
        return bool(self._parts_with_gradients)

    def on_batch(self, model: nn.Module, inputs: Any, num_items: Any) -> None:
        """Run before the loss of a micro-batch is computed."""
        for part in self._parts_with_batches:
            part.on_batch(model, as_mapping(inputs, part), num_items)

    def on_gradients(self, trainer: Trainer) -> None:
        """
        Run after the gradients of a micro-batch are added to `.grad`.

        Args:
            trainer (`transformers.Trainer`): The client's trainer.
        """
        for part in self.parts:
            for parameter in part.frozen:
                # Without a gradient, the optimizer does not apply weight decay either.
                parameter.grad = None
        parts = self._parts_with_gradients
        if not parts or not trainer.accelerator.sync_gradients:
            return
        groups = trainer.optimizer.param_groups
        with nullcontext(True) if self.scaler is None else self.scaler.unscaled(groups) as is_finite:
            for part in parts if is_finite else ():
                part.on_gradients(parameters_here(self.parameters))
                part.on_step(groups)

    def inputs(self, inputs: Any) -> dict[str, Any]:
        """Return the inputs of the model for a batch."""
        changed = dict(as_mapping(inputs, next(part for part in self.parts if part.changes_loss)))
        for part in self.parts:
            changed = part.inputs(changed)
        return changed

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss of a training step, as [`ClientPart.loss`]."""
        for part in self.parts:
            loss = part.loss(loss, outputs, inputs)
        return loss

    def count_epochs_over_run(self, loader: Any, args: TrainingArguments) -> EpochOffsetLoader:
        """
        Wrap the data loader so that it counts epochs over the run. Every round then shuffles as one long run would.

        Args:
            loader (`Any`): Result of `get_train_dataloader`.
            args (`TrainingArguments`): The client's arguments. If the length of a round is set in steps, the client
                continues after its last batch. Without a length or a position, each round starts another epoch.
        """
        epochs_per_round = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:
            batches = args.max_steps * args.gradient_accumulation_steps
            epochs_per_round = math.ceil(batches / len(loader)) if has_length(loader) else 1
        source: ClientStream | SamplerPosition | None = self.stream
        if self.keeps_position and has_length(loader) and (args.max_steps > 0 or not has_epochs(loader)):
            source = self.sampler_position = SamplerPosition(loader, args, self.kept_position)
        return EpochOffsetLoader(loader, self.round * epochs_per_round, source)

    @property
    def num_further_epochs(self) -> int:
        """Number of epochs of the trainer that a round needs because it starts within an epoch of the client."""
        return 0 if self.sampler_position is None or not self.sampler_position.is_within_epoch else 2

    def position_after(self) -> dict[str, Any] | None:
        """Return the position of the client in its sampler after the training, if the client keeps it."""
        if self.sampler_position is not None:
            return self.sampler_position.state()
        # The client keeps its position in a round on a part of its examples.
        return self.kept_position if self.kept_position is not None and "epoch" in self.kept_position else None

    def num_schedule_steps(self, num_training_steps: int) -> int:
        """Length of the learning-rate schedule in optimizer steps of this client."""
        return num_training_steps * self.num_rounds if self.global_schedule else num_training_steps

    def start_optimizer(self, trainer: Trainer) -> None:
        """
        Load the state of the client's optimizer, and check that it trains exchanged and local parameters only.

        Args:
            trainer (`transformers.Trainer`): The client's trainer with its optimizer.

        Raises:
            UnsupportedTrainerError: If the optimizer trains another parameter. The message names the parameter.
        """
        if trainer.is_fsdp_enabled:
            self._sharded_groups = parameters_of_groups(trainer.optimizer)
        known = {id(parameter) for parameter in (*self.parameters.values(), *self.local_parameters.values())}
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known and parameter.requires_grad:
                    raise UnsupportedTrainerError(
                        f"The optimizer trains {parameter_name(trainer, parameter)}, which is not a parameter of the "
                        "model. It would not be exchanged, and the next client would continue with the value of this "
                        "client. Add it to the model before you create the trainer (for example, add a loss with "
                        "parameters as a module of the model), or remove it from the optimizer."
                    )
        self.load_optimizer(trainer.optimizer)

    def load_optimizer(self, optimizer: Any) -> None:
        """Load the state of the client's optimizer, if the client kept one."""
        if self.optimizer_state is not None:
            load_optimizer_state(optimizer, self.optimizer_state)
            # Some schedules multiply `lr` in each step. A new schedule must start from the first learning rate.
            for group in optimizer.param_groups:
                group["lr"] = copy.deepcopy(group.get("initial_lr", group["lr"]))

    def restore_groups(self, optimizer: Any) -> None:
        """
        Restore the parameters of the optimizer after accelerate has prepared it.

        With FSDP2, accelerate finds a parameter by the address of its values, which is 0 for all empty shards.

        Args:
            optimizer (`Any`): The prepared optimizer.
        """
        for group, parameters in zip(optimizer.param_groups, self._sharded_groups, strict=False):
            group["params"] = parameters

    def schedule_position(self, num_training_steps: int) -> int:
        """
        Return this client's step in the schedule of the run, which is the round number times its local steps.

        A schedule does not advance in steps that the client's gradient scaler skips.
        """
        if not self.global_schedule:
            return 0
        num_skipped_steps = 0 if self.scaler is None else self.scaler.num_skipped_steps
        return self.round * num_training_steps - num_skipped_steps


def place_schedule(scheduler: LRScheduler, position: int) -> None:
    """
    Advance a schedule as if `position` steps had been taken.

    Args:
        scheduler (`LRScheduler`): The schedule. It is unchanged if it already is at or after `position`.
        position (`int`): Number of steps from the start of the schedule.
    """
    if isinstance(scheduler, ChainedScheduler):
        # It has no `last_epoch`. Its schedules take their steps together.
        last_epoch = scheduler.state_dict()["_schedulers"][0]["last_epoch"]
    else:
        last_epoch = scheduler.last_epoch
    if position <= last_epoch:
        return
    if isinstance(scheduler, LambdaLR):
        # The learning rate has a closed form: load the preceding step and take one step.
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": position - 1, "_step_count": position + 1})
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about scheduler steps before the first optimizer step.
        for _ in range(position - last_epoch):
            scheduler.step()


class EpochOffsetLoader:
    """
    A data loader that counts epochs over the run instead of over one `train()` call.

    It is a proxy because accelerate's data loader sets its epoch again at every iteration.

    Args:
        loader (`Any`): Result of `get_train_dataloader`.
        offset (`int`): Number of epochs of this client before this call.
        source ([`~hf_federated.clients.streams.ClientStream`] or
            [`~hf_federated.clients.sampler_position.SamplerPosition`], *optional*): Continues after the last batch of
            the previous round, and counts the batches that the trainer uses.
    """

    # Hides a nested batch sampler, on which `Trainer` would set the epoch without the offset.
    batch_sampler = None

    def __init__(self, loader: Any, offset: int, source: ClientStream | SamplerPosition | None = None) -> None:
        self._loader = loader
        self._offset = offset
        self._source = source

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the shuffling, unless the client continues in an epoch."""
        if not isinstance(self._source, SamplerPosition) or not self._source.counts_epochs:
            set_epoch(self._loader, epoch + self._offset)

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch of the client continues after the last batch."""
        return isinstance(self._source, SamplerPosition) and self._source.is_within_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader) if self._source is None else self._source.batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class LocalTrainingCallback(TrainerCallback):
    """
    Seeds the global generators after the shuffling is set up, and logs at the last step of a local training.

    Args:
        seed (`int`, *optional*): Seed of the client. `None` leaves the global generators unchanged: a federation with
            one client must draw the same numbers as the plain Trainer.
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
    Copy the user's arguments for the local training of one client.

    The copy sets the length of one round and disables evaluations, checkpoints, uploads and logging, which belong to
    the whole run.

    Args:
        args (`TrainingArguments`): The user's arguments.
        local_epochs (`int`): Number of passes over the client's examples.
        local_steps (`int`, *optional*): Number of optimizer steps. It replaces `local_epochs`.
    """
    # As `copy.copy`, which takes longer than a step of a small model.
    local = object.__new__(type(args))
    vars(local).update(vars(args))
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
    if "steps_per_generation" in vars(local):
        set_generation_batch_size(local)
    if not torch.accelerator.is_available():
        # torch ignores the setting then, and warns about it for each data loader.
        local.dataloader_pin_memory = False
    return local


def local_trainer(
    trainer: Trainer,
    args: TrainingArguments,
    train_dataset: Any,
    local: LocalTraining,
    callbacks: list[TrainerCallback],
) -> Trainer:
    """
    Create the trainer of one client. It shares the model and the accelerator of the federated trainer.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        args (`TrainingArguments`): Arguments from [`client_arguments`].
        train_dataset (`datasets.Dataset`): The client's examples.
        local ([`LocalTraining`]): Settings of this local training.
        callbacks (`list[TrainerCallback]`): Callbacks for the local training, in addition to `DefaultFlowCallback`.
    """
    client = copy.copy(trainer)
    client.args = args
    client.train_dataset = train_dataset
    client.local_training = local
    client._is_federating = False
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
    set_train_tokens(client, 0)
    client.hub_model_id = None
    client.push_in_progress = None
    client.hp_search_backend = None
    client._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
    return client


def fresh_collator(collator: Any, seed: int | None = None) -> Any:
    """
    Copy a collator that masks with its own seed and reset its generator. Other collators are returned unchanged.

    Args:
        collator (`Any`): The trainer's data collator. It is not changed.
        seed (`int`, *optional*): Seed of a client. If it is given, the masks depend on both seeds.
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
    """Restore the state outside the trainer object that a nested `train()` or `evaluate()` changes."""
    accelerator, model = trainer.accelerator, trainer.model
    lists = prepared_objects(accelerator)
    step, scaler = accelerator.step, accelerator.scaler
    gradient_state = vars(accelerator.gradient_state)
    saved_state = {key: list(value) if isinstance(value, list) else value for key, value in gradient_state.items()}
    training = model.training
    try:
        yield
    finally:
        set_prepared_objects(accelerator, lists)
        accelerator.step, accelerator.scaler = step, scaler
        gradient_state.clear()
        gradient_state.update(saved_state)
        if model.training != training:
            model.train(training)
