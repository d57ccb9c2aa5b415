"""`SplitMixin`: the training loop of `Trainer` over clients that hold the first and last blocks of a language model.

The training loop of `Trainer` is used unchanged. An item of the data loader is an optimizer step: the batches of every
client that takes part (`step_plan.py`). `training_step` trains these clients through their links to the server
(`in_process.py`), and the optimizer clips the gradients and updates all parties (`optimization.py`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import TrainOutput, set_seed
from transformers.utils import logging

from .._compat import isolate_gradient_state
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..security.peer_envelopes import PeerEnvelopes
from ..split.model import SplitModel
from ..trainer.checkpoint import checkpoint_to_resume, clear_staging, rotate
from ..trainer.checks.data import as_federated_dataset
from ..trainer.dataset_preparation import (
    DatasetPlaceholder,
    Preparation,
    PreparedClients,
    PreparingMixin,
    constructor_data_error,
)
from ..trainer.output_lock import output_dir_lock
from .checks import (
    accepts_model_name,
    as_split_model,
    check_averaging_period,
    check_forward,
    check_gradients,
    check_loss,
    check_revision,
    check_sampling,
    check_split_arguments,
    select_own_dataset,
)
from .config import SplitConfig
from .in_process import ClientParty, SplitFederation
from .loading import load_model_by_name
from .networked_checks import check_networked_optimizer
from .networked_client import AnyFederation
from .networked_client_mixin import NetworkedClientMixin
from .optimization import JointOptimizer
from .saving import check_checkpoint, load_parties
from .step_callback import StepCallback, step_arguments
from .step_plan import StepBatches


logger = logging.get_logger(__name__)


class SplitMixin(NetworkedClientMixin, PreparingMixin):
    """
    Mixin that `split_federate()` combines with a trainer class. Use [`SplitFederatedTrainer`] or [`split_federate`].
    """

    _joint_optimizer: JointOptimizer | None = None

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | SplitModel | str | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        split: SplitConfig | None = None,
        envelopes: PeerEnvelopes | None = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.split = SplitConfig() if split is None else split
        if train_dataset is not None and isinstance(model, SplitModel) and model.server_body is None:
            train_dataset = select_own_dataset(model.boundary.client_id, train_dataset)
        clients = None if train_dataset is None else as_federated_dataset(train_dataset, FederatedConfig())
        check_sampling(type(self), SplitMixin)
        check_split_arguments(args, self.split, clients, kwargs)
        eval_dataset = _concatenate_clients(eval_dataset)
        if isinstance(model, str) and accepts_model_name(type(self)):
            check_revision(args, kwargs)
            model = load_model_by_name(model, args, kwargs.pop("quantization_config", None))
            if getattr(args, "model_init_kwargs", None) is not None:
                # The parent class gets a model and would warn that `model_init_kwargs` is ignored.
                args = copy.copy(args)
                vars(args)["model_init_kwargs"] = None
        cut = as_split_model(model, self.split)
        if peft_config is not None:
            set_seed(TrainingArguments.seed if args is None else args.seed)
            cut.add_adapter(peft_config)
        self._construct(cut, clients, kwargs, args=args, data_collator=data_collator, eval_dataset=eval_dataset)
        check_loss(cut, self.args, self.split)
        self.clients = clients
        self.train_dataset = clients
        self.ledger = Ledger()
        self.envelopes = envelopes
        self.networked_run = None
        self._resume_from = None
        self._user_args = self.args
        self.add_callback(StepCallback(self))

    def _construct(
        self, model: SplitModel, clients: FederatedDataset | None, trainer_kwargs: dict[str, Any], **optional: Any
    ) -> None:
        """
        Call the constructor of the parent class, and prepare the dataset of every client as the constructor does.

        Args:
            model ([`SplitModel`]): The model.
            clients ([`FederatedDataset`], *optional*): The training datasets of the clients.
            trainer_kwargs (`dict[str, Any]`): Arguments of the constructor.
            optional: Further arguments of the constructor. `None` selects the default of the parent class.
        """
        dataset: Any = None
        if clients is not None:
            first = next(iter(clients))
            dataset = clients[first] if self.prepares_data() else DatasetPlaceholder(type(self), clients)
        preparation = Preparation(dataset)
        self._preparations = [preparation]
        optional["train_dataset"] = dataset
        given = {name: value for name, value in optional.items() if value is not None}
        super().__init__(model=model, **given, **trainer_kwargs)
        self._preparations = None
        isolate_gradient_state(self.accelerator)
        if not preparation.take(self.train_dataset):
            raise constructor_data_error(type(self), "the constructor replaced `train_dataset`")
        check_forward(type(self), model)
        if clients is not None:
            prepared = {first: preparation.prepared} if self.prepares_data() else {}
            prepared_clients = PreparedClients(self.args, preparation, clients, prepared)
            self._client_datasets = prepared_clients if preparation.steps else clients

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        `Trainer.train`. A step is an optimizer step of the strategy. An epoch is a pass over the examples of all
        clients.

        Each call starts with new optimizers unless it resumes from a checkpoint.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): As in Trainer.
            trial (`Any`, *optional*): As in Trainer.
            ignore_keys_for_eval (`list[str]`, *optional*): As in Trainer.

        Raises:
            OutputDirInUseError: If another process trains in the output directory.
            ValueError: If there is no training dataset, a file of the checkpoint is missing or damaged, or the
                checkpoint belongs to another run.
        """
        if self.clients is None:
            raise ValueError(
                "`train_dataset` is missing. Pass a FederatedDataset, or a mapping of client ids to datasets."
            )
        with output_dir_lock(self.args.output_dir):
            self._user_args = self.args
            self.ledger = Ledger()
            if self.model.server_body is None:
                check_networked_optimizer(self, SplitMixin)
                self._resume_from = self._join(resume_from_checkpoint)
            else:
                self._resume_from = checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint)
                if self._resume_from is not None:
                    check_checkpoint(self._resume_from)
            try:
                with self._arguments(step_arguments(self._user_args)):
                    output = super().train(self._resume_from, trial, ignore_keys_for_eval)
                if self.networked_run is not None and self.state.global_step < self.state.max_steps:
                    logger.warning(
                        f"Training stopped after {self.state.global_step} steps. The server continues without this "
                        "client."
                    )
                    self.networked_run.leave()
                if self.args.should_save:
                    clear_staging(self.args.output_dir)
                    best = self.state.best_model_checkpoint
                    rotate(self.args.output_dir, self._num_kept_checkpoints, best, self.state.global_step)
                return output._replace(training_loss=output.metrics.get("train_loss", output.training_loss))
            except BaseException:
                # Keep the trained parameters of an interrupted run in the model.
                self.sync_model()
                raise
            finally:
                self.active_run = self._joint_optimizer = None
                self._model_is_stale = False
                self.is_in_train = False

    # ---- Steps

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """`Trainer.get_batch_samples`. Target tokens are counted per client in `training_step`."""
        if self.active_run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        return [next(epoch_iterator)], None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create one optimizer per party, and the joint optimizer that steps them together."""
        if not self.is_in_train or self.clients is None:
            return super().create_optimizer() if model is None else super().create_optimizer(model)
        if self.networked_run is not None:
            self.active_run = self.networked_run
        else:
            seed = self.split.resolve_seed(self.args)
            self.active_run = SplitFederation(self.model, list(self.clients), self.split, seed, self.ledger)
        parties = self.active_run.parties
        for party in parties.values():
            self.optimizer = None
            if party.trained_parameters():
                super().create_optimizer(party.module)
                party.optimizer = self.optimizer
        norm = math.sqrt if self.networked_run is None else self.networked_run.shared_norm
        self.optimizer = self._joint_optimizer = JointOptimizer(parties, self._user_args.max_grad_norm, norm)
        return self.optimizer

    def start_training(self) -> None:
        """
        Prepare the first step. If the run resumes from a checkpoint, load the part and the state of every party.

        Raises:
            TypeError: If an overridden `create_optimizer` created no optimizers for the parties.
        """
        federation, optimizer = self.active_run, self._joint_optimizer
        if federation is None or optimizer is None:
            raise TypeError(
                f"{type(self).__name__}.create_optimizer created no optimizers for the parties. Override "
                "create_optimizer in the class that is passed to split_federate(): it is then called once for each "
                "party, with the party's part as `model`."
            )
        check_averaging_period(self.split, self.callback_handler.train_dataloader.dataset, self.state.max_steps)
        if self.networked_run is not None:
            self.networked_run.begin_training(self.state.global_step, self.state.max_steps)
        if self._resume_from is not None:
            join_ledger, self.ledger = self.ledger, load_parties(federation, self._resume_from)
            self.ledger.add(join_ledger)  # the bytes of the messages with which a networked client joined again
            federation.ledger = self.ledger
            optimizer.load_state_dict({})
            # Adapters were loaded into the parties only. Without a remaining step, no step would update the model.
            federation.copy_into_model()
        if self.networked_run is not None:
            self.networked_run.exchange_first_parts(is_resumed=self._resume_from is not None)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run the forward and backward passes of all clients that take part in a step."""
        federation, optimizer = self.active_run, self._joint_optimizer
        if federation is None or optimizer is None:
            return super().training_step(model, inputs, num_items_in_batch)
        batches: StepBatches = inputs
        num_items: dict[str, Any] = {}
        for client_id, client_batches in batches.items():
            num_items[client_id] = super().get_batch_samples(
                iter(client_batches), len(client_batches), self.args.device
            )[1]
            if num_items[client_id] is None and self.split.strategy == "client_batch":
                raise ValueError(
                    f"The batches of client {client_id!r} have no labels to count. The server weights the clients by "
                    "their target tokens. Add `labels`, or use another strategy."
                )
        # Trainers read the mode of `self.model`. `Trainer` sets the mode of the clients' models.
        self.model.train()
        self._model_is_stale = True
        self._count_tokens(batches)
        steps = self.callback_handler.train_dataloader.dataset
        loss = federation.run_step(
            self.state.global_step,
            batches,
            steps.num_examples_of_step(self.state.global_step % len(steps)),
            {client_id: None if count is None else int(count) for client_id, count in num_items.items()},
            functools.partial(self._train_client, federation, num_items),
            optimizer,
        )
        if self.networked_run is None:
            check_gradients(type(self), self.model)
        return loss

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """
        Enable mixed precision for the models of the clients. `Trainer` enables it for the prepared full model only.
        """
        if self.active_run is None:
            return super().autocast_smart_context_manager(cache_enabled)
        return self.accelerator.autocast()

    def _train_client(
        self, federation: AnyFederation, num_items: Mapping[str, Any], client: ClientParty, batches: list[Any]
    ) -> torch.Tensor:
        training_step = super().training_step

        def run(number: int, batch: Any) -> torch.Tensor:
            federation.seed_micro_batch(client.client_id, number)
            self.current_gradient_accumulation_steps = len(batches)
            loss = training_step(client.model, batch, num_items[client.client_id])
            client.model.boundary.finish_backward()
            return loss

        losses = federation.run_micro_batches(
            [functools.partial(run, number, batch) for number, batch in enumerate(batches)]
        )
        client.model.boundary.check_targets()
        return torch.stack(losses).sum()

    def _count_tokens(self, batches: StepBatches) -> None:
        if self._user_args.include_num_input_tokens_seen != "no":
            with self._arguments(self._user_args):
                for batch in itertools.chain(*batches.values()):
                    super()._track_num_input_tokens(batch)

    def end_step(self) -> None:
        """Finish the step after the optimizers: average the parts if the averaging period ends."""
        if self.active_run is not None:
            self.active_run.end_step(self.state.global_step)

    def floating_point_ops(self, inputs: Any) -> int:
        """`Trainer.floating_point_ops`, summed over all batches of a step."""
        if self.active_run is None:
            return super().floating_point_ops(inputs)
        return sum(map(super().floating_point_ops, itertools.chain(*inputs.values())))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """`Trainer.log`, with the norm of the gradients of all parties and the number of transferred bytes."""
        transferred: dict[str, float] = {}
        if self._joint_optimizer is not None and "train_runtime" not in logs:
            transferred = {"federated/bytes_up": self.ledger.bytes_up, "federated/bytes_down": self.ledger.bytes_down}
            logs.update(transferred)
            if "loss" in logs:
                logs["grad_norm"] = self._joint_optimizer.norm
        if self.networked_run is not None:
            self.networked_run.replace_logged_losses(logs)
        # The training arguments decide whether token counts are logged; this loop does not count tokens.
        with self._arguments(self._user_args):
            super().log(logs, start_time)
        # An evaluation returns `logs`. The transferred bytes are not evaluation metrics.
        for name in transferred:
            del logs[name]

    # ---- Evaluation

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """`Trainer.evaluate`. A [`FederatedDataset`] is evaluated as one dataset."""
        self.sync_model()
        return super().evaluate(_concatenate_clients(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.predict`. A [`FederatedDataset`] is predicted as one dataset."""
        self.sync_model()
        return super().predict(_concatenate_clients(test_dataset), *args, **kwargs)


def _concatenate_clients(dataset: Any) -> Any:
    if isinstance(dataset, dict):
        return {name: _concatenate_clients(value) for name, value in dataset.items()}
    return dataset.to_dataset() if isinstance(dataset, FederatedDataset) else dataset
