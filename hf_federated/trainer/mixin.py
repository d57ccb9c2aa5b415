"""`FederatedMixin`: the overrides that make a trainer federated.

It plays one of three roles (`roles.py`). Without a federation it is the parent, untouched. With one, `train()` is the
parent's own loop in which a step is a round (`round_steps.py`). A client is an isolated copy that runs the parent's
`train()` on the client's rows (`clients/local_training.py`). Each override says what it does in which role; the work
is in the [`Federation`]. What is saved is in `saving.py`, what a constructor does to rows in `preparation.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import TrainOutput

from ..clients import ClientSpec, fresh_collator
from ..clients.participants import FROM_TASK, EncodedClients, Participants, encode_for_server
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distributed.process_group import fail_together_during_init
from ..engines import Engine
from ..postprocessing import Postprocessor
from ..tasks import Task
from ..utils.gc import frozen_gc
from .checkpoint import checkpoint_to_resume, clear_staging, read_server_state, rotate
from .checks import as_federated_dataset
from .dataset_preparation import Preparation, PreparedClients, PreparingMixin, StandIn, uses_its_data
from .evaluation import can_spread, spread_over_ranks
from .federation import Federation
from .loop_stubs import RoundDataLoader, RoundScheduler, ServerOptimizer, round_arguments
from .saving import SavingMixin
from .setup import FederationSetup


class FederatedMixin(SavingMixin, PreparingMixin):
    """What `federate()` puts before a trainer class. Use [`FederatedTrainer`] or [`federate`]."""

    data_collator: Any
    lr_scheduler: Any
    neftune_noise_alpha: float | None

    def __init__(
        self,
        *args: Any,
        federation: FederatedConfig | None = None,
        engine: Engine | None = None,
        postprocessors: Sequence[Postprocessor] = (),
        client_callbacks: Sequence[TrainerCallback] = (),
        task: Task | None = None,
        public_dataset: Dataset | None = None,
        server_dataset: Dataset | None = None,
        clients: Mapping[str, ClientSpec] | None = None,
        client_model_init: Callable[[str], PreTrainedModel] | None = None,
        **kwargs: Any,
    ) -> None:
        given = self._arguments_by_name(args, kwargs)
        rows = as_federated_dataset(given.get("train_dataset"), federation)
        if rows is None:
            super().__init__(*args, **kwargs)
            return
        participants = Participants(task, public_dataset, server_dataset, dict(clients or {}), client_model_init)
        with fail_together_during_init():
            self._build(given, rows, federation, engine, postprocessors, client_callbacks, participants)

    def _build(
        self,
        given: dict[str, Any],
        clients: FederatedDataset,
        federation: FederatedConfig | None,
        engine: Engine | None,
        postprocessors: Sequence[Postprocessor],
        client_callbacks: Sequence[TrainerCallback],
        participants: Participants,
    ) -> None:
        """The constructor, where there is a federation."""
        arguments = dict(given)
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
        if participants.task is not None:
            encode_for_server(given, participants.task)
        # A constructor that prepares its rows gets one client's, and what it does with them is done with all clients'.
        first = next(iter(clients))
        given["train_dataset"] = clients[first] if self.prepares_data() else StandIn(type(self), clients)
        train, evaluation = Preparation(given["train_dataset"]), Preparation(given.get("eval_dataset"))
        self._preparations = [train, evaluation]
        super().__init__(**given)
        self._preparations = None
        for name, preparation, of_clients in (
            ("train_dataset", train, clients),
            ("eval_dataset", evaluation, eval_clients),
        ):
            if of_clients is not None and getattr(self, name) is not preparation.prepared:
                raise uses_its_data(type(self), f"`{name}` is another one afterwards")
        self.train_dataset = clients
        self._setup = FederationSetup.build(
            trainer=self,
            config=federation,
            engine=engine,
            clients=clients,
            eval_clients=eval_clients,
            participants=participants,
            users_callbacks=users_callbacks,
            postprocessors=postprocessors,
            arguments={**arguments, **{name: given[name] for name in FROM_TASK if name in given}},
            train_datasets=self._as_trained_on(train, clients, participants, {first: train.prepared}),
            eval_datasets=None
            if eval_clients is None
            else self._as_trained_on(evaluation, eval_clients, participants, {}),
            client_callbacks=[*self._parents_own_callbacks(users_callbacks), *client_callbacks],
        )
        self.add_callback(_RoundEndCallback(self))
        self._user_args = self.args
        self._resume_from: str | None = None

    def _as_trained_on(
        self,
        preparation: Preparation,
        clients: FederatedDataset,
        participants: Participants,
        prepared: dict[str, Any],
    ) -> Mapping[str, Any]:
        """The clients' rows as their trainers take them."""
        if participants.task is not None:
            return EncodedClients(clients, participants, self.processing_class)
        return PreparedClients(self, preparation, clients, prepared) if preparation.calls else clients

    def outside_rounds(self, args: TrainingArguments) -> Any:
        """
        This trainer as the parent's, around the same model, whatever it is doing: a shallow copy.

        Args:
            args (`TrainingArguments`): The user's.
        """
        plain = copy.copy(self)
        plain._runs_rounds = False
        plain.args = args
        return plain

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

    # ---- The loop over rounds: overrides of Trainer's public methods

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        `Trainer.train`, over rounds. As there, a second call goes on from the model and begins its schedule anew; what
        clients keep from round to round (models of their own, optimizers) begins anew as well.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): As in Trainer. The run ends in the same bytes as one
                that was never stopped. Of the federation a resume may change `num_rounds`, `min_clients`,
                `evaluate_clients`, `log_clients`, `parallelism` and `client_store`.
            trial (`Any`, *optional*): As in Trainer; hyperparameter search is refused in a federation.
            ignore_keys_for_eval (`list[str]`, *optional*): As in Trainer.

        Raises:
            RoundFailedError: If a round got fewer than `min_clients` valid updates.
            LaunchFailedError: If an earlier run over several processes failed: their launch must be started again.
            ValueError: If the checkpoint is not one of this federation, or not whole.
        """
        setup = self._setup
        if setup is None or self.local_training is not None:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        setup.processes.raise_if_failed()
        with setup.processes.fail_together(), setup.independent():
            return self._train_rounds(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train_rounds(
        self, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        self._user_args = self.args
        self._resume_from = checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint)
        if self._resume_from is not None:
            read_server_state(self._resume_from)
        neftune = self.neftune_noise_alpha
        self.neftune_noise_alpha = None
        self._runs_rounds = True
        try:
            with (
                frozen_gc(),
                self._arguments(round_arguments(self._user_args, self._federation_setup.num_rounds)),
            ):
                output = super().train(self._resume_from, trial, ignore_keys_for_eval)
            if self.args.should_save:
                clear_staging(self.args.output_dir)
                best = self.state.best_model_checkpoint
                rotate(self.args.output_dir, self.args.save_total_limit, best, self.state.global_step)
            # Nobody looks at the output directory before the main process has tidied it up.
            self._federation_setup.processes.wait("end of training")
            return output
        finally:
            self._runs_rounds = False
            self.neftune_noise_alpha = neftune
            self.is_in_train = False

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """`Trainer.call_model_init`; what is frozen is frozen in every model that it builds."""
        model = super().call_model_init(trial)
        if self._setup is not None:
            self._setup.freeze(model)
        return model

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
        if self.local_training is not None:
            self.local_training.on_batch(self, model, inputs, num_items_in_batch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.local_training is not None:
            self.local_training.on_gradients(self)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """`Trainer.compute_loss`. Inside a client that trains: the algorithm's, of the parent's and its outputs."""
        local = self.local_training
        hook = None if local is None or not model.training else local.hook
        if local is None or hook is None or not hook.changes_loss:
            # A user's own may know none of these arguments.
            asked = {"return_outputs": True} if return_outputs else {}
            return super().compute_loss(model, inputs, **asked, **kwargs)
        inputs = hook.inputs(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        # The algorithm adds means over this batch, and the trainer's loss may be divided already.
        share = local.share_of_step(self, inputs, kwargs.get("num_items_in_batch"))
        loss = hook.loss(loss / share, outputs, inputs) * share
        return (loss, outputs) if return_outputs else loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # At the end of a round. A client ends in one process, and a time limit passes in one of them first.
        if self._is_federating and self._federation_setup.is_spread:
            self._federation.share_decisions(self.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Of the loop over rounds: one step an epoch. Inside a client: the parent's, with epochs over the run."""
        if self._is_federating:
            return RoundDataLoader(sum(rows or 0 for rows in self.clients.num_rows.values()))
        loader = super().get_train_dataloader()
        return loader if self.local_training is None else self.local_training.count_epochs_over_run(loader, self.args)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.get_eval_dataloader`. Of several clients, a collator with a seed starts anew in each evaluation."""
        # One client equals the plain Trainer, whose evaluations draw on from where training stands.
        if self._setup is None or len(self.clients) == 1:
            return super().get_eval_dataloader(*args, **kwargs)
        users, self.data_collator = self.data_collator, fresh_collator(self.data_collator)
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = users

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
        local = self.local_training
        if local is not None:
            local.check_optimizer(self)
            if local.optimizer_state is not None:
                self.optimizer.load_state_dict(local.optimizer_state)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Of the loop over rounds: none, but the federation starts here. Inside a client: the parent's."""
        if self._is_federating:
            # The model is prepared by now; its parameters lie where they will stay.
            self._running = Federation(self._federation_setup, self._user_args, self._resume_from)
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
            setup = self._federation_setup
            counts = setup.spreads_clients or setup.processes.is_main
            return int(self._federation.summary.total_flos) if counts else 0
        # A client with a model of its own has no part in what is known of the federation's.
        shares_model = self.local_training is not None and self._running is not None
        if shares_model and super().floating_point_ops.__func__ is Trainer.floating_point_ops:
            # Trainer's count is proportional to the tokens, and it counts the parameters again for every batch.
            tokens = inputs.get(getattr(self.model, "main_input_name", ""))
            return 0 if tokens is None else self._federation.flos_per_token() * tokens.numel()
        return super().floating_point_ops(inputs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """`Trainer.get_decay_parameter_names`, which walks over the model, once a run instead of once a client."""
        if self.local_training is None or self._running is None:
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
        setup = self._setup
        if setup is None or self.local_training is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
        with setup.processes.fail_together(), setup.independent():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
            if eval_dataset is not None or not setup.config.evaluate_clients:
                return metrics
            if self._running is None:
                self._running = Federation(setup, self._user_args, None)
            spread = self._running.evaluate_clients()
            self.log(dict(spread))
            return {**metrics, **spread}

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.predict`. With `parallelism="clients"` the processes share the batches and have all results."""
        if self._setup is None:
            return super().predict(*args, **kwargs)
        with self._setup.independent():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """
        `Trainer.evaluation_loop`. With `parallelism="clients"` each process predicts a share of the batches, and all
        processes compute the metrics of one process from all predictions.
        """
        setup = self._setup
        if setup is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        with setup.independent(as_main=True):
            if not setup.spreads_clients or self.local_training is not None or not can_spread(self, dataloader):
                return super().evaluation_loop(dataloader, *args, **kwargs)
            with spread_over_ranks(self, setup.processes, dataloader) as spread:
                return super().evaluation_loop(spread, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused in a federation: the search would set its values on the loop over rounds and not in the clients."""
        if self.federation is not None:
            raise ValueError("hyperparameter_search does not reach clients: build a FederatedTrainer for each trial.")
        return super().hyperparameter_search(*args, **kwargs)


class _RoundEndCallback(TrainerCallback):
    """Fires `on_round_end`: an epoch of the loop is a round, and ends after logging, evaluating and saving."""

    def __init__(self, trainer: FederatedMixin) -> None:
        self._trainer = trainer

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._federation.end_round()
