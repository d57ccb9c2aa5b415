"""Checks of public and labeled examples, and of clients with their own models, against the algorithm."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ...aggregation import Aggregation
from ...clients.model_factory import check_tokenizers
from ...clients.participants import Participants, count_overlap
from ...data import FederatedDataset
from ...data.client_ids import similar_ids_hint
from ...distillation import Distillation
from ...utils.optimizer_packages import check_optimizer_package
from .arguments import refuse_settings, unsupported_client_arguments
from .data import first_without_tokens


logger = logging.get_logger(__name__)


def check_participants(
    aggregation: Aggregation,
    distillation: Distillation | None,
    participants: Participants,
    clients: FederatedDataset,
    args: TrainingArguments,
) -> None:
    """
    Check public and labeled examples, and clients with their own arguments or tokenizers, against the algorithm.

    Clients may have examples that are also public. A warning counts these examples.

    Raises:
        ValueError: If an argument is missing or has no use. The message names the argument and the change to make.
    """
    if not clients.column_names and not clients.is_remote:
        advice = (
            "the columns of the clients' examples are unknown (a torch.utils.data.Dataset, or a stream without "
            "features). Pass a datasets.Dataset, for example from Dataset.from_generator."
        )
        if participants.task is not None:
            raise ValueError(f"`task` encodes columns of raw examples, but {advice}")
        if distillation is not None and distillation.requirements.initial_model:
            raise ValueError(f"distillation={distillation.name!r} compares the clients' examples, but {advice}")
    _check_server_examples(aggregation, distillation, participants, clients)
    _check_specs(participants, clients)
    # All clients share the mixed precision of one accelerator.
    fp16 = bool(args.fp16)
    for client_id, spec in participants.clients.items():
        if spec.args is not None:
            unsupported = unsupported_client_arguments(spec.args)
            unsupported[f"fp16={spec.args.fp16}"] = (
                bool(spec.args.fp16) != fp16,
                f"the training arguments of the trainer have fp16={fp16}. Set the same value for all clients",
            )
            refuse_settings(unsupported, f" of client {client_id!r}")
            check_optimizer_package(OptimizerNames(spec.args.optim).value)
    if not clients.is_remote and (num_shared := count_overlap(clients, participants)):
        logger.warning(
            f"{num_shared} of the clients' examples are also public examples. Clients would predict examples that "
            "they were trained on. `split_for_distillation` splits without overlap."
        )


def _check_server_examples(
    aggregation: Aggregation,
    distillation: Distillation | None,
    participants: Participants,
    clients: FederatedDataset,
) -> None:
    """Check `public_dataset` and `server_dataset` against the algorithms."""
    has_public = participants.public_dataset is not None
    has_unused = participants.server_dataset is not None and not aggregation.trains_on_server
    if distillation is not None and not distillation.requirements.public_dataset and (has_public or has_unused):
        raise ValueError(
            f"distillation={distillation.name!r} uses neither public examples nor labeled examples of the server. "
            "Leave `public_dataset` and `server_dataset` out."
        )
    for argument in ("public_dataset", "server_dataset"):
        dataset = getattr(participants, argument)
        if dataset is not None and not isinstance(dataset, Dataset):
            raise ValueError(
                f"`{argument}` is of type {type(dataset).__name__}, but its examples are read by index. Pass a "
                "`datasets.Dataset`."
            )
        if dataset is not None and (index := first_without_tokens(dataset)) is not None:
            raise ValueError(f"Example {index} of `{argument}` has no tokens in `input_ids`. Leave such examples out.")
    if distillation is not None and distillation.requirements.public_dataset and not participants.public_dataset:
        found = "none was given" if participants.public_dataset is None else "the given dataset has no examples"
        raise ValueError(
            f"distillation={distillation.name!r} needs `public_dataset`, examples without labels that the server and "
            f"all clients have, but {found}. `split_for_distillation` sets public examples aside."
        )
    if distillation is None and (has_public or has_unused):
        raise ValueError(
            "`public_dataset` and `server_dataset` are for distillation, but FederatedConfig names no distillation "
            "algorithm. Set `distillation`, or leave both datasets out. aggregation='fltrust' uses `server_dataset`."
        )


def check_server_dataset(
    aggregation: Aggregation, distillation: Distillation | None, participants: Participants
) -> None:
    """
    Check that the server has the labeled examples that the algorithms need. Clients do not need them.

    Raises:
        ValueError: If `server_dataset` is missing or empty.
    """
    if participants.server_dataset:
        return
    if aggregation.trains_on_server:
        raise ValueError(
            f"aggregation={aggregation.name!r} needs `server_dataset`: labeled examples on which the server trains."
        )
    if distillation is not None and distillation.requirements.server_dataset:
        raise ValueError(f"{distillation!r} needs `server_dataset`: labeled examples of the server.")


def _check_specs(participants: Participants, clients: FederatedDataset) -> None:
    """Check that clients with their own settings have examples, and that clients with tokenizers can encode them."""
    if unknown := sorted(set(participants.clients) - set(clients)):
        raise ValueError(
            f"`clients` names {unknown[:5]}, which have no examples. {similar_ids_hint(unknown[0], list(clients))}"
        )
    with_tokenizers = [key for key, spec in participants.clients.items() if spec.processing_class is not None]
    if with_tokenizers and participants.task is None:
        raise ValueError(
            f"Client {with_tokenizers[0]!r} has its own tokenizer, so the client must encode its raw examples itself. "
            "Pass a `task`, such as TextClassification, to the trainer."
        )


def check_predictions(distillation: Distillation, participants: Participants, trainer: Trainer) -> None:
    """
    Check that the algorithm and the tokenizers support the predictions of the task.

    Args:
        distillation ([`~hf_federated.Distillation`]): The algorithm.
        participants ([`Participants`]): The task, and the clients with their own models or tokenizers.
        trainer (`transformers.Trainer`): The federated trainer with the server's model and tokenizer.

    Raises:
        ValueError: If the algorithm does not support the predictions. The message names the alternative.
    """
    task, unit = participants.task, participants.prediction_unit
    config: Any = getattr(trainer.model, "config", None)
    is_multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    has_classes = unit == "token" or (getattr(config, "num_labels", 2) >= 2 and not is_multi_label)
    if distillation.requirements.class_probabilities and not has_classes:
        found = "several labels for an example" if is_multi_label else "one number, as in a regression"
        raise ValueError(
            f"distillation={distillation.name!r} learns probabilities of classes that exclude each other, but the "
            f"model predicts {found}. Use distillation='fedmd', which learns mean scores of any kind."
        )
    if task is None or unit == "row" or not distillation.requirements.public_dataset:
        return
    if unit is None:
        raise ValueError(
            f"distillation={distillation.name!r} learns distributions over classes, but the participants share no "
            f"classes for a public example of {task}. Supported are TextClassification, SequenceTagging, Seq2Seq with "
            "public targets and causal LanguageModeling. To average parameters, which works with any task, leave "
            "`distillation` out."
        )
    is_per_token = unit == "token"
    distillation.check_unit(
        unit, config.get_text_config(decoder=True).vocab_size if is_per_token else config.num_labels
    )
    if is_per_token and not distillation.alignment.supports_other_vocabularies:
        check_tokenizers(participants, trainer.processing_class)
