"""What a federation has in addition to its clients' examples: public examples, server examples, differing clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, Trainer
from transformers.utils import logging

from ..data import FederatedDataset
from ..data.source import content_hash
from ..tasks import Task
from . import ClientSpec, Student
from .positions import Positions


logger = logging.get_logger(__name__)


# What encoded rows are told apart by, where no task says what is read.
INPUT_IDS = "input_ids"


@dataclass(frozen=True)
class PublicRowsEncoded:
    """
    The public rows for one tokenizer.

    Args:
        rows (`datasets.Dataset`): Encoded.
        positions ([`~hf_federated.clients.positions.Positions`], *optional*): Where a model predicts in them, if that
            is not once a row.
    """

    rows: Dataset
    positions: Positions | None = None

    def student(self, trainer: Trainer, learning_rate: float | None) -> Student:
        """A trainer's model over these rows. Several may share them."""
        return Student(trainer, self.rows, learning_rate, None if self.positions is None else self.positions.copy())


@dataclass
class Participants:
    """
    What a federation has beside its clients' rows, as the user gave it to the trainer.

    Args:
        task ([`Task`], *optional*): Encodes raw rows for each tokenizer. Without, rows are encoded already.
        public_dataset (`datasets.Dataset`, *optional*): Rows that server and clients have, without labels.
        server_dataset (`datasets.Dataset`, *optional*): The server's own rows, with labels.
        clients (`Mapping[str, ClientSpec]`): Clients that differ.
        client_model_init (`Callable[[str], PreTrainedModel]`, *optional*): Makes a client's model from its id.
    """

    task: Task | None = None
    public_dataset: Dataset | None = None
    server_dataset: Dataset | None = None
    clients: Mapping[str, ClientSpec] = field(default_factory=dict)
    client_model_init: Callable[[str], PreTrainedModel] | None = None

    @cached_property
    def row_hashes(self) -> dict[str, str]:
        """
        Hashes of the public rows and of the server's own, by the argument that they are, where there are any. What a
        transform makes of rows when they are read is not in them.
        """
        given = {"public_dataset": self.public_dataset, "server_dataset": self.server_dataset}
        for name, rows in given.items():
            if rows is not None and rows.format["type"] == "custom":
                logger.warning(
                    "`%s` has a transform, which a checkpoint cannot compare: resume with the same, or use `map` "
                    "instead.",
                    name,
                )
        return {name: content_hash(rows) for name, rows in given.items() if rows is not None}

    @property
    def differ(self) -> bool:
        """Whether clients may have other models than the server."""
        return bool(self.clients) or self.client_model_init is not None

    def tokenizer_of(self, client_id: str, default: Any) -> Any:
        """A client's tokenizer."""
        spec = self.clients.get(client_id)
        return default if spec is None or spec.processing_class is None else spec.processing_class

    def encode(self, dataset: Any, tokenizer: Any, with_labels: bool = True) -> Any:
        """Rows as a model with this tokenizer takes them."""
        return dataset if self.task is None else self.task.prepare(dataset, tokenizer, with_labels)

    @property
    def prediction_unit(self) -> str | None:
        """What a prediction is about, as [`Task`] says it. Rows that are encoded already have one each."""
        return "row" if self.task is None else self.task.prediction_unit

    def encode_public(self, tokenizer: Any) -> PublicRowsEncoded:
        """The public rows as a model with this tokenizer takes them, and where it predicts in them."""
        assert self.public_dataset is not None
        if self.task is None:
            return PublicRowsEncoded(self.public_dataset)
        rows = self.task.prepare_public(self.public_dataset, tokenizer)
        if self.task.prediction_unit == "row":
            return PublicRowsEncoded(rows)
        return PublicRowsEncoded(rows, Positions.of(rows, self.task.labels_are_inputs))


# What a task fills in of a trainer's arguments, beside its rows.
FROM_TASK = ("data_collator", "compute_metrics", "preprocess_logits_for_metrics")


def encode_for_server(arguments: dict[str, Any], task: Task) -> None:
    """
    Fill in what a task knows of a trainer's arguments: its evaluation rows encoded, its collator, its metrics.

    Args:
        arguments (`dict[str, Any]`): The arguments by name, which are changed.
        task ([`Task`]): What the trainer does.

    Raises:
        ValueError: If there is no tokenizer.
    """
    tokenizer = arguments.get("processing_class")
    if tokenizer is None:
        raise ValueError("`task` encodes raw rows, and needs the server's tokenizer: give `processing_class`.")
    rows = arguments.get("eval_dataset")
    if isinstance(rows, Dataset):
        features = task.for_evaluation(task.prepare(rows, tokenizer), tokenizer)
        arguments["eval_dataset"] = features
        if arguments.get("compute_metrics") is None:
            arguments["compute_metrics"] = task.build_compute_metrics(tokenizer, features, rows)
            arguments["preprocess_logits_for_metrics"] = task.preprocess_logits_for_metrics
    elif rows is not None:
        raise ValueError(
            f"With `task`, `eval_dataset` is a Dataset or a FederatedDataset of raw rows, got {type(rows).__name__}."
        )
    if arguments.get("data_collator") is None:
        arguments["data_collator"] = task.data_collator(tokenizer, arguments.get("model"))


class EncodedClients(Mapping[str, Any]):
    """
    The clients' raw rows, each encoded with the client's tokenizer, once, when it is first asked for.

    Args:
        clients ([`FederatedDataset`]): Raw rows.
        participants ([`Participants`]): Whose task encodes them.
        tokenizer (`PreTrainedTokenizerBase`): Of clients that have none of their own.
    """

    def __init__(self, clients: FederatedDataset, participants: Participants, tokenizer: Any) -> None:
        self._clients = clients
        self._participants = participants
        self._tokenizer = tokenizer
        self._encoded: dict[str, Any] = {}

    def __getitem__(self, client_id: str) -> Any:
        if client_id not in self._encoded:
            tokenizer = self._participants.tokenizer_of(client_id, self._tokenizer)
            try:
                self._encoded[client_id] = self._participants.encode(self._clients[client_id], tokenizer)
            except ValueError as error:
                raise ValueError(f"Client {client_id!r}: {error}") from error
        return self._encoded[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def count_overlap(clients: FederatedDataset, participants: Participants) -> int:
    """
    How many private rows are public too: equal in what both hold of the columns that a model reads.

    Args:
        clients ([`FederatedDataset`]): Private rows. Streams are not read.
        participants ([`Participants`]): Whose public rows, and whose task says what is read.
    """
    public, task = participants.public_dataset, participants.task
    if public is None:
        return 0
    read = (INPUT_IDS,) if task is None else task.columns
    columns = [name for name in read if name in public.column_names]
    known = {row for batch in _batches(public, columns) for row in batch}
    if not columns or not known:
        return 0
    found = 0
    for client_id in clients:
        rows = clients[client_id]
        if isinstance(rows, Dataset) and set(columns) <= set(rows.column_names):
            found += sum(row in known for batch in _batches(rows, columns) for row in batch)
    return found


def _batches(rows: Dataset, columns: list[str]) -> Iterator[list[str]]:
    """The values of some columns as text that can be compared, a thousand rows at a time."""
    for batch in rows.select_columns(columns).with_format("arrow").iter(1000):
        yield [repr(list(row.values())) for row in batch.to_pylist()]
