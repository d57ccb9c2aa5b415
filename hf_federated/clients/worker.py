"""`ClientWorker`: answers messages for clients, on the models that they train.

It is the only code that touches a client's rows, and it sees the server's side through messages alone.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..adapters import Exchange, ModelMismatchError
from ..config import FederatedConfig
from ..distributed.process_group import PeerFailedError
from ..messages import (
    ClientFailure,
    ClientUpdate,
    Distill,
    Evaluate,
    Feedback,
    Fit,
    Message,
    Metrics,
    Predict,
)
from ..messages.validation import first_non_finite
from ..postprocessing import Postprocessor, run_client_side
from ..utils.random import derived_seed, preserved_generators, seed_torch
from .distilling import class_counts, compare_features, distill, predict, take_feedback
from .epoch_losses import EpochLosses
from .local_training import (
    LocalTraining,
    LocalTrainingCallback,
    UnsupportedTrainerError,
    client_arguments,
    fresh_collator,
    local_trainer,
    preserved_process_state,
)
from .models import ClientModel, ClientModels, OwnModel
from .sampling import draw_rows


logger = logging.get_logger(__name__)

# What a log entry says of where it stands, and of tokens, which are reported beside the metrics.
POSITIONS = {"epoch", "step", "num_input_tokens_seen", "num_tokens"}


class ClientWorker:
    """
    Trains and evaluates clients one after the other.

    Args:
        models ([`ClientModels`]): What clients train, and what they keep.
        train_datasets (`Mapping[str, Dataset]`): The clients' training rows.
        eval_datasets (`Mapping[str, Dataset]`, *optional*): The clients' evaluation rows.
        algorithm (`Any`): Its `local_hook` is the client side of local training.
        config ([`FederatedConfig`]): With `num_rounds` filled in.
        private_models (`Callable`, *optional*): Makes the model that a client has beside the shared one, as it is
            before the first round, from the client's id: a trainer around it, and its exchange.
        distillation (`Any`, *optional*): What it says of predictions and losses is the client side of distillation.
        postprocessors (`Sequence[Postprocessor]`, *optional*): Their client sides run here.
        callbacks (`Sequence[TrainerCallback]`, *optional*): Run inside clients.
    """

    def __init__(
        self,
        models: ClientModels,
        train_datasets: Mapping[str, Any],
        eval_datasets: Mapping[str, Any] | None,
        algorithm: Any,
        config: FederatedConfig,
        distillation: Any = None,
        private_models: Callable[[str], tuple[Trainer, Exchange, Any]] | None = None,
        postprocessors: Sequence[Postprocessor] = (),
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.models = models
        self.last_error: Exception | None = None
        self._train_datasets = train_datasets
        self._eval_datasets = eval_datasets
        self._algorithm = algorithm
        self._distillation = distillation
        self._private_models = private_models
        self._config = config
        self._num_rounds = config.num_rounds or 1
        self._carry_optimizer = config.client_optimizer_state == "carry"
        self._global_schedule = config.lr_schedule == "global"
        self._postprocessors = postprocessors
        self._callbacks = list(callbacks)
        # With one client the global generators are left alone, so that it equals the plain Trainer draw for draw.
        self._is_federation = len(train_datasets) > 1

    def handle(self, message: Message) -> Message:
        """
        The reply to a message.

        An exception on the client's side becomes a [`ClientFailure`], as it would from another machine; it is logged
        here with its traceback and kept in `last_error`. An error of the store is raised: it is this process's fault.
        """
        if not isinstance(message, (Fit, Evaluate, Predict, Distill, Feedback)):
            raise TypeError(f"A client does not know the message {type(message).__name__}.")
        self.last_error = None
        model = self.models.open(message.client_id)
        kept = self.models.kept(message.client_id) if isinstance(message, Fit) else {}
        to_keep: dict[str, Any] = {}
        reply: Message
        try:
            if isinstance(message, Fit):
                reply, to_keep = self._fit(message, model, kept)
            elif isinstance(message, Evaluate):
                reply = self._evaluate(message, model)
            else:
                reply = self._distil(message, model)
        except (ModelMismatchError, PeerFailedError, UnsupportedTrainerError):
            # Not this client's fault, and not the end of this client alone.
            raise
        except Exception as error:
            self.last_error = error
            logger.warning(f"Client {message.client_id!r} failed in round {message.round}:\n{traceback.format_exc()}")
            text = f"{type(error).__name__}: {error}"
            return ClientFailure(message.round, message.client_id, text)
        if to_keep:
            self.models.keep(message.client_id, to_keep)
        return reply

    def _fit(self, message: Fit, model: ClientModel, kept: dict[str, Any]) -> tuple[ClientUpdate, dict[str, Any]]:
        """The update, and what the client keeps."""
        compared = self._compared(message.client_id, model, kept)
        if message.state:
            model.exchange.write(message.state)
        hook = self._algorithm.local_hook(message, kept.get("algorithm"))
        if self._private_models is not None:
            private, exchange, _ = self._private_models(message.client_id)
            hook.start(private, exchange, model.trainer.model)
        with model.restored_on_failure():
            trainer = self._train(message, model, hook, kept.get("optimizer"))
        model.exchange.check_unchanged(model.trainer.model)
        extra, to_keep = hook.finish() if hook is not None else ({}, None)
        if self._distillation is not None and self._distillation.returns_parameters:
            assert model.student is not None
            extra = {**extra, **self._distillation.client_extra(model.student, compared)}
        state: dict[str, Any] = {}
        if self._carry_optimizer:
            state["optimizer"] = trainer.optimizer.state_dict()
        else:
            # The optimizer and its schedule refer to each other; its moments would wait for a garbage collection.
            trainer.optimizer.state.clear()
        if to_keep is not None:
            state["algorithm"] = to_keep
        if compared:
            state["distillation"] = compared
        metrics = _training_metrics(trainer)
        if self._distillation is not None and self._distillation.needs_class_counts:
            metrics |= class_counts(trainer.train_dataset, model, self._distillation)
        update = ClientUpdate(
            round=message.round,
            client_id=message.client_id,
            state=model.exchange.read() if message.returns_state else {},
            num_examples=_num_examples(trainer),
            num_tokens=trainer.state.num_input_tokens_seen,
            num_steps=trainer.state.global_step,
            metrics=metrics,
            extra=extra,
        )
        # A client that diverged goes on from its last good state if it is asked again; the server rejects the update.
        if state and first_non_finite(update.state) is not None:
            state = {}
        return run_client_side(self._postprocessors, update, message), state

    def _compared(self, client_id: str, model: ClientModel, kept: dict[str, Any]) -> dict[str, Any]:
        """What the client found out by features of the first model, now or in an earlier round."""
        if self._distillation is None or not self._distillation.needs_features:
            return {}
        if "distillation" in kept:
            return kept["distillation"]
        assert model.initial is not None
        # Another state is written before anything is trained.
        model.exchange.write(model.initial)
        seed = derived_seed(self._config.federation_seed or 0, "features", client_id)
        return compare_features(self._train_datasets[client_id], model, self._distillation, seed)

    def _train(self, message: Fit, model: ClientModel, hook: Any, optimizer_state: dict[str, Any] | None) -> Trainer:
        outer, args = model.trainer, self._arguments(model)
        counts_epochs = self._distillation is not None and self._distillation.needs_epoch_losses
        epoch_losses = EpochLosses() if counts_epochs else None
        local = LocalTraining(
            round=message.round,
            num_rounds=self._num_rounds,
            global_schedule=self._global_schedule,
            parameters=model.exchange.trainable,
            hook=hook,
            optimizer_state=optimizer_state,
            frozen=self._frozen(model, message.round),
            epoch_losses=epoch_losses,
        )
        callbacks = [LocalTrainingCallback(message.seed if self._is_federation else None), *self._callbacks]
        if epoch_losses is not None:
            callbacks.append(epoch_losses)
        trainer = local_trainer(outer, args, self._rows(message), local, callbacks)
        with preserved_process_state(outer), preserved_generators() if self._is_federation else nullcontext():
            if self._is_federation:
                # accelerate's sampler takes the global generator's seed when it is built: the run's, for all clients.
                seed_torch(args.seed if args.data_seed is None else args.data_seed)
                trainer.data_collator = fresh_collator(trainer.data_collator, message.seed)
            try:
                trainer.train()
            except BaseException:
                # What a finished training cleans up itself would otherwise reach the next client.
                _remove_neftune(trainer)
                outer.model.zero_grad()
                raise
        return trainer

    def _frozen(self, model: ClientModel, round: int) -> list[nn.Parameter]:
        return [] if self._distillation is None else self._distillation.frozen_parameters(model.trainer.model, round)

    def _rows(self, message: Fit) -> Any:
        """What the client trains on in this round: all its rows, or those that it draws."""
        rows = self._train_datasets[message.client_id]
        if message.max_rows is None:
            return rows
        drawn = draw_rows(len(rows), message.max_rows, message.seed)
        return rows if drawn is None else rows.select(drawn)

    def _arguments(self, model: ClientModel) -> TrainingArguments:
        args = client_arguments(model.args, self._config.local_epochs, self._config.local_steps)
        if self._algorithm.weighting == "tokens" and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "non_padding"
        return args

    def _evaluate(self, message: Evaluate, model: ClientModel) -> Metrics:
        if self._eval_datasets is None or message.client_id not in self._eval_datasets:
            raise ValueError(f"Client {message.client_id!r} has no evaluation data.")
        dataset = self._eval_datasets[message.client_id]
        if message.state:
            model.exchange.write(message.state)
        local = LocalTraining(message.round, self._num_rounds, False, {})
        trainer = local_trainer(model.trainer, self._arguments(model), None, local, [])
        # As amid a training: `bf16_full_eval` would otherwise cast a model that goes on training, for good.
        trainer.is_in_train = trainer.is_in_train or isinstance(model, OwnModel)
        with preserved_process_state(model.trainer), preserved_generators():
            metrics = trainer.evaluate(dataset)
        values = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        return Metrics(message.round, message.client_id, num_examples=len(dataset), metrics=values)

    def _distil(self, message: Predict | Distill | Feedback, model: ClientModel) -> Message:
        if self._distillation is None or not isinstance(model, OwnModel) or model.student is None:
            raise TypeError(f"A {type(message).__name__} is for clients with models of their own and public rows.")
        if isinstance(message, Predict):
            return predict(message, model, model.student, self._distillation)
        if isinstance(message, Distill):
            return distill(message, model, model.student, self._distillation)
        return take_feedback(message, model, model.student, self._distillation)


def _num_examples(trainer: Trainer) -> int:
    try:
        return len(trainer.train_dataset)
    except TypeError:  # A stream.
        args = trainer.args
        return trainer.state.global_step * args.train_batch_size * args.gradient_accumulation_steps


def _training_metrics(trainer: Trainer) -> dict[str, float]:
    """
    What a client reports of its training, from its own trainer's log: the entry of the last step. Where every epoch
    has an entry, the loss is their mean, and beside it stands the smallest of the epochs' mean losses.
    """
    metrics = {"total_flos": float(trainer.state.total_flos)}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name, value in (entries[-1] if entries else {}).items():
        if name not in POSITIONS and isinstance(value, (int, float)):
            metrics[name] = float(value)
    epoch_losses = trainer.local_training.epoch_losses
    if epoch_losses is not None:
        losses = [float(entry["loss"]) for entry in entries]
        metrics |= {"loss": statistics.fmean(losses), "min_epoch_loss": min(epoch_losses.means(losses))}
    return metrics


def _remove_neftune(trainer: Trainer) -> None:
    handle = trainer.__dict__.get("neftune_hook_handle")
    if handle is not None:
        handle.remove()
