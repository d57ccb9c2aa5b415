"""`ClientWorker`: answers the server's messages for clients, with the models that the clients train.

It is the only code that reads a client's examples. It communicates with the server through messages only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from .._compat import COMPLETIONS, drop_generations, follows_steps_of_run, train_tokens
from ..adapters import Exchange, ModelMismatchError, optimizer_state_here
from ..config import FederatedConfig
from ..data.client_ids import similar_ids_hint
from ..data.torch_datasets import is_map_style, is_stream, subset
from ..distributed.process_group import PeerFailedError
from ..messages import ClientFailure, ClientUpdate, Evaluate, Fit, Message, Metrics
from ..messages.secure_aggregation import SecureFit
from ..messages.validation import INVALID_CONTENT, RefusedRequestError, first_non_finite, refusal_of, refusing
from ..methods import ClientContext, ClientPart, Method
from ..postprocessing import Postprocessor, run_client_receive, run_client_send
from ..utils.printable import printable_traceback
from ..utils.random import preserved_generators, seed_torch
from ..utils.shards import Shards
from ..utils.trainer_banner import trainer_banner
from ..utils.weighted_mean import State
from .agreement import Agreement
from .evaluation import evaluate
from .failures import UnsupportedTrainerError, describe_failure, removed_column_error
from .gradient_scaler import ALL_STEPS_SKIPPED, ClientScaler
from .kept_state import LOCAL, MEMORIES, STEP_MEMORIES, has_state_after, state_before, with_note
from .lean_training import LeanTraining
from .local_training import (
    LocalTraining,
    LocalTrainingCallback,
    client_arguments,
    fresh_collator,
    local_trainer,
    preserved_process_state,
)
from .models import ClientModel, ClientModels, OwnModel, diverged
from .run_position import at_round
from .sampling import draw_examples
from .secure_answers import SecureAnswers
from .streams import ClientStream


logger = logging.get_logger(__name__)

# Keys of log entries that are not metrics: the progress of training, and token counts, which have a separate field.
NON_METRIC_KEYS = {"epoch", "step", "num_input_tokens_seen", "num_tokens"}
# Opening a client's examples takes longer than a small training step, and an open client needs some kilobytes.
MAX_OPEN_CLIENTS = 256


class ClientWorker:
    """
    Trains and evaluates clients one after the other.

    Args:
        models ([`ClientModels`]): The models of clients and the state that clients keep.
        train_datasets (`Mapping[str, Dataset]`): The clients' training examples.
        eval_datasets (`Mapping[str, Dataset]`, *optional*): The clients' evaluation examples.
        methods (`Sequence[Method]`): The methods of the federation. The worker uses their client halves.
        config ([`FederatedConfig`]): Settings of the federation, with `num_rounds` set.
        private_models (`Callable`, *optional*): Builds the private model of a client from the client id, as it is
            before the first round. It returns a trainer around the model, and its exchange.
        postprocessors (`Sequence[Postprocessor]`, *optional*): Their client sides run here.
        callbacks (`Sequence[TrainerCallback]`, *optional*): Callbacks of local training.
        is_federation (`bool`, *optional*): Whether local training is seeded by the seed of the message. Defaults to
            whether there are several clients.
        agreement ([`Agreement`], *optional*): What requests may contain. By default, they are not checked.
        secure ([`SecureAnswers`], *optional*): Encodes updates, and answers the requests of secure aggregation.
        peft_configs (`Mapping[str, peft.LoraConfig]`, *optional*): The LoRA configurations of clients, by client id.
        shards ([`Shards`], *optional*): How the processes of a client on another machine divide its model. Messages
            have whole tensors, and the reply of the main process is whole.
    """

    def __init__(
        self,
        models: ClientModels,
        train_datasets: Mapping[str, Any],
        eval_datasets: Mapping[str, Any] | None,
        methods: Sequence[Method],
        config: FederatedConfig,
        private_models: Callable[[str], tuple[Trainer, Exchange, Any]] | None = None,
        postprocessors: Sequence[Postprocessor] = (),
        callbacks: Sequence[TrainerCallback] = (),
        is_federation: bool | None = None,
        agreement: Agreement | None = None,
        secure: SecureAnswers | None = None,
        peft_configs: Mapping[str, Any] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.models = models
        self.shards = shards
        self.secure, self._peft_configs = secure, peft_configs or {}
        self.agreement = agreement
        self.last_error: Exception | None = None
        self.last_metrics: dict[str, float] | None = None  # of an update that the reply does not contain
        # The class and the lines of code of each error whose traceback was logged.
        self._logged_errors: set[tuple[Any, ...]] = set()
        self._train_datasets = train_datasets
        self._eval_datasets = eval_datasets
        # By position and name, which is the key of the memory of a client half.
        self._methods = {f"{number} {method.name}": method.on_client() for number, method in enumerate(methods)}
        self._counts_tokens = any(method.counts_tokens for method in methods)
        self._private_models = private_models
        self._config = config
        self._num_rounds = config.num_rounds or 1
        self._postprocessors = postprocessors
        self._callbacks = list(callbacks)
        self._lean = LeanTraining(config.client_optimizer_state == "carry") if config.local_loop == "auto" else None
        self._has_schedule = any(map(follows_steps_of_run, callbacks))
        self._keeps_open = len(train_datasets) <= MAX_OPEN_CLIENTS
        self._open_datasets: dict[str, tuple[Any, bool]] = {}
        # With one client, the global generators are not seeded: the run must equal a run of the plain Trainer.
        self.is_federation = len(train_datasets) > 1 if is_federation is None else is_federation

    @property
    def local_loops(self) -> dict[str, int]:
        """Number of local trainings so far: `"lean"`, and by the reason for the loop of `Trainer`."""
        return {} if self._lean is None else dict(self._lean.counts)

    def handle(self, message: Message) -> Message:
        """
        Answer a message.

        An exception on the client's side is returned as a [`ClientFailure`] without its text, as from a client on
        another machine. It is kept in `last_error`, and its traceback is logged once. Errors of the client store, and
        errors that do not depend on the client, are raised.

        Args:
            message ([`Message`]): A message of the server.

        Returns:
            [`Message`]: The client's reply.

        Raises:
            TypeError: If the message has an unknown type.
        """
        self.last_error, self.last_metrics = None, None
        kept: dict[str, Any] | None = None
        reply: Message
        try:
            if self.agreement is not None:
                self.agreement.check(message)
        except RefusedRequestError as error:
            return self._refuse(message, error)
        key = next((key for key, method in self._methods.items() if isinstance(message, method.messages)), None)
        secure = self.secure if self.secure is not None and isinstance(message, self.secure.requests) else None
        if key is None and secure is None and not isinstance(message, (Fit, Evaluate)):
            own = [kind.__name__ for method in self._methods.values() for kind in method.messages]
            raise TypeError(
                f"The client received a {type(message).__name__}, but it answers only "
                f"{', '.join(['Fit', 'Evaluate', *own])}."
            )
        # The requests that follow a local training need no model.
        model: Any = self.models.open(message.client_id) if secure is None else None
        if self.shards is not None:
            message = model.exchange.shards.shards_of(message)
        try:
            with trainer_banner(shown=False), ExitStack() as closing:
                if secure is not None:
                    reply = secure.answer(message)
                elif isinstance(message, Fit):
                    reply, kept = self._fit(message, model, closing)
                elif isinstance(message, Evaluate):
                    reply = self._evaluate(message, model)
                else:
                    reply, kept = self._answer(message, model, str(key))
        except (ModelMismatchError, PeerFailedError, UnsupportedTrainerError):
            # These errors do not depend on the client. They end the run.
            raise
        except RefusedRequestError as error:
            return self._refuse(message, error)
        except Exception as error:
            self.last_error = error
            self._log_traceback(error, message)
            return ClientFailure(message.round, message.client_id, describe_failure(error), nonce=message.nonce)
        if kept:
            self.models.set_state(message.client_id, kept)
        if self.shards is not None:
            reply = model.exchange.shards.whole(reply, keep=self.shards.rank == 0)
        return reply.with_nonce(message.nonce)

    def _refuse(self, message: Message, error: RefusedRequestError) -> ClientFailure:
        self.last_error = error
        return ClientFailure(message.round, message.client_id, str(error), nonce=message.nonce)

    def _log_traceback(self, error: Exception, message: Message) -> None:
        """Log the traceback of a client's error. An error with the same lines of code is not logged again."""
        frames = traceback.walk_tb(error.__traceback__)
        origin = (type(error), *((frame.f_code.co_filename, number) for frame, number in frames))
        if origin not in self._logged_errors:
            self._logged_errors.add(origin)
            where = f"Client {message.client_id!r} failed in round {message.round + 1}"
            logger.warning(f"{where}:\n{printable_traceback(error)}")

    def _answer(self, message: Message, model: ClientModel, key: str) -> tuple[Message, dict[str, Any] | None]:
        """Answer a message of a method. Return the reply, and the client's new state if it changed."""
        kept = self.models.get_state(message.client_id)
        model.exchange.write_local(kept.get(LOCAL), message.client_id)
        context = self._context(message.client_id, model, kept, key)
        if self.agreement is not None:
            self.agreement.check_tensors(message, model.exchange)
        before = dict(context.memory)
        reply = self._methods[key].client(context).answer(message)
        memory = context.memory
        if memory.keys() == before.keys() and all(memory[name] is before[name] for name in memory):
            return reply, None
        return reply, {**kept, MEMORIES: {**kept.get(MEMORIES, {}), key: memory}}

    def _fit(self, message: Fit, model: ClientModel, closing: ExitStack) -> tuple[Message, dict[str, Any] | None]:
        """Train a client. Return the reply, and the client's new state unless the client has diverged."""
        kept = self.models.get_state(message.client_id)
        before = state_before(kept, message) if isinstance(message, SecureFit) else kept
        contexts = {key: self._context(message.client_id, model, before, key) for key in self._methods}
        parts = [method.client(contexts[key]) for key, method in self._methods.items()]
        for part in parts:
            if type(part).close is not ClientPart.close:
                closing.callback(part.close)
        step_memories = dict(before.get(STEP_MEMORIES, {}))
        if self._postprocessors:
            with refusing(message, "state"):
                message = run_client_receive(self._postprocessors, message, step_memories)
        if self.agreement is not None:
            self.agreement.check_tensors(message, model.exchange)
        secure: Any = self.secure if isinstance(message, SecureFit) else None
        if secure is not None and secure.has_trained(message, has_state_after(kept, message)):
            return secure.begin(message), None
        model.exchange.write_local(before.get(LOCAL), message.client_id)
        try:
            for part in parts:
                part.receive(message)
            state = message.state
            for part in parts:
                if type(part).place is not ClientPart.place:
                    state = part.place(state)
        except ModelMismatchError:
            raise
        except INVALID_CONTENT as error:
            raise refusal_of(error, message, "extra") from error
        if state:
            model.exchange.write(state)
        model.exchange.write_local(before.get(LOCAL), message.client_id)
        with model.restore_on_failure():
            trainer = self._train(message, model, parts, before)
        model.exchange.check_unchanged(model.trainer.model)
        local = model.exchange.read_local()
        update = _update(message, trainer, model.exchange.read() if message.returns_state else {})
        for part in parts:
            update = part.send(update)
            # The trainer refers to the part. Free the tensors of both without a garbage collection.
            part.context.trainer = None
        after = self._state_after(trainer, contexts, local)
        # The server rejects the update of a diverged client. The client then keeps its last finite state, if it keeps
        # anything.
        keeps_state = bool(after or step_memories or self._postprocessors)
        is_finite = not keeps_state or first_non_finite(update.state) is None
        if local and is_finite and (name := first_non_finite(local)) is not None:
            # The server would accept the update.
            raise diverged(name)
        if self._postprocessors:
            update = run_client_send(self._postprocessors, update, message, step_memories)
        if step_memories:
            after[STEP_MEMORIES] = step_memories
        if secure is None:
            return update, after if is_finite else None
        self.last_metrics = update.reported_metrics
        # The training has changed the tensors of an optimizer that the client carries.
        after = with_note(after, message.round, state_before(self.models.get_state(message.client_id), message))
        return secure.begin(message, update, leaves_state=bool(after)), after

    def _state_after(self, trainer: Any, contexts: Mapping[str, ClientContext], local: State) -> dict[str, Any]:
        """Return the state of a client after a local training, without the memories of the postprocessors."""
        training: LocalTraining = trainer.local_training
        scaler, stream = training.scaler, training.stream
        state: dict[str, Any] = {LOCAL: local} if local else {}
        if self._config.client_optimizer_state == "carry":
            state["optimizer"] = optimizer_state_here(trainer.optimizer)
            if scaler is not None:
                state["scaler"] = scaler.state_dict()
        # The optimizer and its schedule form a reference cycle, and lean trainings share an optimizer. Free the
        # moments without a garbage collection.
        trainer.optimizer.state.clear()
        if stream is not None:
            state["stream"] = stream.position()
        # Most clients train in whole epochs, and have no position.
        if (training.sampler_position is not None or training.kept_position) and (kept := training.position_after()):
            state["sampler"] = kept
        if memories := {key: context.memory for key, context in contexts.items() if context.memory}:
            state[MEMORIES] = memories
        return state

    def _context(self, client_id: str, model: ClientModel, kept: Mapping[str, Any], key: str) -> ClientContext:
        """Build the context of the client half of a method."""
        private = self._private_models
        return ClientContext(
            client_id,
            model,
            self._config.federation_seed or 0,
            dict(kept.get(MEMORIES, {}).get(key, {})),
            lambda: self._open_examples(client_id)[0],
            None if private is None else lambda: private(client_id)[:2],
            peft_config=self._peft_configs.get(client_id),
        )

    def _train(self, message: Fit, model: ClientModel, parts: Sequence[ClientPart], kept: Mapping[str, Any]) -> Any:
        outer, args = model.trainer, self._arguments(model)
        has_scaler = outer.accelerator.scaler is not None and outer.accelerator.scaler.is_enabled()
        scaler = ClientScaler(outer.accelerator, kept.get("scaler")) if has_scaler else None
        examples, is_streamed, is_subset = self._select_examples(message)
        stream = ClientStream(message.client_id, examples, kept.get("stream")) if is_streamed else None
        local = LocalTraining(
            round=message.round,
            num_rounds=self._num_rounds,
            global_schedule=self._config.lr_schedule == "global",
            parameters=model.exchange.trainable,
            local_parameters=model.exchange.local_parameters,
            parts=parts,
            optimizer_state=kept.get("optimizer"),
            scaler=scaler,
            stream=stream,
            keeps_position=not is_streamed and not is_subset,
            kept_position=kept.get("sampler"),
        )
        callbacks: list[Any] = [LocalTrainingCallback(message.seed if self.is_federation else None)]
        with_position = self._has_schedule and local.global_schedule
        callbacks += at_round(self._callbacks, message.round, self._num_rounds) if with_position else self._callbacks
        callbacks += [callback for part in parts for callback in part.callbacks]
        own_callbacks = callbacks[1:]
        if scaler is not None:
            callbacks.append(scaler)
        trainer = local_trainer(outer, args, examples if stream is None else stream, local, callbacks)
        for part in parts:
            part.context.trainer = trainer
        with preserved_process_state(outer), preserved_generators() if self.is_federation else nullcontext():
            if self.is_federation:
                # accelerate's sampler reads the global seed when it is built. All clients use the seed of the run.
                seed_torch(args.seed if args.data_seed is None else args.data_seed)
                trainer.data_collator = fresh_collator(trainer.data_collator, message.seed)
            if scaler is not None:
                scaler.install()
            try:
                if self._lean is not None and self._lean.takes(trainer, args, parts, own_callbacks):
                    self._lean.train(trainer, message.seed if self.is_federation else None, own_callbacks)
                else:
                    trainer.train()
            except BaseException as error:
                # An interrupted training does not clean up, and the next client must not see its state.
                if (handle := vars(trainer).get("neftune_hook_handle")) is not None:
                    handle.remove()
                outer.model.zero_grad()
                if (explained := removed_column_error(error, trainer, examples)) is not None:
                    raise explained from error
                raise
            finally:
                if local.sampler_position is not None:
                    local.sampler_position.close()
        if COMPLETIONS in vars(trainer):
            drop_generations(trainer)
        if scaler is not None and scaler.skipped_all(trainer.state.global_step):
            logger.warning_once(ALL_STEPS_SKIPPED)
        return trainer

    def _select_examples(self, message: Fit) -> tuple[Any, bool, bool]:
        """Return the examples of this round, and whether they are a stream, and a random subset of all examples."""
        rows, is_streamed = self._open_examples(message.client_id)
        drawn = None if message.max_rows is None else draw_examples(len(rows), message.max_rows, message.seed)
        if drawn is None:
            return rows, is_streamed, False
        return subset(rows, drawn) if is_map_style(rows) else rows.select(drawn), is_streamed, True

    def _open_examples(self, client_id: str) -> tuple[Any, bool]:
        """Return the examples of a client and whether they are a stream. They stay open in a small federation."""
        if client_id in self._open_datasets:
            return self._open_datasets[client_id]
        rows = self._train_datasets[client_id]
        opened = rows, is_stream(rows)
        if self._keeps_open:
            self._open_datasets[client_id] = opened
        return opened

    def _arguments(self, model: ClientModel) -> TrainingArguments:
        args = client_arguments(model.args, self._config.local_epochs, self._config.local_steps)
        if self._counts_tokens and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "non_padding"
        return args

    def _evaluate(self, message: Evaluate, model: ClientModel) -> Metrics:
        if self._eval_datasets is None or message.client_id not in self._eval_datasets:
            raise ValueError(
                f"Client {message.client_id!r} has no evaluation examples. Add the client to `eval_dataset`. "
                + similar_ids_hint(message.client_id, list(self._eval_datasets or ()))
            )
        dataset = self._eval_datasets[message.client_id]
        if self.agreement is not None:
            self.agreement.check_tensors(message, model.exchange)
        if message.state:
            model.exchange.write(message.state)
        if model.exchange.has_local:
            model.exchange.write_local(self.models.get_state(message.client_id).get(LOCAL), message.client_id)
        return evaluate(model.trainer, self._arguments(model), message, dataset, isinstance(model, OwnModel))


def _update(message: Fit, trainer: Any, state: State) -> ClientUpdate:
    """Return the result of a local training."""
    stream = trainer.local_training.stream
    # The trainers of TRL that generate completions count tokens in the state with every setting. The other trainers of
    # TRL count tokens themselves, and `Trainer` counts tokens if a setting asks for it.
    counted = train_tokens(trainer) if trainer.args.include_num_input_tokens_seen == "no" else None
    return ClientUpdate(
        round=message.round,
        client_id=message.client_id,
        state=state,
        num_examples=len(trainer.train_dataset) if stream is None else stream.num_examples,
        num_tokens=counted or trainer.state.num_input_tokens_seen,
        num_steps=trainer.state.global_step,
        metrics=_training_metrics(trainer),
    )


def _training_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the metrics of a local training: the last entry of the trainer's log that has a loss."""
    metrics = {"total_flos": float(trainer.state.total_flos)}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name, value in (entries[-1] if entries else {}).items():
        if name not in NON_METRIC_KEYS and isinstance(value, (int, float)):
            metrics[name] = float(value)
    return metrics
