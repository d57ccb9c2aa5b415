"""Checks of the clients' data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import DataCollatorWithPadding, Trainer, default_data_collator
from transformers.utils import logging

from ...clients import ClientSampler
from ...clients.student import LABEL_COLUMNS
from ...config import FederatedConfig
from ...data import FederatedDataset
from ...distillation import Distillation


logger = logging.get_logger(__name__)


ROWS_AT_A_TIME = 10_000


SPLIT_NAMES = {"train", "validation", "valid", "dev", "test"}


SINGLE_CLIENT = "0"


def as_federated_dataset(train_dataset: Any, federation: FederatedConfig | None) -> FederatedDataset | None:
    """
    The clients' data, or `None` where there is no federation and `FederatedTrainer` is `Trainer`.

    Args:
        train_dataset (`Any`): What the user gave: a `FederatedDataset`, a mapping of client ids to data sets, a
            `DatasetDict`, or a plain data set, which is one client.
        federation ([`FederatedConfig`], *optional*): What the user gave.

    Raises:
        ValueError: If a `DatasetDict` holds splits instead of clients, or there is a federation and no data.
    """
    if isinstance(train_dataset, FederatedDataset):
        return train_dataset
    if isinstance(train_dataset, Mapping):
        if train_dataset and set(train_dataset) <= SPLIT_NAMES:
            raise ValueError(
                f"`train_dataset` has the keys {sorted(train_dataset)}, which are splits and would become clients. "
                "Pass one split, or `FederatedDataset.from_dict` if these really are the clients' names."
            )
        return FederatedDataset.from_dict(train_dataset)
    if federation is None:
        return None
    if train_dataset is None:
        raise ValueError(
            "`federation` needs a `train_dataset`: a FederatedDataset, or a mapping of client ids to data."
        )
    return FederatedDataset.from_dict({SINGLE_CLIENT: train_dataset})


def check_clients(
    trainer: Trainer,
    clients: FederatedDataset,
    eval_clients: FederatedDataset | None,
    federation: FederatedConfig,
    are_raw: bool = False,
    distillation: Distillation | None = None,
) -> ClientSampler:
    """
    Check the clients' data against the arguments, before anything is trained.

    Args:
        trainer (`transformers.Trainer`): Constructed already.
        clients ([`FederatedDataset`]): Training rows by client.
        eval_clients ([`FederatedDataset`], *optional*): Evaluation rows by client.
        federation ([`FederatedConfig`]): The configuration.
        are_raw (`bool`, *optional*, defaults to `False`): Whether a task encodes the rows later, and knows their
            labels.
        distillation ([`Distillation`], *optional*): The algorithm, which may let clients evaluate.

    Returns:
        [`ClientSampler`]: Of this federation.

    Raises:
        ValueError: It names the clients and what to change.
    """
    args = trainer.args
    sampler = ClientSampler(list(clients), federation.clients_per_round, federation.federation_seed or 0)
    if federation.min_clients > sampler.num_sampled:
        raise ValueError(
            f"min_clients={federation.min_clients}, but a round samples {sampler.num_sampled} clients: lower it, or "
            "raise `clients_per_round`."
        )
    if federation.evaluate_clients and eval_clients is None:
        raise ValueError(
            "evaluate_clients=True needs `eval_dataset` to be a FederatedDataset: each client's own evaluation rows."
        )
    if distillation is not None and distillation.requirements.client_evaluation and eval_clients is None:
        raise ValueError(
            f"{distillation!r} lets clients evaluate their models, and `eval_dataset` is no FederatedDataset: give "
            "each client's own evaluation rows, or leave `clients_evaluate` out."
        )
    rows = clients.num_rows
    streams = [client_id for client_id in clients if rows[client_id] is None]
    if streams and federation.local_steps is None:
        raise ValueError(
            f"Client {streams[0]!r} has a stream (IterableDataset), whose epoch has no length: set `local_steps`."
        )
    if streams and (federation.balance is not None or federation.max_rows_per_round is not None):
        raise ValueError(
            f"Client {streams[0]!r} has a stream (IterableDataset), which has no number of rows to draw from: leave "
            "`balance` and `max_rows_per_round` out, and say with `local_steps` how much clients train on."
        )
    if streams:
        logger.warning_once("A client's stream starts at its first rows again in every round.")
    # With `parallelism="data"` a step takes a batch of every process.
    shared_by = args.world_size if federation.parallelism == "data" and not trainer.accelerator.split_batches else 1
    batch = args.train_batch_size * shared_by
    small = [client_id for client_id in clients if rows[client_id] is not None and rows[client_id] < batch]
    if args.dataloader_drop_last and small:
        of_each = f" ({args.train_batch_size} in each of {shared_by} processes)" if shared_by > 1 else ""
        raise ValueError(
            f"{len(small)} clients have fewer rows than a batch of {batch}{of_each}, for example {small[:5]}, and "
            "dataloader_drop_last=True leaves them nothing: set it to False, shrink "
            "`per_device_train_batch_size`, or leave these clients out."
        )
    if args.dataloader_drop_last and (federation.max_rows_per_round or batch) < batch:
        raise ValueError(
            f"max_rows_per_round={federation.max_rows_per_round} is less than a batch of {batch}, and "
            "dataloader_drop_last=True leaves clients nothing: set it to False, raise `max_rows_per_round`, or shrink "
            "`per_device_train_batch_size`."
        )
    if not are_raw:
        _check_labels(trainer, clients)
    return sampler


def _first_without_tokens(rows: Dataset) -> int | None:
    """The number of the first row that is encoded already and has no tokens."""
    if "input_ids" not in rows.column_names:
        return None
    tokens = rows.select_columns(["input_ids"]).with_format("arrow")
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        column = tokens[start : start + ROWS_AT_A_TIME].column("input_ids")
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return None  # arrays of one shape
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        if (found := pc.index(lengths, 0).as_py()) >= 0:
            return start + found
    return None


def check_labelled(rows: Dataset) -> None:
    """
    Refuse rows of the server without labels.

    Args:
        rows (`datasets.Dataset`): Encoded for the server's model.

    Raises:
        ValueError: If so.
    """
    if set(LABEL_COLUMNS).isdisjoint(rows.column_names):
        raise ValueError(
            f"`server_dataset` has the columns {rows.column_names} and no label column ({', '.join(LABEL_COLUMNS)}): "
            "the server's validation loss is over labelled rows. Rename yours."
        )


def _check_labels(trainer: Trainer, clients: FederatedDataset) -> None:
    # Other collators, and a loss of the user's own, may make labels out of anything.
    collator = trainer.data_collator
    plain_collator = collator is default_data_collator or type(collator) is DataCollatorWithPadding
    own_loss = trainer.compute_loss_func is not None or any(
        "compute_loss" in vars(cls) for cls in type(trainer).__mro__ if issubclass(cls, Trainer) and cls is not Trainer
    )
    columns = clients.column_names
    if not plain_collator or own_loss or not trainer.label_names or columns is None:
        return
    accepted = {*trainer.label_names, "label", "label_ids"}
    if accepted.isdisjoint(columns):
        raise ValueError(
            f"The clients' data has the columns {list(columns)} and no label column ({', '.join(sorted(accepted))}). "
            "Rename yours, for example `clients.rename_column('sentiment', 'labels')`."
        )
