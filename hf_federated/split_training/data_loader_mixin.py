"""Training examples of a split trainer. An item of the data loader has the batches of all clients of a step."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainingArguments

from .saving import SplitSavingMixin
from .step_plan import SplitSteps


class SplitDataMixin(SplitSavingMixin):
    """Overrides of `Trainer` methods that load training examples."""

    # The prepared training dataset of each client.
    _client_datasets: Mapping[str, Any]
    _signature_columns: list[str] | None

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Data loader with one item per optimizer step: the batches of every client that takes part."""
        if self.clients is None:
            return super().get_train_dataloader()
        datasets: dict[str, Any] = {}
        collate: dict[str, Any] = {}
        try:
            for client_id in self.clients:
                self.train_dataset = self._client_datasets[client_id]
                if not len(self.train_dataset):
                    raise ValueError(
                        f"{type(self).__name__} removed all examples of client {client_id!r}. Check its dataset."
                    )
                loader = super().get_train_dataloader()
                datasets[client_id], collate[client_id] = loader.dataset, loader.collate_fn
        finally:
            self.train_dataset = self.clients
        args = self._user_args
        steps = SplitSteps(
            datasets,
            collate,
            args.train_batch_size,
            args.gradient_accumulation_steps,
            simultaneous=self.split.strategy != "serial",
            steps_per_turn=self.split.steps_per_turn,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            steps_per_client=None if self.networked_run is None else self.networked_run.steps_per_epoch,
        )
        workers = args.dataloader_num_workers
        return self.accelerator.prepare(
            DataLoader(
                steps,
                batch_size=1,
                collate_fn=operator.itemgetter(0),
                num_workers=workers,
                prefetch_factor=args.dataloader_prefetch_factor if workers else None,
                pin_memory=args.dataloader_pin_memory,
            )
        )

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of examples of a data loader. For the training data loader, the sum over all clients."""
        steps = dataloader.dataset
        return steps.num_examples if isinstance(steps, SplitSteps) else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Number of examples in a step when all eligible clients participate."""
        num_clients = 1 if self.clients is None or self.split.strategy == "serial" else len(self.clients)
        return super().get_total_train_batch_size(self._user_args) * num_clients

    def _set_signature_columns_if_needed(self) -> None:
        # Keep columns that the full model accepts. The split model raises an error if it does not support a column.
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            signature = inspect.signature(self.model.client_tail.model.forward)
            self._signature_columns = list(dict.fromkeys([*(self._signature_columns or []), *signature.parameters]))
