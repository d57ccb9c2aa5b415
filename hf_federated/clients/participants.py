"""The models that clients have of their own, each with its tokenizer and arguments, and their rows encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.utils import logging

from ..adapters import Exchange, copy_model, freeze_layers
from ..data import FederatedDataset
from ..data.source import content_hash
from ..tasks import Task
from ..utils.random import derived_seed, own_draws, preserved_generators
from . import ClientSpec, Student, client_arguments
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


class ClientModelBuilder:
    """
    Builds what a client trains: its model as it is before the first round, and a trainer around it.

    What it builds depends on the client and the run's seed alone, and not on when it is built, so that a model which
    was put away can be built again and given its values.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        arguments (`dict[str, Any]`): What its class was constructed with, by name.
        participants ([`Participants`]): What clients have.
        initial (`Mapping[str, torch.Tensor]`): What trains of the server's model, before the first round.
        seed (`int`): Of the run.
        exchange (`str`): What of a model trains and is kept, as `exchange` of [`FederatedConfig`].
        freeze (`str`, *optional*): What is frozen of every model.
        learning_rate (`float`, *optional*): Of the clients' distillation.
    """

    def __init__(
        self,
        trainer: Trainer,
        arguments: dict[str, Any],
        participants: Participants,
        initial: Mapping[str, torch.Tensor],
        seed: int,
        exchange: str,
        freeze: str | None,
        learning_rate: float | None,
    ) -> None:
        self._trainer = trainer
        self._arguments = arguments
        self._participants = participants
        self._initial = initial
        self._seed = seed
        self._exchange = exchange
        self._freeze = freeze
        self._learning_rate = learning_rate
        # Clients with one tokenizer share the encoded public rows.
        self._public: dict[int, tuple[Any, PublicRowsEncoded]] = {}

    def __call__(self, client_id: str) -> tuple[Trainer, Exchange, Student | None]:
        spec = self._participants.clients.get(client_id) or ClientSpec()
        tokenizer = self._participants.tokenizer_of(client_id, self._trainer.processing_class)
        model = self._model(client_id, spec)
        if self._participants.prediction_unit == "token":
            check_vocabulary(client_id, model, self._trainer.model)
        else:
            check_labels(client_id, model, self._trainer.model)
        align_padding(model, tokenizer)
        trainer = self._build_trainer(model, tokenizer, spec)
        exchange = Exchange(trainer.model, self._exchange)
        public = self._public_rows(tokenizer)
        if public is not None and self._participants.prediction_unit == "token":
            self._check_tokens(client_id, public)
        student = None if public is None else public.student(trainer, self._learning_rate)
        return trainer, exchange, student

    def _model(self, client_id: str, spec: ClientSpec) -> nn.Module:
        init = self._participants.client_model_init
        if spec.model is None and init is None:
            return self._copy_of_servers()
        # A head that is drawn is another one for every client, and the same whenever it is drawn.
        with own_draws(derived_seed(self._seed, "model", client_id)):
            if isinstance(spec.model, str):
                if self._participants.task is None:
                    raise ValueError(
                        f"The model of client {client_id!r} is {spec.model!r}, a name, which nothing says how to "
                        "load: give the trainer a `task`, or a function that makes the model."
                    )
                model = self._participants.task.load_model(spec.model)
            elif isinstance(spec.model, nn.Module):
                model = copy_model(spec.model)
            elif spec.model is not None:
                model = spec.model()
            else:
                assert init is not None
                model = init(client_id)
        if self._freeze is not None:
            freeze_layers(model, self._freeze)
        return model

    def _copy_of_servers(self) -> nn.Module:
        model = copy_model(self._trainer.model)
        Exchange(model, self._exchange).write(self._initial)
        return model

    def _build_trainer(self, model: nn.Module, tokenizer: Any, spec: ClientSpec) -> Trainer:
        task = self._participants.task
        own: dict[str, Any] = {
            "model": model,
            "processing_class": tokenizer,
            "train_dataset": None,
            "eval_dataset": None,
            "callbacks": None,
            # How long it trains is said with each message; evaluations, checkpoints and uploads are the server's.
            "args": client_arguments(spec.args or self._arguments["args"], local_epochs=1, local_steps=None),
        }
        if task is not None and tokenizer is not self._trainer.processing_class:
            own["data_collator"] = task.data_collator(tokenizer, model)
        given = {name: value for name, value in self._arguments.items() if name != "model_init"}
        # A trainer's constructor seeds the global generators.
        with preserved_generators():
            return type(self._trainer)(**{**given, **own})

    def _public_rows(self, tokenizer: Any) -> PublicRowsEncoded | None:
        if self._participants.public_dataset is None:
            return None
        if id(tokenizer) not in self._public:
            # The tokenizer is kept with them, so that no other one can get its number.
            self._public[id(tokenizer)] = (tokenizer, self._participants.encode_public(tokenizer))
        return self._public[id(tokenizer)][1]

    def _check_tokens(self, client_id: str, public: PublicRowsEncoded) -> None:
        """Refuse a client whose tokenizer cuts public rows into other tokens than the server's."""
        servers = self._public_rows(self._trainer.processing_class)
        assert servers is not None and servers.positions is not None
        if public is servers:
            return
        column = "labels" if servers.positions.feeds_labels else INPUT_IDS
        for row, (ours, theirs) in enumerate(zip(public.rows[column], servers.rows[column], strict=False)):
            if list(ours) != list(theirs):
                raise ValueError(
                    f"The tokenizer of client {client_id!r} makes {list(ours)[:8]} of public row {row}, and the "
                    f"server's {list(theirs)[:8]}. Predictions of tokens are aligned by place: all clients need the "
                    "server's tokenizer."
                )


def align_padding(model: Any, tokenizer: Any) -> None:
    """
    Let a model take for padding what its tokenizer pads with. `Trainer.train` does so too, but a model that was put
    away and is built again predicts before it trains again, and a decoder that classifies reads its last token.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The client's. Others are left alone.
        tokenizer (`PreTrainedTokenizerBase`): The client's.
    """
    if isinstance(model, (PreTrainedModel, PeftModel)) and isinstance(tokenizer, PreTrainedTokenizerBase):
        if tokenizer.pad_token_id is not None:
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def check_labels(client_id: str, model: Any, servers: Any) -> None:
    """
    Refuse a client whose model tells other classes apart than the server's, or in another order.

    Args:
        client_id (`str`): The client.
        model (`PreTrainedModel`): Its model.
        servers (`PreTrainedModel`): The server's model.

    Raises:
        ValueError: If the labels differ in number or order. The message names the client and both orders.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(servers, PreTrainedModel):
        return
    here, there = model.config.id2label, servers.config.id2label
    unnamed = {f"LABEL_{number}" for number in range(max(len(here), len(there)))}
    if len(here) == len(there) and (here == there or {*here.values()} <= unnamed or {*there.values()} <= unnamed):
        return
    raise ValueError(
        f"The model of client {client_id!r} has the labels {list(here.values())}, and the server's has "
        f"{list(there.values())}. Predictions are aligned by place: give all models the same labels in the same order "
        "(`id2label` and `label2id` of their configs)."
    )


def check_given_models(participants: Participants, servers: Any) -> None:
    """
    [`check_labels`] of the models that there are when a trainer is constructed. Those that a name or a function stands
    for are compared when they are first built, which is in the first round that asks the client.

    Args:
        participants ([`Participants`]): Whose clients differ.
        servers (`PreTrainedModel`): The server's model.
    """
    for client_id, spec in participants.clients.items():
        check_labels(client_id, spec.model, servers)


def check_vocabulary(client_id: str, model: Any, servers: Any) -> None:
    """
    Refuse a client whose model predicts another number of tokens than the server's.

    Args:
        client_id (`str`): The client.
        model (`PreTrainedModel`): Its model.
        servers (`PreTrainedModel`): The server's model.

    Raises:
        ValueError: If so.
    """
    here, there = (each.config.get_text_config(decoder=True).vocab_size for each in (model, servers))
    if here != there:
        raise ValueError(
            f"The model of client {client_id!r} predicts {here} tokens, and the server's {there}. Predictions of "
            "tokens are aligned by place: give all models one vocabulary (`resize_token_embeddings` where only the "
            "padding differs)."
        )


def check_tokenizers(participants: Participants, servers: Any) -> None:
    """
    Refuse clients that number tokens otherwise than the server, where predictions are about tokens.

    Args:
        participants ([`Participants`]): What clients have.
        servers (`PreTrainedTokenizerBase`): The server's tokenizer.

    Raises:
        ValueError: If so. The message names the client.
    """
    there = servers.get_vocab()
    for client_id, spec in participants.clients.items():
        if spec.processing_class is None or spec.processing_class is servers:
            continue
        here = spec.processing_class.get_vocab()
        if here != there:
            token = next(token for token in [*here, *there] if here.get(token) != there.get(token))
            raise ValueError(
                f"The tokenizer of client {client_id!r} has another vocabulary than the server's: {token!r} is number "
                f"{here.get(token)} here and {there.get(token)} there. Predictions of tokens are aligned by place: "
                "give all clients the server's tokenizer. Tags and labels can be distilled between any tokenizers."
            )


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
