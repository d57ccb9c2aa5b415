"""`ClientWorker`: answers messages for clients, on one resident model.

It is the only code that touches a client's rows, and it sees the server's side through messages alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..adapters import Exchange
from ..config import FederatedConfig
from ..generators import preserved_generators, seed_torch
from ..messages import ClientFailure, ClientUpdate, Evaluate, Fit, Message, Metrics
from ..postprocessing import Postprocessor, run_client_side
from ..processes import PeerFailedError
from ..validation import first_non_finite
from .local_training import (
    LocalTraining,
    LocalTrainingCallback,
    UnsupportedTrainerError,
    client_arguments,
    fresh_collator,
    local_trainer,
    preserved_process_state,
)
from .store import ClientStore


logger = logging.get_logger(__name__)

# What a log entry says of where it stands, and of tokens, which are reported beside the metrics.
POSITIONS = {"epoch", "step", "num_input_tokens_seen", "num_tokens"}


class ClientWorker:
    """
    Trains and evaluates clients one after the other.

    Args:
        trainer (`transformers.Trainer`): The federated trainer, of which local trainers are isolated copies.
        args (`TrainingArguments`): The user's arguments, untouched.
        exchange ([`Exchange`]): Of the trainer's model.
        train_datasets (`Mapping[str, Dataset]`): The clients' training rows.
        eval_datasets (`Mapping[str, Dataset]`, *optional*): The clients' evaluation rows.
        algorithm (`Any`): Its `local_hook` is the client side.
        store ([`ClientStore`]): What clients keep.
        config ([`FederatedConfig`]): With `num_rounds` filled in.
        postprocessors (`Sequence[Postprocessor]`, *optional*): Their client sides run here.
        callbacks (`Sequence[TrainerCallback]`, *optional*): Run inside clients.
    """

    def __init__(
        self,
        trainer: Trainer,
        args: TrainingArguments,
        exchange: Exchange,
        train_datasets: Mapping[str, Any],
        eval_datasets: Mapping[str, Any] | None,
        algorithm: Any,
        store: ClientStore,
        config: FederatedConfig,
        postprocessors: Sequence[Postprocessor] = (),
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.store = store
        self.last_error: Exception | None = None
        self._trainer = trainer
        self._args = client_arguments(args, config.local_epochs, config.local_steps)
        if algorithm.weighting == "tokens" and self._args.include_num_input_tokens_seen == "no":
            self._args.include_num_input_tokens_seen = "non_padding"
        self._exchange = exchange
        self._train_datasets = train_datasets
        self._eval_datasets = eval_datasets
        self._algorithm = algorithm
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
        if not isinstance(message, (Fit, Evaluate)):
            raise TypeError(f"A client does not know the message {type(message).__name__}.")
        self.last_error = None
        kept = self.store.get(message.client_id) if isinstance(message, Fit) else {}
        to_keep: dict[str, Any] = {}
        reply: Message
        try:
            if isinstance(message, Fit):
                reply, to_keep = self._fit(message, kept)
            else:
                reply = self._evaluate(message)
        except (PeerFailedError, UnsupportedTrainerError):
            # Not this client's fault, and not the end of this client alone.
            raise
        except Exception as error:
            self.last_error = error
            logger.warning(f"Client {message.client_id!r} failed in round {message.round}:\n{traceback.format_exc()}")
            text = f"{type(error).__name__}: {error}"
            return ClientFailure(message.round, message.client_id, text)
        if to_keep:
            self.store.set(message.client_id, to_keep)
        return reply

    def _fit(self, message: Fit, kept: dict[str, Any]) -> tuple[ClientUpdate, dict[str, Any]]:
        """The update, and what the client keeps."""
        self._exchange.write(message.state)
        hook = self._algorithm.local_hook(message, kept.get("algorithm"))
        trainer = self._train(message, hook, kept.get("optimizer"))
        self._exchange.check_unchanged(self._trainer.model)
        extra, to_keep = hook.finish() if hook is not None else ({}, None)
        state: dict[str, Any] = {}
        if self._carry_optimizer:
            state["optimizer"] = trainer.optimizer.state_dict()
        else:
            # The optimizer and its schedule refer to each other; its moments would wait for a garbage collection.
            trainer.optimizer.state.clear()
        if to_keep is not None:
            state["algorithm"] = to_keep
        update = ClientUpdate(
            round=message.round,
            client_id=message.client_id,
            state=self._exchange.read(),
            num_examples=self._num_examples(trainer),
            num_tokens=trainer.state.num_input_tokens_seen,
            num_steps=trainer.state.global_step,
            metrics=_training_metrics(trainer),
            extra=extra,
        )
        # A client that diverged goes on from its last good state if it is asked again; the server rejects the update.
        if state and first_non_finite(update.state) is not None:
            state = {}
        return run_client_side(self._postprocessors, update, message), state

    def _train(self, message: Fit, hook: Any, optimizer_state: dict[str, Any] | None) -> Trainer:
        outer = self._trainer
        local = LocalTraining(
            round=message.round,
            num_rounds=self._num_rounds,
            global_schedule=self._global_schedule,
            parameters=self._exchange.trainable,
            hook=hook,
            optimizer_state=optimizer_state,
        )
        callbacks = [LocalTrainingCallback(message.seed if self._is_federation else None), *self._callbacks]
        dataset = self._train_datasets[message.client_id]
        trainer = local_trainer(outer, self._args, dataset, local, callbacks)
        with preserved_process_state(outer), preserved_generators() if self._is_federation else nullcontext():
            if self._is_federation:
                # accelerate's sampler takes the global generator's seed when it is built: the run's, for all clients.
                seed = self._args.seed if self._args.data_seed is None else self._args.data_seed
                seed_torch(seed)
                trainer.data_collator = fresh_collator(trainer.data_collator, message.seed)
            try:
                trainer.train()
            except BaseException:
                # What a finished training cleans up itself would otherwise reach the next client.
                _remove_neftune(trainer)
                outer.model.zero_grad()
                raise
        return trainer

    def _num_examples(self, trainer: Trainer) -> int:
        try:
            return len(trainer.train_dataset)
        except TypeError:  # A stream.
            return trainer.state.global_step * self._args.train_batch_size * self._args.gradient_accumulation_steps

    def _evaluate(self, message: Evaluate) -> Metrics:
        if self._eval_datasets is None:
            raise ValueError(f"Client {message.client_id!r} has no evaluation data.")
        dataset = self._eval_datasets[message.client_id]
        self._exchange.write(message.state)
        trainer = local_trainer(
            self._trainer, self._args, None, LocalTraining(message.round, self._num_rounds, False, {}), []
        )
        with preserved_process_state(self._trainer), preserved_generators():
            metrics = trainer.evaluate(dataset)
        values = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        return Metrics(message.round, message.client_id, num_examples=len(dataset), metrics=values)


def _training_metrics(trainer: Trainer) -> dict[str, float]:
    """What a client reports of its training, from its own trainer's log: the entry of the last step."""
    metrics = {"total_flos": float(trainer.state.total_flos)}
    for entry in trainer.state.log_history:
        if "loss" in entry:
            metrics.update(
                {
                    name: float(value)
                    for name, value in entry.items()
                    if name not in POSITIONS and isinstance(value, (int, float))
                }
            )
    return metrics


def _remove_neftune(trainer: Trainer) -> None:
    handle = trainer.__dict__.get("neftune_hook_handle")
    if handle is not None:
        handle.remove()
