"""`FederatedMixin`: the overrides that make a trainer federated.

It plays one of three roles. Without a federation it is the parent, untouched. With one, `train()` is the parent's
own loop in which a step is a round (`round_steps.py`). A client is an isolated copy that runs the parent's `train()`
on the client's rows (`clients/local_training.py`). Each override says what it does in which role; the work is in the
[`FederationRuntime`].
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import TrainOutput

from .adapters import Exchange
from .aggregation import Aggregation
from .cards import render_model_card
from .checkpoint import clear_staging, list_checkpoints, publish, read_server_state, rotate, staged_directory
from .checks import as_federated_dataset
from .clients.local_training import LocalTraining
from .config import FederatedConfig
from .data import FederatedDataset
from .engines import Engine
from .ledger import Ledger
from .postprocessing import Postprocessor
from .preparation import Preparation, PreparedClients, PreparingMixin
from .round_steps import RoundDataLoader, RoundScheduler, ServerOptimizer, round_arguments
from .runtime import FederationRuntime


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class FederatedMixin(PreparingMixin, _Base):
    """What `federate()` puts before a trainer class. Use [`FederatedTrainer`] or [`federate`]."""

    args: TrainingArguments
    lr_scheduler: Any
    neftune_noise_alpha: float | None
    _runtime: FederationRuntime | None = None
    _runs_rounds: bool = False
    # Set on the isolated copy that trains one client.
    local_training: LocalTraining | None = None

    def __init__(
        self,
        *args: Any,
        federation: FederatedConfig | None = None,
        postprocessors: Sequence[Postprocessor] = (),
        client_callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ) -> None:
        given = self._arguments_by_name(args, kwargs)
        clients = as_federated_dataset(given.get("train_dataset"), federation)
        if clients is None:
            super().__init__(*args, **kwargs)
            return
        if any(part is not None for part in given.get("optimizers") or ()):
            raise ValueError(
                "`optimizers=` holds one optimizer, and every client needs its own: use `optim` and `learning_rate` "
                "of the arguments, `optimizer_cls_and_kwargs`, or override `create_optimizer`."
            )
        users_callbacks = list(given.get("callbacks") or [])
        eval_dataset = given.get("eval_dataset")
        eval_clients = eval_dataset if isinstance(eval_dataset, FederatedDataset) else None
        if eval_clients is not None:
            given["eval_dataset"] = eval_clients.to_dataset()
        # A constructor that prepares its rows gets one client's, and what it does with them is done with all clients'.
        first = next(iter(clients))
        given["train_dataset"] = clients[first] if self.prepares_data() else None
        train, evaluation = Preparation(given["train_dataset"]), Preparation(given.get("eval_dataset"))
        self._preparations = [train, evaluation]
        super().__init__(**given)
        self._preparations = None
        self.train_dataset = clients
        self._runtime = FederationRuntime(
            trainer=self,
            clients=clients,
            eval_clients=eval_clients,
            train_datasets=PreparedClients(self, train, clients, {first: train.prepared}) if train.calls else clients,
            eval_datasets=PreparedClients(self, evaluation, eval_clients)
            if evaluation.calls and eval_clients is not None
            else eval_clients,
            config=federation,
            users_callbacks=users_callbacks,
            postprocessors=postprocessors,
            client_callbacks=[*self._parents_own_callbacks(users_callbacks), *client_callbacks],
        )
        self.add_callback(_RoundEndCallback(self._runtime))
        self._user_args = self.args
        self._resume_from: str | None = None

    @classmethod
    def _arguments_by_name(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The parent's arguments by name. A constructor that takes `*args` hands them on to its own parent's."""
        names: list[str] = []
        for base in cls.__mro__[cls.__mro__.index(FederatedMixin) + 1 :]:
            if "__init__" not in vars(base):
                continue
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            names += [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
            if not any(item.kind is item.VAR_POSITIONAL for item in parameters):
                break
        by_position = dict(zip(names, args, strict=False))
        if len(args) > len(names) or not by_position.keys().isdisjoint(kwargs):
            raise TypeError(f"{cls.__name__} got an argument twice or too many of them: give them by name.")
        return {**by_position, **kwargs}

    def _parents_own_callbacks(self, users_callbacks: Sequence[TrainerCallback]) -> list[TrainerCallback]:
        """Callbacks that the parent trainer installed for itself, which its steps rely on inside clients too."""
        known = [*DEFAULT_CALLBACKS, *get_reporting_integration_callbacks(self.args.report_to)]
        known += [DEFAULT_PROGRESS_CALLBACK, PrinterCallback]
        known += [callback if isinstance(callback, type) else type(callback) for callback in users_callbacks]
        return [callback for callback in self.callback_handler.callbacks if type(callback) not in known]

    # ---- What a federation adds to a trainer's attributes

    @property
    def federation(self) -> FederatedConfig | None:
        """The configuration, with `num_rounds` and the seed filled in; `None` without a federation."""
        return None if self._runtime is None else self._runtime.config

    @property
    def _federation(self) -> FederationRuntime:
        if self._runtime is None:
            raise AttributeError("This trainer has no federation: give it `federation=` or a FederatedDataset.")
        return self._runtime

    @property
    def clients(self) -> FederatedDataset:
        """The clients' training rows."""
        return self._federation.clients

    @property
    def eval_clients(self) -> FederatedDataset | None:
        """The clients' evaluation rows, if `eval_dataset` was a [`FederatedDataset`]."""
        return self._federation.eval_clients

    @property
    def postprocessors(self) -> list[Postprocessor]:
        """The steps between a client's training and the aggregate."""
        return self._federation.postprocessors

    @property
    def exchange(self) -> Exchange:
        """What of the model travels."""
        return self._federation.exchange

    @property
    def run_args(self) -> TrainingArguments:
        """The user's arguments, also while rounds run and `args` are those of the loop over rounds."""
        return self._user_args

    @property
    def aggregation(self) -> Aggregation:
        """The averaging algorithm."""
        return self._federation.aggregation

    @property
    def engine(self) -> Engine:
        """Where the clients run; built when training or evaluation starts."""
        return self._federation.loop.engine

    @property
    def ledger(self) -> Ledger:
        """Bytes per client and round."""
        return self._federation.ledger

    @property
    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Each client's metrics of the last evaluation with `evaluate_clients=True`."""
        return self._federation.client_metrics

    @property
    def _is_federating(self) -> bool:
        """Whether this is the loop over rounds, and not a client inside it."""
        return self._runs_rounds and self.local_training is None

    # ---- The loop over rounds: overrides of Trainer's public methods

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        `Trainer.train`, over rounds.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): As in Trainer. The run ends in the same bytes as one
                that was never stopped.
            trial (`Any`, *optional*): As in Trainer; hyperparameter search is refused in a federation.
            ignore_keys_for_eval (`list[str]`, *optional*): As in Trainer.

        Raises:
            RoundFailedError: If a round got fewer than `min_clients` valid updates.
            ValueError: If the checkpoint is not one of a federation.
        """
        runtime = self._runtime
        if runtime is None or self.local_training is not None:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        with runtime.processes.shared_fate(), runtime.alone():
            return self._train_rounds(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train_rounds(
        self, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        self._user_args = self.args
        self._resume_from = self._checkpoint_to_resume(resume_from_checkpoint)
        neftune = self.neftune_noise_alpha
        self.neftune_noise_alpha = None
        # Every `train()` of a client collects garbage; what exists by now need not be looked at each time.
        gc.collect()
        gc.freeze()
        self._runs_rounds = True
        try:
            with self._arguments(round_arguments(self._user_args, self._federation.num_rounds)):
                output = super().train(self._resume_from, trial, ignore_keys_for_eval)
            if self.args.should_save:
                clear_staging(self.args.output_dir)
                rotate(self.args.output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
            return output
        finally:
            self._runs_rounds = False
            self.neftune_noise_alpha = neftune
            self.is_in_train = False
            gc.unfreeze()

    def _checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        if not resume_from_checkpoint:
            return None
        if resume_from_checkpoint is True:
            checkpoints = list_checkpoints(self.args.output_dir)
            if not checkpoints:
                raise ValueError(f"No checkpoint found in the output directory {self.args.output_dir!r}.")
            resume_from_checkpoint = os.fspath(checkpoints[-1])
        read_server_state(resume_from_checkpoint)
        return resume_from_checkpoint

    @contextmanager
    def _arguments(self, args: TrainingArguments) -> Iterator[None]:
        """Other arguments for a while."""
        before, self.args = self.args, args
        try:
            yield
        finally:
            self.args = before

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Of the loop over rounds: a round. Inside a client: the parent's step and the algorithm's gradients."""
        if self._is_federating:
            summary = self._federation.run_round(self.state.global_step)
            self.state.num_input_tokens_seen += summary.num_tokens
            if summary.learning_rate is not None:
                self.lr_scheduler.learning_rate = summary.learning_rate
            return torch.tensor(summary.loss, device=self.args.device)
        loss = super().training_step(model, inputs, num_items_in_batch)
        local = self.local_training
        if local is not None and local.hook is not None and self.accelerator.sync_gradients:
            local.hook.on_gradients(local.parameters)
        return loss

    def get_train_dataloader(self) -> Any:
        """Of the loop over rounds: one step an epoch. Inside a client: the parent's, with epochs over the run."""
        if self._is_federating:
            return RoundDataLoader(sum(rows or 0 for rows in self.clients.num_rows.values()))
        loader = super().get_train_dataloader()
        return loader if self.local_training is None else self.local_training.count_epochs_over_run(loader, self.args)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        # The parent's builds another data set even when there is nothing to remove, which takes a client milliseconds.
        columns = self._signature_columns
        if self.local_training is not None and columns is not None and set(dataset.column_names) <= set(columns):
            return dataset
        return super()._remove_unused_columns(dataset, description)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Of the loop over rounds: none. Inside a client: the parent's, carried on."""
        if self._is_federating:
            self.optimizer = ServerOptimizer()
            return self.optimizer
        # A user's override may know neither the argument nor the return value.
        optimizer = super().create_optimizer() if model is None else super().create_optimizer(model)
        if self.local_training is not None and self.local_training.optimizer_state is not None:
            self.optimizer.load_state_dict(self.local_training.optimizer_state)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Of the loop over rounds: none, but the federation starts here. Inside a client: the parent's."""
        if self._is_federating:
            # The model is prepared by now; its parameters lie where they will stay.
            self._federation.start(self._user_args, self._resume_from)
            self.lr_scheduler = RoundScheduler(self.args.learning_rate)
            return self.lr_scheduler
        local = self.local_training
        if local is None:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = super().create_scheduler(local.num_schedule_steps(num_training_steps), optimizer)
        local.place_schedule(self.lr_scheduler, num_training_steps)
        return scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Of a round: what its clients counted."""
        if self._is_federating:
            # With `parallelism="data"` the parent adds up what the processes say, and each knows the sum.
            runtime = self._federation
            return int(runtime.summary.total_flos) if runtime.spreads_clients or runtime.processes.is_main else 0
        if self.local_training is not None and super().floating_point_ops.__func__ is Trainer.floating_point_ops:
            # Trainer's count is proportional to the tokens, and it counts the parameters again for every batch.
            tokens = inputs.get(getattr(self.model, "main_input_name", ""))
            return 0 if tokens is None else self._federation.flos_per_token() * tokens.numel()
        return super().floating_point_ops(inputs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """`Trainer.get_decay_parameter_names`, which walks over the model, once a run instead of once a client."""
        if self.local_training is None:
            return super().get_decay_parameter_names(model)
        names = self._federation.decay_parameter_names
        if names is None:
            names = self._federation.decay_parameter_names = super().get_decay_parameter_names(model)
        return names

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """`Trainer.log`, with what the parent could not know of a round."""
        if self._is_federating:
            if "loss" in logs:
                logs.pop("grad_norm", None)
                logs.update(self._federation.round_logs())
            if "train_runtime" in logs:
                logs["train_samples_per_second"] = round(self._federation.examples_seen / logs["train_runtime"], 3)
            if self._user_args.include_num_input_tokens_seen != "no":
                logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> dict[str, float]:
        """
        `Trainer.evaluate`, and with `evaluate_clients=True` each client's own evaluation.

        A [`FederatedDataset`] is evaluated as all its rows together. What the parent's `evaluate` takes beyond these
        arguments (`max_length` of `Seq2SeqTrainer`) goes to it.

        Returns:
            `dict[str, float]`: The parent's metrics of all rows together; beside them, of the clients' own metrics,
            `federated/<metric>_mean`, `_worst`, `_best` and `_spread` (population standard deviation). Each client's
            are in `client_metrics`.
        """
        if isinstance(eval_dataset, FederatedDataset):
            eval_dataset = eval_dataset.to_dataset()
        runtime = self._runtime
        if runtime is None or self.local_training is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
        with runtime.processes.shared_fate(), runtime.alone():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
            if eval_dataset is not None or not runtime.config.evaluate_clients:
                return metrics
            spread = runtime.evaluate_clients(self._user_args)
            self.log(dict(spread))
            return {**metrics, **spread}

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.predict`. With `parallelism="clients"` every process predicts all rows."""
        if self._runtime is None:
            return super().predict(*args, **kwargs)
        with self._runtime.alone():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`. With `parallelism="clients"` every process goes over all rows."""
        # So that metrics are those of one process, in every process: a loss averaged over processes is another one.
        if self._runtime is None:
            return super().evaluation_loop(*args, **kwargs)
        with self._runtime.alone(as_main=True):
            return super().evaluation_loop(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused in a federation: the search would set its values on the loop over rounds and not in the clients."""
        if self.federation is not None:
            raise ValueError("hyperparameter_search does not reach clients: build a FederatedTrainer for each trial.")
        return super().hyperparameter_search(*args, **kwargs)

    # ---- What is saved

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model`; `federated_config.json` and the ledger lie beside the global model."""
        if self.federation is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.args.should_save:
            self.federation.save_pretrained(output_dir)
            self.ledger.save(output_dir)
        with self._arguments(self._user_args):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The parent's checkpoint and the federation's state, written aside and put in place by one rename."""
        if not self._is_federating:
            super()._save_checkpoint(model, trial)
            return
        final = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        # The best model may be this very checkpoint, of which the parent would record the temporary path.
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = os.fspath(final)
        best = self.state.best_model_checkpoint
        runtime = self._federation
        processes = runtime.processes
        with staged_directory(self.args.output_dir, create=processes.is_main) as staging:
            processes.wait()  # For the directory.
            staged_args = copy.copy(self.args)
            staged_args.output_dir = os.fspath(staging)
            staged_args.push_to_hub = False
            if processes.is_main or not runtime.spreads_clients:
                with self._arguments(staged_args):
                    super()._save_checkpoint(model, trial)
            else:
                self.store_flos()
            staged = staging / final.name
            self.state.best_model_checkpoint = best
            if processes.is_main:
                self.state.save_to_json(os.fspath(staged / "trainer_state.json"))
                if not self.args.save_only_model:
                    runtime.save(staged)
            processes.wait()  # For the room made for clients.
            if not self.args.save_only_model:
                runtime.save_clients(staged)
            processes.wait()  # For all clients' files.
            if processes.is_main:
                publish(staged, final)
                rotate(self.args.output_dir, self._user_args.save_total_limit, best)
            processes.wait()  # For the finished checkpoint, which anyone may want to load.
        if self.args.push_to_hub:
            with self._arguments(self._user_args):
                self._push_from_checkpoint(os.fspath(final))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # PEFT saves prompt-learning adapters materialised; the trainable values come with the server's state.
        if not self._is_federating or not isinstance(self.model, PeftModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._is_federating or not isinstance(self.model, PeftModel) or self.args.save_only_model:
            super()._load_best_model()
            return
        self._federation.load_weights(self.state.best_model_checkpoint)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """`Trainer.create_model_card`; of a federation, a card that tells what the run logged."""
        arguments: dict[str, Any] = {
            "language": language,
            "license": license,
            "tags": tags,
            "model_name": model_name,
            "finetuned_from": finetuned_from,
            "tasks": tasks,
            "dataset_tags": dataset_tags,
            "dataset": dataset,
            "dataset_args": dataset_args,
        }
        if self.federation is None:
            super().create_model_card(**arguments)
            return
        if self.is_world_process_zero():
            card = render_model_card(self, **arguments)
            card.save(os.path.join(self._user_args.output_dir, "README.md"))


class _RoundEndCallback(TrainerCallback):
    """Fires `on_round_end`: an epoch of the loop is a round, and ends after logging, evaluating and saving."""

    def __init__(self, runtime: FederationRuntime) -> None:
        self._runtime = runtime

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._runtime.fire("on_round_end")
