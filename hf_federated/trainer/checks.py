"""What is refused when a trainer is built, and what to do instead. Combinations only: fields check themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ..aggregation import Aggregation, FedAvg, LocalOnly
from ..clients import ClientSampler
from ..clients.participants import Participants, check_tokenizers, count_overlap
from ..clients.student import LABEL_COLUMNS
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation
from ..postprocessing.postprocessing import Postprocessor


logger = logging.get_logger(__name__)

ROWS_AT_A_TIME = 10_000

SPLIT_NAMES = {"train", "validation", "valid", "dev", "test"}
SINGLE_CLIENT = "0"
# Their learning rate depends on evaluations that happen between rounds, outside any client.
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
# How long a run is, what is watched, and where it happens.
MAY_CHANGE = (
    "num_rounds",
    "min_clients",
    "evaluate_clients",
    "log_clients",
    "parallelism",
    "client_store",
    "max_resident_clients",
)


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


def resolve_federation(federation: FederatedConfig | None, args: TrainingArguments) -> FederatedConfig:
    """The configuration with `num_rounds` and `federation_seed` filled in from the training arguments."""
    federation = FederatedConfig() if federation is None else federation
    rounds, seed = federation.num_rounds, federation.federation_seed
    return dataclasses.replace(
        federation,
        num_rounds=max(int(-(-args.num_train_epochs // 1)), 1) if rounds is None else rounds,
        federation_seed=args.seed if seed is None else seed,
    )


def check_arguments(trainer: Trainer, federation: FederatedConfig, algorithm: Aggregation) -> None:
    """
    Refuse training arguments, and ways to launch, that cannot mean anything in a federation or that were never tried.

    Raises:
        ValueError: It names the argument and the alternative.
    """
    args = trainer.args
    launched_as = trainer.accelerator.distributed_type.value
    unsharded = "launch with plain data parallelism; LoRA, also over a quantized base, makes a model fit"
    refused = {
        f"max_steps={args.max_steps}": (args.max_steps > 0, "give `num_rounds` and `local_steps` of FederatedConfig"),
        **_unfit_for_clients(args),
        "sync_ref_model=True": (
            bool(getattr(args, "sync_ref_model", False)),
            "leave the reference model as it is; one client's would reach the next",
        ),
        "DeepSpeed": (bool(args.deepspeed) or trainer.is_deepspeed_enabled, unsharded),
        "FSDP": (bool(args.fsdp) or trainer.is_fsdp_enabled, unsharded),
        f"a launch as {launched_as}": (launched_as != "NO" and not launched_as.startswith("MULTI_"), unsharded),
        "tensor, context or sequence parallelism": (
            getattr(trainer.accelerator, "parallelism_config", None) is not None,
            unsharded,
        ),
        f"{args.n_gpu} GPUs in one process": (args.n_gpu > 1, "set CUDA_VISIBLE_DEVICES to one of them"),
        f"optim={OptimizerNames(args.optim).value!r} with {algorithm.name}": (
            algorithm.needs_gradients and args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO),
            "use an optimizer that keeps gradients until its step, such as 'adamw_torch'",
        ),
    }
    for what, (is_refused, alternative) in refused.items():
        if is_refused:
            raise ValueError(f"{what} does not work in a federation: {alternative}.")


def _unfit_for_clients(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Arguments with which no client can train: whether they are set, and what to do instead."""
    return {
        f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r}": (
            args.lr_scheduler_type in METRIC_SCHEDULES,
            "use a schedule of steps such as 'linear' or 'cosine'; the server's may be set in FedOpt",
        ),
        "auto_find_batch_size=True": (
            bool(args.auto_find_batch_size),
            "set `per_device_train_batch_size`; a client that runs out of memory would go on from a changed model",
        ),
        "fp16=True": (bool(args.fp16), "use bf16=True; the loss scale would carry from client to client"),
    }


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
    if distillation is not None and distillation.needs_client_evaluation and eval_clients is None:
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


def federation_identity(
    federation: FederatedConfig,
    algorithm: Aggregation,
    distillation: Distillation | None,
    clients: FederatedDataset,
    participants: Participants,
    args: TrainingArguments,
) -> dict[str, Any]:
    """What makes a run this run and no other: whatever changes its numbers, except for its length."""
    identity = {name: value for name, value in federation.to_dict().items() if name not in MAY_CHANGE}
    del identity["aggregation_kwargs"], identity["distillation_kwargs"]
    identity |= {"aggregation": repr(algorithm), "distillation": repr(distillation)}
    for name, content in participants.row_hashes.items():
        identity[f"rows of `{name}`"] = len(getattr(participants, name))
        identity[f"content of `{name}`"] = content
    if distillation is not None:
        # Its learning rates fall over the mini-batches of the whole run.
        identity["per_device_train_batch_size"] = args.per_device_train_batch_size
        for client_id, spec in participants.clients.items():
            if spec.args is not None:
                name = f"per_device_train_batch_size of client {client_id!r}"
                identity[name] = spec.args.per_device_train_batch_size
    return {**identity, "clients": dict(sorted(clients.num_rows.items()))}


def check_resumed(saved: Mapping[str, Any], now: Mapping[str, Any], checkpoint: str) -> None:
    """
    Refuse to go on from the checkpoint of another federation.

    Args:
        saved (`Mapping[str, Any]`): The [`federation_identity`] of the checkpoint.
        now (`Mapping[str, Any]`): That of the trainer.
        checkpoint (`str`): Where the checkpoint lies.

    Raises:
        ValueError: If they differ. The message names what differs, with both values.
    """
    # Rows that a run had and this one has not are no setting of it.
    names = [*now, *(name for name in saved if name not in now and name.startswith(("rows of", "content of")))]
    changes = [
        f"{name}: here {now.get(name)!r}, there {saved.get(name)!r}"
        for name in names
        if name != "clients" and now.get(name) != saved.get(name)
    ]
    here, there = now["clients"], saved["clients"]
    for where, ids in (("here", here.keys() - there.keys()), ("there", there.keys() - here.keys())):
        if ids:
            changes.append(f"{len(ids)} clients are only {where}, for example {sorted(ids)[:3]}")
    changes += [
        f"rows of client {client_id!r}: here {here[client_id]}, there {there[client_id]}"
        for client_id in here
        if client_id in there and here[client_id] != there[client_id]
    ][:3]
    if changes:
        raise ValueError(
            f"{checkpoint!r} is of another federation (there) than this run (here). {'; '.join(changes)}. Resume with "
            "what the checkpoint has, or start a new run from its model. What a resume may change: "
            f"{', '.join(MAY_CHANGE)}."
        )


def check_not_averaged(aggregation: Aggregation, distillation: Distillation) -> None:
    """
    Refuse an average of parameters beside a distillation in which they do not travel.

    Raises:
        ValueError: If one was asked for.
    """
    if aggregation.name not in (FedAvg.name, LocalOnly.name) or aggregation.non_default_settings():
        raise ValueError(
            f"aggregation={aggregation.name!r} has nothing to average: with distillation={distillation.name!r} "
            "clients send predictions, and keep their parameters. Leave `aggregation` out."
        )


def check_participants(
    aggregation: Aggregation,
    distillation: Distillation | None,
    participants: Participants,
    clients: FederatedDataset,
    postprocessors: Sequence[Postprocessor] = (),
) -> None:
    """
    Check public rows, labelled rows, clients that differ and postprocessors against the algorithm. Private rows that
    are public too are legal, and a warning counts them.

    Raises:
        ValueError: It names what is missing or has no use, and what to change.
    """
    name = None if distillation is None else distillation.name
    if (
        distillation is not None
        and not distillation.needs_public
        and (participants.public_dataset is not None or participants.server_dataset is not None)
    ):
        raise ValueError(
            f"distillation={name!r} has no use for public or labelled rows of the server: leave out `public_dataset` "
            "and `server_dataset`."
        )
    for argument in ("public_dataset", "server_dataset"):
        rows = getattr(participants, argument)
        if rows is not None and not isinstance(rows, Dataset):
            raise ValueError(
                f"`{argument}` is a {type(rows).__name__}; rows are asked for by number, so give a `datasets.Dataset`."
            )
        if rows is not None and (row := _first_without_tokens(rows)) is not None:
            raise ValueError(f"Row {row} of `{argument}` has no tokens in `input_ids`: leave such rows out.")
    if distillation is not None and distillation.needs_public and not participants.public_dataset:
        found = "none was given" if participants.public_dataset is None else "it has no rows"
        raise ValueError(
            f"distillation={name!r} needs `public_dataset`, rows without labels that server and clients have: "
            f"{found}. `split_for_distillation` sets some aside."
        )
    if distillation is None and (participants.public_dataset is not None or participants.server_dataset is not None):
        raise ValueError(
            "`public_dataset` and `server_dataset` are for distillation, and `distillation` of FederatedConfig names "
            "no algorithm."
        )
    streams = [client_id for client_id, num_rows in clients.num_rows.items() if num_rows is None]
    if distillation is not None and distillation.needs_features and streams:
        raise ValueError(
            f"Client {streams[0]!r} has a stream (IterableDataset), and distillation={name!r} compares all rows of a "
            "client with the public ones: give it a Dataset. distillation='feddf' compares none."
        )
    if distillation is not None and distillation.needs_labelled and not participants.server_dataset:
        raise ValueError(f"{distillation!r} needs `server_dataset`: labelled rows of the server's own.")
    if aggregation.trains_private_models and not participants.differ:
        raise ValueError(
            f"aggregation={aggregation.name!r} needs `client_model_init` or `clients`: each client's private model."
        )
    if postprocessors and not aggregation.exchanges_parameters:
        raise ValueError(
            f"{type(postprocessors[0]).__name__} works on parameters, and with {name or aggregation.name!r} none "
            "leave a client: what does leave it, its predictions, would travel as they are. Leave `postprocessors` "
            "out; `prediction_dtype` and `top_k` of the distillation make predictions smaller."
        )
    shares = aggregation.exchanges_parameters and not aggregation.trains_private_models
    if participants.differ and (shares or (distillation and distillation.sends_parameters)):
        raise ValueError(
            "`clients` and `client_model_init` give clients models of their own, and "
            f"{name or aggregation.name!r} exchanges parameters, which must fit all of them. Take a method that "
            "exchanges predictions: distillation='fedid', 'adafd', 'dsfl', 'mhat'."
        )
    if unknown := sorted(set(participants.clients) - set(clients)):
        raise ValueError(f"`clients` names {unknown[:5]}, which have no rows; the clients are {list(clients)[:5]}.")
    for client_id, spec in participants.clients.items():
        for what, (is_refused, alternative) in ({} if spec.args is None else _unfit_for_clients(spec.args)).items():
            if is_refused:
                raise ValueError(f"{what} of client {client_id!r} does not work in a federation: {alternative}.")
    with_tokenizers = [key for key, spec in participants.clients.items() if spec.processing_class is not None]
    if with_tokenizers and participants.task is None:
        raise ValueError(
            f"Client {with_tokenizers[0]!r} has a tokenizer of its own, so rows must stay raw until it encodes them: "
            "give the trainer a `task`, such as TextClassification."
        )
    if num_shared := count_overlap(clients, participants):
        logger.warning(
            f"{num_shared} of the clients' rows are public rows too: what clients say of them is said of what they "
            "were trained on. `split_for_distillation` cuts without overlap."
        )


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


def check_predictions(distillation: Distillation, participants: Participants, trainer: Trainer) -> None:
    """
    Check what predictions are about, which the task says, against the algorithm and the clients' tokenizers.

    Args:
        distillation ([`~hf_federated.Distillation`]): The algorithm.
        participants ([`Participants`]): The task, and clients that differ.
        trainer (`transformers.Trainer`): With the server's model and tokenizer.

    Raises:
        ValueError: It names what does not go together, and what to take instead.
    """
    task, unit = participants.task, participants.prediction_unit
    config: Any = getattr(trainer.model, "config", None)
    is_multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    if distillation.needs_classes and unit != "token" and (getattr(config, "num_labels", 2) < 2 or is_multi_label):
        found = "several labels of a row at once" if is_multi_label else "one number, as in a regression"
        raise ValueError(
            f"distillation={distillation.name!r} learns distributions over classes, of which one is right, and the "
            f"model predicts {found}: take distillation='fedmd', which learns mean scores, whatever they are."
        )
    if task is None or unit == "row" or not distillation.needs_public:
        return
    if unit is None:
        raise ValueError(
            f"distillation={distillation.name!r} learns distributions over classes, and {task} has none that all who "
            "hold a public row share. TextClassification, SequenceTagging, Seq2Seq with public targets and causal "
            "LanguageModeling have. Parameters can be averaged with any task: leave `distillation` out."
        )
    by_token = unit == "token"
    distillation.check_unit(unit, config.get_text_config(decoder=True).vocab_size if by_token else config.num_labels)
    if by_token:
        check_tokenizers(participants, trainer.processing_class)


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
