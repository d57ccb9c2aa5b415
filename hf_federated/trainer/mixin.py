"""`FederatedMixin`: the overrides that make a trainer federated.

A trainer has one of three roles (`base.py`):

- Without a federation, it behaves as its parent class.
- With a federation, `train()` runs the loop of the parent class, and a step of the loop is a round (`loop_stubs.py`).
- A client is an isolated copy of the trainer that runs `train()` of the parent class on the client's examples
  (`clients/local_training.py`).

The docstring of an override describes the behavior in each role. [`Federation`] does the work of the rounds. Other
overrides are in `evaluation.py`, `saving.py` and `dataset_preparation.py`. `join_mixin.py` has the methods of a client
on another machine.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import TrainOutput

from .._compat import isolate_gradient_state, prepared_objects, set_prepared_objects, set_train_tokens
from ..clients import ClientSpec
from ..clients.local_training import place_schedule
from ..clients.participants import FROM_TASK, EncodedClients, Participants, encode_for_server
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distributed.process_group import fail_together_during_init
from ..engines import Engine
from ..postprocessing import Postprocessor
from ..server.live_report import LiveReport
from ..server.round_loop import SERVER_NAME
from ..tasks import Task
from ..utils.gc import frozen_gc
from ..utils.storage import check_folder
from ..utils.trainer_banner import trainer_banner
from .checkpoint import checkpoint_to_resume, clear_staging, read_server_state, rotate
from .checks.arguments import check_trainer_class
from .checks.data import as_federated_dataset, check_without_examples, example_of_the_format
from .checks.first_round import check_checkpoint_space
from .dataset_preparation import (
    DatasetPlaceholder,
    Preparation,
    PreparedClients,
    PreparingMixin,
    accept_stream,
    constructor_data_error,
)
from .evaluation import EvaluationMixin
from .federation import Federation
from .join_mixin import JoinMixin
from .launch_consistency import check_consistency
from .loop_stubs import RoundDataLoader, RoundsCallback, RoundScheduler, ServerOptimizer, round_arguments
from .optimizer_factories import OptimizerFactories
from .output_lock import output_dir_lock
from .run_recorder import RunRecorder
from .saving import SavingMixin
from .setup import FederationSetup


class FederatedMixin(JoinMixin, EvaluationMixin, SavingMixin, PreparingMixin):
    """Mixin that makes a trainer class federated. Use [`FederatedTrainer`] or [`federate`] instead of this class."""

    data_collator: Any
    lr_scheduler: Any
    neftune_noise_alpha: float | None
    optimizer_cls_and_kwargs: Any

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
        arguments = self._arguments_by_name(args, kwargs)
        train_clients = None if engine is None else engine.remote_clients
        if train_clients is not None:
            check_without_examples(arguments.get("train_dataset"), federation)
        else:
            train_clients = as_federated_dataset(arguments.get("train_dataset"), federation)
        if train_clients is None:
            self._optimizer_factories = OptimizerFactories.take(arguments, accepts_instances=True)
            if self._optimizer_factories.is_empty:
                super().__init__(*args, **kwargs)
            else:
                super().__init__(**arguments)
            return
        participants = Participants(task, public_dataset, server_dataset, dict(clients or {}), client_model_init)
        with fail_together_during_init():
            self._build(arguments, train_clients, federation, engine, postprocessors, client_callbacks, participants)

    def _build(
        self,
        arguments: dict[str, Any],
        clients: FederatedDataset,
        federation: FederatedConfig | None,
        engine: Engine | None,
        postprocessors: Sequence[Postprocessor],
        client_callbacks: Sequence[TrainerCallback],
        participants: Participants,
    ) -> None:
        """Construct a trainer with a federation."""
        check_trainer_class(type(self))
        if isinstance(args := arguments.get("args"), TrainingArguments) and args.should_save and args.output_dir:
            check_folder(args.output_dir)
        user_arguments = dict(arguments)
        self._optimizer_factories = OptimizerFactories.take(arguments, accepts_instances=False)
        user_callbacks = list(arguments.get("callbacks") or [])
        eval_dataset = arguments.get("eval_dataset")
        eval_clients = eval_dataset if isinstance(eval_dataset, FederatedDataset) else None
        if eval_clients is not None:
            arguments["eval_dataset"] = eval_clients.pooled_examples()
        if engine is not None and eval_clients is None:
            # Clients on other machines evaluate on examples that only they have.
            eval_clients = engine.remote_eval_clients
        if participants.task is not None:
            encode_for_server(arguments, participants.task)
        train, evaluation = self._construct_parent(arguments, clients, eval_clients)
        self.train_dataset = clients
        first = {next(iter(clients)): train.prepared} if self.prepares_data() else {}
        self._setup = FederationSetup.build(
            trainer=self,
            config=federation,
            engine=engine,
            clients=clients,
            eval_clients=eval_clients,
            participants=participants,
            user_callbacks=user_callbacks,
            postprocessors=postprocessors,
            arguments={**user_arguments, **{name: arguments[name] for name in FROM_TASK if name in arguments}},
            train_datasets=self._prepared_datasets(train, clients, participants, first),
            eval_datasets=None
            if eval_clients is None
            else self._prepared_datasets(evaluation, eval_clients, participants, {}),
            server_datasets=self._server_datasets(train, participants),
            client_callbacks=[*self._callbacks_of_parent(user_callbacks), *client_callbacks],
        )
        # Processes with different `parallelism` would block at different collective operations.
        check_consistency(self._setup, "construction of the trainer", self.args, None)
        self.add_callback(RoundsCallback(self))
        # Before the callbacks of the user, which may read the log of the run.
        self._recorder = RunRecorder(self)
        self.callback_handler.callbacks.insert(0, self._recorder)
        # Contexts that end when the training is announced.
        self._until_announced = ExitStack()
        self._user_args = self.args
        self._resume_from: str | None = None

    def _construct_parent(
        self, arguments: dict[str, Any], clients: FederatedDataset, eval_clients: FederatedDataset | None
    ) -> tuple[Preparation, Preparation]:
        """Call the constructor of the parent class. Return its preparations of the training and evaluation data."""
        # A constructor that prepares its dataset gets the dataset of one client. The preparation is then repeated for
        # the other clients.
        eval_dataset = arguments.get("eval_dataset")
        if not self.prepares_data():
            train_dataset = DatasetPlaceholder(type(self), clients)
        elif clients.is_remote:
            train_dataset = example_of_the_format(type(self), eval_dataset)
        else:
            train_dataset = clients[next(iter(clients))]
        arguments["train_dataset"] = train_dataset
        preparations = Preparation(train_dataset), Preparation(eval_dataset)
        self._preparations = list(preparations)
        with accept_stream(self, arguments.get("args"), train_dataset):
            super().__init__(**arguments)
        self._preparations = None
        isolate_gradient_state(self.accelerator)
        train, evaluation = preparations
        if not clients.is_remote and not train.take(self.train_dataset):
            raise constructor_data_error(type(self), "the constructor replaced `train_dataset`")
        if eval_clients is not None and not clients.is_remote and not evaluation.take(self.eval_dataset, like=train):
            raise constructor_data_error(type(self), "the constructor replaced `eval_dataset`")
        return preparations

    def _prepared_datasets(
        self,
        preparation: Preparation,
        clients: FederatedDataset,
        participants: Participants,
        prepared: dict[str, Any],
    ) -> Mapping[str, Any]:
        """The clients' datasets, encoded by the task or prepared as the constructor prepares its dataset."""
        if clients.is_remote:
            return clients
        if participants.task is not None:
            return EncodedClients(clients, participants, self.processing_class)
        return PreparedClients(self.args, preparation, clients, prepared) if preparation.steps else clients

    def _server_datasets(self, preparation: Preparation, participants: Participants) -> Mapping[str, Any]:
        """The server's own examples, encoded or prepared like the examples of a client."""
        if not isinstance(participants.server_dataset, Dataset) or not len(participants.server_dataset):
            return {}
        examples = FederatedDataset.from_dict({SERVER_NAME: participants.server_dataset})
        return self._prepared_datasets(preparation, examples, participants, {})

    @property
    def num_dropped_examples(self) -> int | None:
        """
        Number of training examples that the preparation has dropped so far; `None` if it dropped none.

        Clients on other machines announce their numbers, unless they hide them.
        """
        setup = self._federation_setup
        if setup.clients.is_remote:
            return sum(each.num_dropped_examples or 0 for each in setup.engine.announcements.values()) or None
        datasets = setup.train_datasets
        return datasets.num_dropped or None if isinstance(datasets, PreparedClients) else None

    @property
    def has_optimizer_functions(self) -> bool:
        """Whether functions in `optimizers` build the optimizer and the schedule of each client."""
        return not self._optimizer_factories.is_empty

    def as_plain_trainer(self, args: TrainingArguments) -> Any:
        """
        Return a shallow copy that behaves as the parent trainer, also while this trainer runs rounds.

        Args:
            args (`TrainingArguments`): The user's training arguments.

        Returns:
            `transformers.Trainer`: The copy, which shares the model with this trainer.
        """
        plain = copy.copy(self)
        plain._is_federating = False
        plain.args = args
        return plain

    @classmethod
    def _arguments_by_name(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Map the constructor's arguments to names. A constructor with `*args` passes them to its parent class."""
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
            raise TypeError(f"{cls.__name__} got an argument twice or too many arguments. Pass them by keyword.")
        return {**by_position, **kwargs}

    def _callbacks_of_parent(self, user_callbacks: Sequence[TrainerCallback]) -> list[TrainerCallback]:
        """Callbacks that the parent class installed. Its training steps need them inside clients, too."""
        known = [*DEFAULT_CALLBACKS, *get_reporting_integration_callbacks(self.args.report_to)]
        known += [DEFAULT_PROGRESS_CALLBACK, PrinterCallback]
        known += [callback if isinstance(callback, type) else type(callback) for callback in user_callbacks]
        return [callback for callback in self.callback_handler.callbacks if type(callback) not in known]

    # ---- The loop over rounds: overrides of Trainer's public methods

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        Run the rounds of the federation, as `Trainer.train` runs steps.

        As in `Trainer`, a second call continues with the trained model and restarts the schedule. Client states (own
        models, optimizers) are reset.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): As in `Trainer`. A resumed run ends with the same
                weights and checkpoints as an uninterrupted run, bit for bit. A resumed run may change these fields of
                the configuration: `num_rounds`, `min_clients`, `evaluate_clients`, `log_clients`, `report_anomalies`,
                `live_report`, `parallelism`, `local_loop`, `client_store` and `max_resident_clients`.
            trial (`Any`, *optional*): As in `Trainer`. A federation does not support hyperparameter search.
            ignore_keys_for_eval (`list[str]`, *optional*): As in `Trainer`.

        Raises:
            RoundFailedError: If a round got fewer than `min_clients` valid updates.
            LaunchFailedError: If an earlier run over several processes failed. Start the launch again.
            OutputDirInUseError: If another process trains in the output directory.
            ValueError: If the checkpoint belongs to another federation, or a file is missing or damaged.
        """
        setup = self._setup
        if setup is None or self.local_training is not None:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        setup.processes.raise_if_failed()
        for error in setup.deferred_errors:
            raise error
        with (
            setup.processes.fail_together(),
            setup.independent(),
            output_dir_lock(self.args.output_dir, setup.processes),
        ):
            return self._train_rounds(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train_rounds(
        self, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        self._user_args = self.args
        self._resume_from = checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint)
        self._check_manifest(self._resume_from)
        check_checkpoint_space(self, self._federation_setup.num_rounds)
        if self._resume_from is not None:
            read_server_state(self._resume_from, self._federation_setup.files)
        neftune = self.neftune_noise_alpha
        self.neftune_noise_alpha = None
        self._is_federating = True
        try:
            with (
                frozen_gc(),
                self._arguments(round_arguments(self._user_args, self._federation_setup.num_rounds)),
                self._until_announced,
            ):
                # The banner of `Trainer` would describe the loop over rounds.
                self._until_announced.enter_context(trainer_banner(shown=False))
                output = super().train(self._resume_from, trial, ignore_keys_for_eval)
            self._federation_setup.engine.stop()
            if self.args.should_save:
                clear_staging(self.args.output_dir)
                best = self.state.best_model_checkpoint
                rotate(self.args.output_dir, self.args.save_total_limit, best, self.state.global_step)
            # No process reads the output directory before the main process has cleaned it up.
            self._federation_setup.processes.wait("end of training")
            return output
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            reason = "it was interrupted" if is_interrupt else f"{type(error).__name__} on the server"
            self._federation_setup.engine.stop(reason)
            self._recorder.end("interrupted" if is_interrupt else f"failed: {type(error).__name__}: {error}")
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, LiveReport):
                    callback.write()
            raise
        finally:
            self._is_federating = False
            self.neftune_noise_alpha = neftune
            self.is_in_train = False

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Call `Trainer.call_model_init` and freeze parameters of the new model as `freeze` configures."""
        model = super().call_model_init(trial)
        if self._setup is not None:
            self._setup.freeze(model)
        return model

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """
        Run a step of the loop.

        In the loop over rounds, the step is a round. Inside a client, it is the step of the parent class, whose
        gradients the algorithm may change.
        """
        if self._is_federating:
            if self._joined is None:
                summary = self._federation.run_round(self.state.global_step)
            else:
                summary = self._joined.run_round(self.control)
            self.state.num_input_tokens_seen += summary.num_tokens
            set_train_tokens(self, self.state.num_input_tokens_seen)
            if summary.learning_rate is not None:
                self.lr_scheduler.learning_rate = summary.learning_rate
            return torch.tensor(summary.loss, device=self.args.device)
        local = self.local_training
        if local is None:
            return super().training_step(model, inputs, num_items_in_batch)
        local.on_batch(model, inputs, num_items_in_batch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        local.on_gradients(self)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """
        Compute the loss of a batch.

        Inside a client that trains, the algorithm may compute its loss from the loss and the outputs of the parent
        class.
        """
        local = self.local_training
        if local is None or not model.training or not local.changes_loss:
            # A custom `compute_loss` may not accept the argument.
            optional = {"return_outputs": True} if return_outputs else {}
            return super().compute_loss(model, inputs, **optional, **kwargs)
        inputs = local.inputs(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        # The algorithm adds means over this batch, but the trainer may have divided its loss by the size of the step.
        share = local.share_of_step(self, inputs, kwargs.get("num_items_in_batch"))
        loss = local.loss(loss / share, outputs, inputs) * share
        return (loss, outputs) if return_outputs else loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # At the end of a round, the processes can differ: a client trains in one process only, and a time limit passes
        # in one process first.
        if self._is_federating and self._federation_setup.is_spread:
            self._federation.share_decisions(self.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """
        Build the training data loader.

        In the loop over rounds, an epoch has one step. Inside a client, the loader of the parent class counts its
        epochs over the whole run.
        """
        if self._is_federating:
            return RoundDataLoader(sum(number or 0 for number in self.clients.num_rows.values()))
        loader = super().get_train_dataloader()
        return loader if self.local_training is None else self.local_training.count_epochs_over_run(loader, self.args)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple[Any, ...]:
        """Return the lengths of a training. A client that continues in an epoch enters further epochs in its round."""
        num_train_epochs, *lengths = super().set_initial_training_values(args, dataloader)
        if self.local_training is not None and self.local_training.sampler_position is not None:
            num_train_epochs += self.local_training.num_further_epochs
        return (num_train_epochs, *lengths)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        # The parent class builds a new dataset even if there is no column to remove, which takes milliseconds per
        # client.
        columns = self._signature_columns
        if self.local_training is not None and columns is not None and set(dataset.column_names) <= set(columns):
            return dataset
        return super()._remove_unused_columns(dataset, description)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """
        Create the optimizer.

        The loop over rounds gets a stub. Inside a client, the optimizer of the parent class continues with the
        client's optimizer state, if there is one.
        """
        if self._is_federating:
            self.optimizer = ServerOptimizer()
            return self.optimizer
        if not self._optimizer_factories.is_empty:
            self._optimizer_factories.build_optimizer(self, model)
        if self.optimizer_cls_and_kwargs is not None:
            # The parent class removes `params` from the arguments, which the next client needs, too.
            optimizer_class, kwargs = self.optimizer_cls_and_kwargs
            self.optimizer_cls_and_kwargs = (optimizer_class, dict(kwargs))
        # A custom `create_optimizer` may accept no argument and return no value.
        optimizer = super().create_optimizer() if model is None else super().create_optimizer(model)
        if self.local_training is not None:
            self.local_training.start_optimizer(self)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """
        Create the learning rate schedule.

        In the loop over rounds, this method starts the federation and returns a stub. Inside a client, the schedule of
        the parent class continues at the client's position.
        """
        if self._is_federating:
            # accelerate prepared the stub of an optimizer with the model. The stub has no gradients for a scaler.
            self.optimizer = ServerOptimizer()
            models, _, schedulers, loaders = prepared_objects(self.accelerator)
            set_prepared_objects(self.accelerator, (models, [], schedulers, loaders))
            # The model is prepared at this point, so its parameters no longer move.
            self._running = Federation(self._federation_setup, self._user_args, self._resume_from)
            self.lr_scheduler = RoundScheduler(self.args.learning_rate)
            return self.lr_scheduler
        local = self.local_training
        if local is not None and self.is_fsdp_enabled:
            local.restore_groups(self.optimizer)
        length = num_training_steps if local is None else local.num_schedule_steps(num_training_steps)
        if not self._optimizer_factories.is_empty:
            self._optimizer_factories.build_scheduler(self, length, optimizer)
        scheduler = super().create_scheduler(length, optimizer)
        if local is not None:
            place_schedule(self.lr_scheduler, local.schedule_position(num_training_steps))
        return scheduler

    def floating_point_ops(self, inputs: Any) -> int:
        """Count floating point operations. For a round, this is the sum over its clients. A list of examples has 0."""
        if self._is_federating:
            # The parent class adds the counts of all processes. With `parallelism="data"` each process has the whole
            # count, so only one process reports it.
            setup = self._federation_setup
            counts = setup.spreads_clients or setup.processes.is_main
            return int(self._federation.summary.total_flos) if counts else 0
        # A client with its own model has other counts than the model of the federation.
        running = None if self.local_training is None else self._running
        if running is not None and super().floating_point_ops.__func__ is Trainer.floating_point_ops:
            # `Trainer` counts proportionally to the tokens, but counts the parameters again for every batch.
            name = getattr(self.model, "main_input_name", "")
            tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
            return 0 if tokens is None else running.flos_per_token * tokens.numel()
        return super().floating_point_ops(inputs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Call `Trainer.get_decay_parameter_names` once a run instead of once a client, and cache the result."""
        if self.local_training is None or self._running is None:
            return super().get_decay_parameter_names(model)
        if self._running.decay_parameter_names is None:
            self._running.decay_parameter_names = super().get_decay_parameter_names(model)
        return self._running.decay_parameter_names

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as `Trainer.log`, with the entries of a round that the parent class does not compute."""
        if self._is_federating:
            if "loss" in logs:
                logs.pop("grad_norm", None)
                if self._joined is None:
                    if self._federation_setup.secure_aggregation is not None:
                        logs.pop("learning_rate", None)  # The clients hide theirs.
                    logs.update(self._federation.round_logs())
            if "train_runtime" in logs:
                source = self._federation if self._joined is None else self._joined
                logs["train_samples_per_second"] = round(source.examples_seen / logs["train_runtime"], 3)
            if self._user_args.include_num_input_tokens_seen != "no":
                logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the search in a federation, because it would change the loop over rounds and not the clients."""
        if self.federation is not None:
            raise ValueError(
                "hyperparameter_search does not change the arguments of clients. Instead, build a FederatedTrainer "
                "for each trial."
            )
        return super().hyperparameter_search(*args, **kwargs)
