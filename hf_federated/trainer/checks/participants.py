"""Checks of public and labelled examples, and of clients with their own models, against the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import Trainer
from transformers.utils import logging

from ...aggregation import Aggregation
from ...clients.model_factory import check_tokenizers
from ...clients.participants import Participants, count_overlap
from ...data import FederatedDataset
from ...distillation import Distillation
from ...postprocessing import Postprocessor
from .arguments import _unfit_for_clients
from .data import _first_without_tokens


logger = logging.get_logger(__name__)


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
        and not distillation.requirements.public_dataset
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
    if distillation is not None and distillation.requirements.public_dataset and not participants.public_dataset:
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
    if distillation is not None and distillation.requirements.initial_model and streams:
        raise ValueError(
            f"Client {streams[0]!r} has a stream (IterableDataset), and distillation={name!r} compares all rows of a "
            "client with the public ones: give it a Dataset. distillation='feddf' compares none."
        )
    if distillation is not None and distillation.requirements.server_dataset and not participants.server_dataset:
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
    has_classes = unit == "token" or (getattr(config, "num_labels", 2) >= 2 and not is_multi_label)
    if distillation.requirements.class_probabilities and not has_classes:
        found = "several labels of a row at once" if is_multi_label else "one number, as in a regression"
        raise ValueError(
            f"distillation={distillation.name!r} learns distributions over classes, of which one is right, and the "
            f"model predicts {found}: take distillation='fedmd', which learns mean scores, whatever they are."
        )
    if task is None or unit == "row" or not distillation.requirements.public_dataset:
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
