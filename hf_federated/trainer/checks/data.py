"""Checks of the clients' datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import DataCollatorWithPadding, Trainer, default_data_collator
from transformers.utils import logging

from ..._compat import reads_all_columns
from ...clients import ClientSampler
from ...clients.student import LABEL_COLUMNS
from ...config import FederatedConfig
from ...data import FederatedDataset
from ...distillation import Distillation


logger = logging.get_logger(__name__)


# Number of examples that are read at a time.
READ_SIZE = 10_000

# A mapping with only these keys holds splits and no clients.
SPLIT_NAMES = {"train", "validation", "valid", "dev", "test"}

# Id of the client that a plain dataset becomes.
SINGLE_CLIENT = "0"


def as_federated_dataset(train_dataset: Any, federation: FederatedConfig | None) -> FederatedDataset | None:
    """
    Convert the user's training data to a federated dataset.

    Args:
        train_dataset (`Any`): The user's data: a [`FederatedDataset`], a mapping of client ids to datasets, a
            `DatasetDict`, or a plain dataset, which becomes one client.
        federation ([`FederatedConfig`], *optional*): The user's configuration.

    Returns:
        [`FederatedDataset`], *optional*: The clients' examples. `None` if there is no federation, in which case
        [`FederatedTrainer`] behaves as `Trainer`.

    Raises:
        ValueError: If the keys of a mapping are splits and not clients, or if there is a federation without data.
    """
    if isinstance(train_dataset, FederatedDataset):
        return train_dataset
    if isinstance(train_dataset, Mapping):
        if train_dataset and set(train_dataset) <= SPLIT_NAMES:
            raise ValueError(
                f"`train_dataset` has the keys {sorted(train_dataset)}, which are splits and would become clients. "
                "Pass one split. If these keys are the names of clients, pass a FederatedDataset made with "
                "`FederatedDataset.from_dict`."
            )
        return FederatedDataset.from_dict(train_dataset)
    if federation is None:
        return None
    if train_dataset is None:
        raise ValueError(
            "`federation` needs a `train_dataset`: a FederatedDataset, or a mapping of client ids to datasets."
        )
    return FederatedDataset.from_dict({SINGLE_CLIENT: train_dataset})


def check_without_examples(train_dataset: Any, federation: FederatedConfig | None) -> None:
    """
    Check the arguments of a server whose clients are on other machines.

    Args:
        train_dataset (`Any`): The user's data.
        federation ([`FederatedConfig`], *optional*): The user's configuration.

    Raises:
        ValueError: If the server has training examples or no configuration.
    """
    if train_dataset is not None:
        raise ValueError(
            "`engine` runs clients on other machines, which have the training examples. Leave `train_dataset` out on "
            "the server."
        )
    if federation is None:
        raise ValueError("`engine` runs clients on other machines. Pass `federation` too.")


def example_of_the_format(trainer_class: type, eval_dataset: Any) -> Dataset:
    """
    Return one evaluation example of a server, from which the constructor of its trainer reads the format of examples.

    Trainers such as `SFTTrainer` prepare their training examples in the constructor, but the training examples are on
    other machines. The server prepares the example as the clients prepare theirs, and does not train on it.

    Args:
        trainer_class (`type`): Class of the trainer.
        eval_dataset (`Any`): The user's evaluation dataset.

    Raises:
        ValueError: If there is no evaluation example.
    """
    if isinstance(eval_dataset, Mapping):
        eval_dataset = next(iter(eval_dataset.values()), None)
    if not isinstance(eval_dataset, Dataset) or not len(eval_dataset):
        raise ValueError(
            f"{trainer_class.__name__} prepares its training examples in the constructor, but with clients on other "
            "machines the server has none. Pass `eval_dataset`, a datasets.Dataset whose examples have the format of "
            "the clients' examples."
        )
    return eval_dataset.select([0])


def sample_clients(clients: FederatedDataset, federation: FederatedConfig) -> ClientSampler:
    """
    Build the sampler of the cohorts.

    Args:
        clients ([`FederatedDataset`]): The clients.
        federation ([`FederatedConfig`]): The configuration.

    Raises:
        ValueError: If there are fewer clients than `clients_per_round` or `min_clients`.
    """
    sampler = ClientSampler(list(clients), federation.clients_per_round, federation.federation_seed or 0)
    if federation.min_clients_of(sampler.num_sampled) > sampler.num_sampled:
        raise ValueError(
            f"min_clients={federation.min_clients}, but a round samples {sampler.num_sampled} clients. Lower "
            "`min_clients`, or raise `clients_per_round`."
        )
    return sampler


def check_clients(
    trainer: Trainer,
    clients: FederatedDataset,
    eval_clients: FederatedDataset | None,
    federation: FederatedConfig,
    are_raw: bool,
    distillation: Distillation | None,
) -> None:
    """
    Check the clients' data against the arguments before training.

    Args:
        trainer (`transformers.Trainer`): The federated trainer, constructed as its parent class.
        clients ([`FederatedDataset`]): Training examples by client.
        eval_clients ([`FederatedDataset`], *optional*): Evaluation examples by client.
        federation ([`FederatedConfig`]): The configuration.
        are_raw (`bool`): Whether the examples are raw. A task then encodes them
            later, and the check for a label column is skipped.
        distillation ([`Distillation`], *optional*): The distillation algorithm. Some algorithms need evaluation
            examples on the clients.

    Raises:
        ValueError: If the data does not fit the arguments. The message names the clients and the change to make.
    """
    args = trainer.args
    if federation.evaluate_clients and eval_clients is None:
        raise ValueError(
            "evaluate_clients=True needs `eval_dataset` to be a FederatedDataset with the evaluation examples of each "
            "client."
        )
    if distillation is not None and distillation.requirements.client_evaluation and eval_clients is None:
        raise ValueError(
            f"{distillation!r} lets clients evaluate their models, but `eval_dataset` is not a FederatedDataset. Pass "
            "the evaluation examples of each client, or leave `clients_evaluate` out."
        )
    if clients.is_remote:
        return  # Each client checks its own examples.
    num_examples = clients.num_rows
    streams = [client_id for client_id, number in num_examples.items() if number is None]
    if streams and federation.local_steps is None:
        raise ValueError(
            f"Client {streams[0]!r} has a stream (IterableDataset), whose epoch has no length. Set `local_steps`."
        )
    if streams and args.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers}, but client {streams[0]!r} has a stream "
            "(IterableDataset). Its position after a round is known only if the training process reads it. Set "
            "`dataloader_num_workers` to 0."
        )
    # With `parallelism="data"` a step takes a batch in every process.
    is_common = federation.parallelism == "data" and not trainer.accelerator.split_batches
    num_processes = args.world_size if is_common else 1
    batch = args.train_batch_size * num_processes
    small = [client_id for client_id, number in num_examples.items() if number is not None and number < batch]
    if args.dataloader_drop_last and small:
        per_process = f" ({args.train_batch_size} in each of {num_processes} processes)" if num_processes > 1 else ""
        raise ValueError(
            f"{len(small)} clients have fewer examples than a batch of {batch}{per_process}, for example {small[:5]}. "
            "With dataloader_drop_last=True these clients have no batch. Set `dataloader_drop_last` to False, reduce "
            "`per_device_train_batch_size`, or leave these clients out."
        )
    if args.dataloader_drop_last and (federation.max_rows_per_round or batch) < batch:
        raise ValueError(
            f"max_rows_per_round={federation.max_rows_per_round} is less than a batch of {batch}. With "
            "dataloader_drop_last=True clients have no batch. Set `dataloader_drop_last` to False, raise "
            "`max_rows_per_round`, or reduce `per_device_train_batch_size`."
        )
    if not are_raw:
        _check_labels(trainer, clients)
        _warn_about_client_column(trainer, clients)


def first_without_tokens(dataset: Dataset) -> int | None:
    """Find the index of the first encoded example that has no tokens."""
    if "input_ids" not in dataset.column_names:
        return None
    tokens = dataset.select_columns(["input_ids"]).with_format("arrow")
    for start in range(0, len(dataset), READ_SIZE):
        column = tokens[start : start + READ_SIZE].column("input_ids")
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return None  # All examples have the same, fixed length.
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        if (found := pc.index(lengths, 0).as_py()) >= 0:
            return start + found
    return None


def check_labeled(dataset: Dataset) -> None:
    """
    Refuse a server dataset without labels.

    Args:
        dataset (`datasets.Dataset`): The server's examples, encoded for its model.

    Raises:
        ValueError: If there is no label column.
    """
    advice = "The server's validation loss needs labeled examples. Rename your column."
    _check_label_column("`server_dataset`", dataset.column_names, LABEL_COLUMNS, advice)


def _check_labels(trainer: Trainer, clients: FederatedDataset) -> None:
    # Other collators and a custom loss may compute labels from any column.
    collator = trainer.data_collator
    is_plain_collator = collator is default_data_collator or type(collator) is DataCollatorWithPadding
    has_custom_loss = trainer.compute_loss_func is not None or any(
        "compute_loss" in vars(cls) for cls in type(trainer).__mro__ if issubclass(cls, Trainer) and cls is not Trainer
    )
    columns = clients.column_names  # empty if a client has a dataset of torch, or a stream of unknown columns
    if not is_plain_collator or has_custom_loss or not trainer.label_names or not columns:
        return
    accepted = sorted({*trainer.label_names, "label", "label_ids"})
    advice = "Rename your column, for example with `clients.rename_column('sentiment', 'labels')`."
    _check_label_column("The clients' data", columns, accepted, advice)


def _warn_about_client_column(trainer: Trainer, clients: FederatedDataset) -> None:
    """Warn if the trainer reads all columns of an example, and a column names the client of the example."""
    kept = [column for column in clients.naming_columns if column in clients.column_names]
    if kept and reads_all_columns(trainer):
        logger.warning_once(
            f"The clients' data has the column {kept[0]!r}, which names the client of an example, and "
            f"{type(trainer).__name__} trains on all columns. To train without the name of the client, leave "
            f"`keep_column=True` out, or call `clients.remove_columns({kept[0]!r})`."
        )


def _check_label_column(owner: str, columns: Sequence[str], accepted: Sequence[str], advice: str) -> None:
    if set(accepted).isdisjoint(columns):
        raise ValueError(
            f"{owner} has the columns {list(columns)} and no label column ({', '.join(accepted)}). {advice}"
        )
