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


# Without a task, encoded examples are compared by this column.
INPUT_IDS = "input_ids"


@dataclass(frozen=True)
class EncodedPublicDataset:
    """
    The public examples, encoded for one tokenizer.

    Args:
        rows (`datasets.Dataset`): The encoded public examples.
        positions ([`~hf_federated.clients.positions.Positions`], *optional*): The positions at which a model predicts,
            if it does not make one prediction per example.
    """

    rows: Dataset
    positions: Positions | None = None

    def student(self, trainer: Trainer, learning_rate: float | None) -> Student:
        """Create a [`Student`] for a trainer's model on these examples. Several students may share the examples."""
        return Student(trainer, self.rows, learning_rate, None if self.positions is None else self.positions.copy())


@dataclass
class Participants:
    """
    The parts of a federation in addition to its clients' examples, as passed to the trainer.

    Args:
        task ([`Task`], *optional*): Encodes raw examples for each tokenizer. Without a task, the examples are already
            encoded.
        public_dataset (`datasets.Dataset`, *optional*): Unlabeled examples that the server and all clients have.
        server_dataset (`datasets.Dataset`, *optional*): Labeled examples of the server.
        clients (`Mapping[str, ClientSpec]`): Clients with their own model, tokenizer or training arguments.
        client_model_init (`Callable[[str], PreTrainedModel]`, *optional*): Builds a client's model from the client id.
    """

    task: Task | None = None
    public_dataset: Dataset | None = None
    server_dataset: Dataset | None = None
    clients: Mapping[str, ClientSpec] = field(default_factory=dict)
    client_model_init: Callable[[str], PreTrainedModel] | None = None

    @cached_property
    def row_hashes(self) -> dict[str, str]:
        """
        Content hashes of `public_dataset` and `server_dataset`, by argument name.

        The hashes do not cover transforms that run when examples are read (`set_transform`).
        """
        given = {"public_dataset": self.public_dataset, "server_dataset": self.server_dataset}
        for name, rows in given.items():
            if rows is not None and rows.format["type"] == "custom":
                logger.warning(
                    "`%s` has a transform (`set_transform`), which checkpoints cannot compare. Use the same transform "
                    "when you resume, or use `map` instead.",
                    name,
                )
        return {name: content_hash(rows) for name, rows in given.items() if rows is not None}

    @property
    def differ(self) -> bool:
        """Whether clients may have other models than the server."""
        return self.client_model_init is not None or any(spec.has_own_model for spec in self.clients.values())

    @property
    def peft_configs(self) -> dict[str, Any]:
        """The LoRA configurations of the clients that have their own, by client id."""
        return {name: spec.peft_config for name, spec in self.clients.items() if spec.peft_config is not None}

    def tokenizer_of(self, client_id: str, default: Any) -> Any:
        """Return the tokenizer of a client, or `default` if the client has no own tokenizer."""
        spec = self.clients.get(client_id)
        return default if spec is None or spec.processing_class is None else spec.processing_class

    def encode(self, dataset: Any, tokenizer: Any, with_labels: bool = True) -> Any:
        """Encode a dataset for a model with the given tokenizer. Without a task, the dataset is returned unchanged."""
        return dataset if self.task is None else self.task.prepare(dataset, tokenizer, with_labels)

    @property
    def prediction_unit(self) -> str | None:
        """
        The unit of a prediction, see [`Task`]. Without a task, it is `"row"`: models make one prediction per example.
        """
        return "row" if self.task is None else self.task.prediction_unit

    def encode_public(self, tokenizer: Any) -> EncodedPublicDataset:
        """
        Encode the public examples for a model with the given tokenizer, and find the positions of its predictions.
        """
        if self.public_dataset is None:
            raise ValueError("There are no public examples. Pass `public_dataset` to the trainer.")
        if self.task is None:
            return EncodedPublicDataset(self.public_dataset)
        rows = self.task.prepare_public(self.public_dataset, tokenizer)
        if self.task.prediction_unit == "row":
            return EncodedPublicDataset(rows)
        return EncodedPublicDataset(rows, Positions.from_dataset(rows, self.task.labels_are_inputs))


# The trainer arguments that a task fills in, in addition to the datasets.
FROM_TASK = ("data_collator", "compute_metrics", "preprocess_logits_for_metrics")


def encode_for_server(arguments: dict[str, Any], task: Task) -> None:
    """
    Fill in the trainer arguments that a task defines: encoded evaluation examples, data collator and metrics.

    Args:
        arguments (`dict[str, Any]`): Trainer arguments by name. They are changed in place.
        task ([`Task`]): The task of the trainer.

    Raises:
        ValueError: If there is no tokenizer, or if `eval_dataset` is not a dataset.
    """
    tokenizer = arguments.get("processing_class")
    if tokenizer is None:
        raise ValueError("`task` needs the server's tokenizer to encode raw examples. Pass `processing_class`.")
    rows = arguments.get("eval_dataset")
    if isinstance(rows, Dataset):
        features = task.for_evaluation(task.prepare(rows, tokenizer), tokenizer)
        arguments["eval_dataset"] = features
        if arguments.get("compute_metrics") is None:
            arguments["compute_metrics"] = task.build_compute_metrics(tokenizer, features, rows)
            arguments["preprocess_logits_for_metrics"] = task.preprocess_logits_for_metrics
    elif rows is not None:
        raise ValueError(
            f"`eval_dataset` is a {type(rows).__name__}. With `task`, pass a Dataset or a FederatedDataset of raw "
            "examples."
        )
    if arguments.get("data_collator") is None:
        arguments["data_collator"] = task.data_collator(tokenizer, arguments.get("model"))


class EncodedClients(Mapping[str, Any]):
    """
    The clients' examples, encoded with each client's tokenizer on first access and cached.

    Args:
        clients ([`FederatedDataset`]): The raw examples.
        participants ([`Participants`]): Its task encodes the examples.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the clients that have no own tokenizer.
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
    Count the private examples that also are in the public dataset.

    Two examples are equal if they are equal in all columns that the model reads and that both datasets have.

    Args:
        clients ([`FederatedDataset`]): The private examples. Streams are skipped.
        participants ([`Participants`]): Its public dataset is compared. Its task defines the columns that the model
            reads.
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
    """Yield the values of the given columns as comparable strings, in batches of a thousand examples."""
    for batch in rows.select_columns(columns).with_format("arrow").iter(1000):
        yield [repr(list(row.values())) for row in batch.to_pylist()]
