"""`SplitMixin`: the loop of `Trainer` over clients that hold the first and last blocks of a language model.

It is `Trainer`'s own loop. An item of its loader is an optimizer step: the batches of every client that takes part
(`step_plan.py`). `training_step` trains these clients through their links to the server (`in_process.py`), and the
optimizer clips and steps all parties (`optimization.py`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput, set_seed
from transformers.utils import logging

from ..config import FederatedConfig
from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..security.envelope import PeerEnvelopes
from ..split.model import SplitModel
from ..trainer.checkpoint import checkpoint_to_resume, clear_staging, rotate
from ..trainer.checks import as_federated_dataset
from ..trainer.dataset_preparation import Preparation, PreparedClients, PreparingMixin, StandIn, uses_its_data
from .checks import (
    as_split_model,
    check_forward,
    check_gradients,
    check_loss,
    check_networked_optimizer,
    check_revision,
    check_sampling,
    check_split_arguments,
    loads_by_name,
    own_rows,
)
from .config import SplitConfig
from .in_process import ClientParty, SplitFederation
from .loading import load_named_model
from .networked_client import JoiningMixin
from .optimization import JointOptimizer
from .saving import check_checkpoint, load_parties
from .step_plan import SplitSteps, StepBatches, only_item


logger = logging.get_logger(__name__)


class SplitMixin(JoiningMixin, PreparingMixin):
    """What `split_federate()` puts before a trainer class. Use [`SplitFederatedTrainer`] or [`split_federate`]."""

    _joint_optimizer: JointOptimizer | None = None
    _signature_columns: list[str] | None

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
            train_dataset = own_rows(model.boundary.client_id, train_dataset)
        clients = None if train_dataset is None else as_federated_dataset(train_dataset, FederatedConfig())
        check_sampling(type(self), SplitMixin)
        check_split_arguments(args, self.split, clients, kwargs)
        eval_dataset = _rows_together(eval_dataset)
        if isinstance(model, str) and loads_by_name(type(self)):
            check_revision(args, kwargs)
            model = load_named_model(model, args, kwargs.pop("quantization_config", None))
            if getattr(args, "model_init_kwargs", None) is not None:
                # A parent that is given a model would warn that they are ignored.
                args = copy.copy(args)
                vars(args)["model_init_kwargs"] = None
        cut = as_split_model(model, self.split)
        if peft_config is not None:
            set_seed(TrainingArguments.seed if args is None else args.seed)
            cut.add_adapter(peft_config)
        self._construct(cut, args, data_collator, clients, eval_dataset, kwargs)
        check_loss(cut, self.args, self.split)
        self.clients = clients
        self.train_dataset = clients
        self.ledger = Ledger()
        self._envelopes = envelopes
        self._remote = None
        self._resume_from = None
        self._user_args = self.args
        self.add_callback(_StepEnd(self))

    def _construct(
        self,
        model: SplitModel,
        args: TrainingArguments | None,
        data_collator: Any,
        clients: FederatedDataset | None,
        eval_dataset: Any,
        others: dict[str, Any],
    ) -> None:
        """The parent's constructor. What it does to one client's rows is done to those of all."""
        rows: Any = None
        if clients is not None:
            first = next(iter(clients))
            rows = clients[first] if self.prepares_data() else StandIn(type(self), clients)
        preparation = Preparation(rows)
        self._preparations = [preparation]
        given = {"args": args, "data_collator": data_collator, "train_dataset": rows, "eval_dataset": eval_dataset}
        super().__init__(model=model, **{name: own for name, own in given.items() if own is not None}, **others)
        self._preparations = None
        if self.train_dataset is not preparation.prepared:
            raise uses_its_data(type(self), "`train_dataset` is another one afterwards")
        check_forward(type(self), model)
        if clients is not None:
            prepared = {first: preparation.prepared}
            self._rows = PreparedClients(self, preparation, clients, prepared) if preparation.calls else clients

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        `Trainer.train`: a step is an optimizer step of the strategy, an epoch a pass over every client's rows. Called
        again, it begins with new optimizers.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): As in Trainer.
            trial (`Any`, *optional*): As in Trainer.
            ignore_keys_for_eval (`list[str]`, *optional*): As in Trainer.

        Raises:
            ValueError: If there are no rows to train on, or the checkpoint is not one of this run or not whole.
        """
        if self.clients is None:
            raise ValueError("Training needs a `train_dataset`: a FederatedDataset, or client ids with their rows.")
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
            if self._remote is not None and self.state.global_step < self.state.max_steps:
                logger.warning(f"Stopped after {self.state.global_step} steps: the run ends here for all clients.")
                self._remote.leave()
            if self.args.should_save:
                clear_staging(self.args.output_dir)
                best = self.state.best_model_checkpoint
                rotate(self.args.output_dir, self._kept_checkpoints, best, self.state.global_step)
            return output._replace(training_loss=output.metrics.get("train_loss", output.training_loss))
        except BaseException:
            # Of a run that is interrupted, too, the model is what was trained until then.
            self.catch_up()
            raise
        finally:
            self._federation = self._joint_optimizer = None
            self._is_behind = False
            self.is_in_train = False

    # ---- What Trainer's loop goes over

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One item an optimizer step: the batches of every client that takes part."""
        assert self.clients is not None
        rows: dict[str, Any] = {}
        collate: dict[str, Any] = {}
        try:
            for client_id in self.clients:
                self.train_dataset = self._rows[client_id]
                if not len(self.train_dataset):
                    raise ValueError(f"{type(self).__name__} leaves no row of client {client_id!r} to train on.")
                loader = super().get_train_dataloader()
                rows[client_id], collate[client_id] = loader.dataset, loader.collate_fn
        finally:
            self.train_dataset = self.clients
        args = self._user_args
        steps = SplitSteps(
            rows,
            collate,
            args.train_batch_size,
            args.gradient_accumulation_steps,
            together=self.split.strategy != "serial",
            steps_per_turn=self.split.steps_per_turn,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            steps_of=None if self._remote is None else self._remote.steps_of,
        )
        workers = args.dataloader_num_workers
        return self.accelerator.prepare(
            DataLoader(
                steps,
                batch_size=1,
                collate_fn=only_item,
                num_workers=workers,
                prefetch_factor=args.dataloader_prefetch_factor if workers else None,
                pin_memory=args.dataloader_pin_memory,
            )
        )

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Rows of a loader: of the training one those of all clients."""
        steps = dataloader.dataset
        return steps.num_rows if isinstance(steps, SplitSteps) else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of a step in which every client takes part that may."""
        rows = super().get_total_train_batch_size(self._user_args)
        if self.clients is None or self.split.strategy == "serial":
            return rows
        return rows * len(self.clients)

    def _set_signature_columns_if_needed(self) -> None:
        # Columns that the whole model takes and a split one has not are refused by name, and not dropped.
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            whole = inspect.signature(self.model.client_tail.model.forward)
            self._signature_columns = list(dict.fromkeys([*(self._signature_columns or []), *whole.parameters]))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """`Trainer.get_batch_samples`; of a step, target tokens are counted for each client."""
        if self._federation is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        return [next(epoch_iterator)], None

    # ---- The step

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """One optimizer for each party, which step together."""
        if not self.is_in_train or self.clients is None:
            return super().create_optimizer() if model is None else super().create_optimizer(model)
        if self._remote is not None:
            self._federation = self._remote
        else:
            seed = self.split.seed_of(self.args)
            self._federation = SplitFederation(self.model, list(self.clients), self.split, seed, self.ledger)
        parties = self._federation.parties
        for party in parties.values():
            self.optimizer = None
            if party.trained():
                super().create_optimizer(party.module)
                party.optimizer = self.optimizer
        norm = math.sqrt if self._remote is None else self._remote.shared_norm
        self.optimizer = self._joint_optimizer = JointOptimizer(parties, self._user_args.max_grad_norm, norm)
        return self.optimizer

    def begin(self) -> None:
        """
        Before the first step: give every party the part and state that it had, where a checkpoint is resumed.

        Raises:
            TypeError: If an overridden `create_optimizer` made no party's optimizer.
        """
        if self._federation is None:
            raise TypeError(
                f"{type(self).__name__}.create_optimizer gives the parties no optimizers: override it in the class "
                "that split_federate() takes, where it is called for each party with its part as `model`."
            )
        self._check_means()
        if self._remote is not None:
            self._remote.max_steps, self._remote.step = self.state.max_steps, self.state.global_step
        if self._resume_from is not None:
            joined, self.ledger = self.ledger, load_parties(self._federation, self._resume_from)
            self.ledger.add(joined)  # of a networked run: to join it once more
            self._federation.ledger = self.ledger
            assert self._joint_optimizer is not None
            self._joint_optimizer.load_state_dict({})
            # Adapters came to the parties alone, and there may be no step left that the model would catch up with.
            self._federation.copy_into_model()
            if self._remote is not None:
                # What was on its way when the run broke off.
                self._remote.hand_over()
                if self.state.global_step >= self.state.max_steps:
                    self._remote.finish()

    def _check_means(self) -> None:
        """Warn where averages are of one client's parts alone, which then are handed over in effect."""
        every, steps = self.split.average_every, self.callback_handler.train_dataloader.dataset
        if every is None or steps.num_clients == 1:
            return
        alone, periods = steps.periods_of_one(every, self.state.max_steps)
        if alone > periods / 2:
            logger.warning(
                f"With average_every={every} one client alone trains between one average and the next in {alone} of "
                f"{periods} periods of an epoch, so that its parts are handed over and nothing is averaged: lower "
                "steps_per_turn, or raise average_every."
            )

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The forward and backward passes of everybody who takes part in a step."""
        federation = self._federation
        if federation is None:
            return super().training_step(model, inputs, num_items_in_batch)
        batches: StepBatches = inputs
        num_items: dict[str, Any] = {}
        for client_id, own in batches.items():
            num_items[client_id] = super().get_batch_samples(iter(own), len(own), self.args.device)[1]
            if num_items[client_id] is None and self.split.strategy == "client_batch":
                raise ValueError(
                    f"The batches of client {client_id!r} have no labels to count, by which the server weighs the "
                    "clients of a step: give `labels`, or use another strategy."
                )
        assert self._joint_optimizer is not None
        # Of what is evaluated, a trainer asks whether it trains; clients' models have that from `Trainer`.
        self.model.train()
        self._is_behind = True
        self._count_tokens(batches)
        steps = self.callback_handler.train_dataloader.dataset
        loss = federation.run_step(
            self.state.global_step,
            batches,
            steps.rows_of_step(self.state.global_step % len(steps)),
            {client_id: None if number is None else int(number) for client_id, number in num_items.items()},
            lambda client, own: self._train_client(client, own, num_items[client.client_id]),
            self._joint_optimizer,
        )
        if self._remote is None:
            check_gradients(type(self), self.model)
        return loss

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """`Trainer` leaves mixed precision to what it prepared, the whole model: clients' own are entered here."""
        if self._federation is None:
            return super().autocast_smart_context_manager(cache_enabled)
        return self.accelerator.autocast()

    def _train_client(self, client: ClientParty, batches: list[Any], num_items: torch.Tensor | int | None) -> Any:
        losses = []
        for batch in batches:
            self.current_gradient_accumulation_steps = len(batches)
            losses.append(super().training_step(client.model, batch, num_items))
            client.model.boundary.finish_backward()
        client.model.boundary.check_targets()
        return torch.stack(losses).sum()

    def _count_tokens(self, batches: StepBatches) -> None:
        if self._user_args.include_num_input_tokens_seen != "no":
            with self._arguments(self._user_args):
                for own in batches.values():
                    for batch in own:
                        super()._track_num_input_tokens(batch)

    def end_step(self) -> None:
        """What comes after everybody's optimizers: averaging, where it is time."""
        if self._federation is not None:
            self._federation.end_step(self.state.global_step)

    def floating_point_ops(self, inputs: Any) -> int:
        """`Trainer.floating_point_ops`, of a step those of all its batches."""
        if self._federation is None:
            return super().floating_point_ops(inputs)
        return sum(super(SplitMixin, self).floating_point_ops(batch) for own in inputs.values() for batch in own)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """`Trainer.log`, with the norm of all parties' gradients and the bytes that crossed until then."""
        crossed: dict[str, float] = {}
        if self._joint_optimizer is not None and "train_runtime" not in logs:
            crossed = {"federated/bytes_up": self.ledger.bytes_up, "federated/bytes_down": self.ledger.bytes_down}
            logs.update(crossed)
            if "loss" in logs:
                logs["grad_norm"] = self._joint_optimizer.norm
        if self._remote is not None:
            self._remote.own_losses(logs)
        # Of the user's arguments it depends whether tokens are logged, which the loop does not count.
        with self._arguments(self._user_args):
            super().log(logs, start_time)
        # What parents add is of the metrics that an evaluation returns; what crossed until then is of the log alone.
        for name in crossed:
            del logs[name]

    # ---- The model that is evaluated

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """`Trainer.evaluate`; a [`FederatedDataset`] is evaluated as all its rows together."""
        self.catch_up()
        return super().evaluate(_rows_together(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.predict`, also of a [`FederatedDataset`]."""
        self.catch_up()
        return super().predict(_rows_together(test_dataset), *args, **kwargs)


def _rows_together(dataset: Any) -> Any:
    if isinstance(dataset, dict):
        return {name: _rows_together(own) for name, own in dataset.items()}
    return dataset.to_dataset() if isinstance(dataset, FederatedDataset) else dataset


def step_arguments(args: TrainingArguments) -> TrainingArguments:
    """The user's arguments as a loop sees them of which an item is an optimizer step already."""
    own = copy.copy(args)
    own.gradient_accumulation_steps = 1
    # Parties clip by one norm, which the loop does not see.
    own.max_grad_norm = 0.0
    own.include_num_input_tokens_seen = "no"
    own.save_total_limit = None
    return own


class _StepEnd(TrainerCallback):
    """What happens between the optimizers' step and what looks at the model."""

    def __init__(self, trainer: SplitMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.end_step()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.catch_up()
