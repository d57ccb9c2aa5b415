"""Building of the models of clients with their own model, tokenizer, arguments and encoded examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ..adapters import Exchange, copy_model, freeze_layers
from ..utils.random import derived_seed, isolated_rng, preserved_generators
from ..utils.selection import Selection
from . import ClientSpec, Student, client_arguments
from .participants import INPUT_IDS, EncodedPublicDataset, Participants


@dataclass(eq=False)
class ClientModelBuilder:
    """
    Builds a client's model as it is before the first round, and a trainer around it.

    The result depends only on the client and the seed of the run, not on the time of the call. A model that was
    evicted from memory can therefore be rebuilt and loaded with its stored values.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        arguments (`dict[str, Any]`): The constructor arguments of the federated trainer by name.
        participants ([`Participants`]): The clients' models, tokenizers and arguments, and the public examples.
        initial (`Mapping[str, torch.Tensor]`): The trainable parameters of the server's model before the first round.
        seed (`int`): Seed of the run.
        exchange (`str`, `Sequence[str]` or `Callable`): Which parameters of a model are trained and stored, as
            `exchange` of [`FederatedConfig`].
        freeze (`str`, *optional*): Which layers of every model are frozen, as `freeze` of [`FederatedConfig`].
        learning_rate (`float`, *optional*): Learning rate of distillation on clients.
        same_vocabulary (`bool`, *optional*, defaults to `True`): Whether all models that predict tokens must have one
            vocabulary.
    """

    trainer: Trainer
    arguments: dict[str, Any]
    participants: Participants
    initial: Mapping[str, torch.Tensor]
    seed: int
    exchange: Selection
    freeze: str | None
    learning_rate: float | None
    same_vocabulary: bool = True
    # Clients with the same tokenizer share the encoded public examples.
    _public: dict[int, tuple[Any, EncodedPublicDataset]] = field(default_factory=dict, init=False)

    def __call__(self, client_id: str) -> tuple[Trainer, Exchange, Student | None]:
        spec = self.participants.clients.get(client_id) or ClientSpec()
        tokenizer = self.participants.tokenizer_of(client_id, self.trainer.processing_class)
        model = self._build_model(client_id, spec)
        predicts_tokens = self.participants.prediction_unit == "token"
        if predicts_tokens and self.same_vocabulary:
            check_vocabulary(client_id, model, self.trainer.model)
        elif not predicts_tokens:
            check_labels(client_id, model, self.trainer.model)
        align_padding(model, tokenizer)
        trainer = self._build_trainer(model, tokenizer, spec)
        exchange = Exchange(trainer.model, self.exchange)
        public = self._encoded_public(tokenizer)
        if public is not None and predicts_tokens and self.same_vocabulary:
            self._check_tokens(client_id, public)
        student = None if public is None else public.student(trainer, self.learning_rate)
        return trainer, exchange, student

    def _build_model(self, client_id: str, spec: ClientSpec) -> nn.Module:
        init = self.participants.client_model_init
        # A new head has random weights. They differ between clients and are the same whenever the model is built.
        with isolated_rng(derived_seed(self.seed, "model", client_id)):
            if isinstance(spec.model, str):
                if self.participants.task is None:
                    raise ValueError(
                        f"The model of client {client_id!r} is the name {spec.model!r}, but there is no `task` to "
                        "load it. Pass a `task` to the trainer, or pass a function that builds the model."
                    )
                model = self.participants.task.load_model(spec.model)
            elif isinstance(spec.model, nn.Module):
                model = copy_model(spec.model)
            elif spec.model is not None:
                model = spec.model()
            elif init is not None:
                model = init(client_id)
            else:
                return self._copy_server_model()
        if self.freeze is not None:
            freeze_layers(model, self.freeze)
        return model

    def _copy_server_model(self) -> nn.Module:
        model = copy_model(self.trainer.model)
        Exchange(model, self.exchange).write(self.initial)
        return model

    def _build_trainer(self, model: nn.Module, tokenizer: Any, spec: ClientSpec) -> Trainer:
        task = self.participants.task
        own: dict[str, Any] = {
            "model": model,
            "processing_class": tokenizer,
            "train_dataset": None,
            "eval_dataset": None,
            "callbacks": None,
            # Messages set the length of local training. The server evaluates, saves checkpoints and uploads.
            "args": client_arguments(spec.args or self.arguments["args"], local_epochs=1, local_steps=None),
        }
        if task is not None and tokenizer is not self.trainer.processing_class:
            own["data_collator"] = task.data_collator(tokenizer, model)
        given = {name: value for name, value in self.arguments.items() if name != "model_init"}
        # The constructor of `Trainer` seeds the global generators.
        with preserved_generators():
            return type(self.trainer)(**{**given, **own})

    def _encoded_public(self, tokenizer: Any) -> EncodedPublicDataset | None:
        if self.participants.public_dataset is None:
            return None
        if id(tokenizer) not in self._public:
            # Keep a reference to the tokenizer, so that its `id()` is not reused.
            self._public[id(tokenizer)] = (tokenizer, self.participants.encode_public(tokenizer))
        return self._public[id(tokenizer)][1]

    def _check_tokens(self, client_id: str, public: EncodedPublicDataset) -> None:
        """
        Raise an error if the client's tokenizer splits public examples into other tokens than the server's tokenizer.
        """
        server_public = self._encoded_public(self.trainer.processing_class)
        if public is server_public or server_public is None or server_public.positions is None:
            return
        column = "labels" if server_public.positions.feeds_labels else INPUT_IDS
        for row, (client_ids, server_ids) in enumerate(
            zip(public.rows[column], server_public.rows[column], strict=False)
        ):
            if list(client_ids) != list(server_ids):
                raise ValueError(
                    f"The tokenizer of client {client_id!r} encodes public example {row} as {list(client_ids)[:8]}, "
                    f"but the server's tokenizer encodes it as {list(server_ids)[:8]}. Predictions of tokens are "
                    "aligned by position. Use the server's tokenizer for all clients."
                )


def align_padding(model: Any, tokenizer: Any) -> None:
    """
    Set the model's padding token to the padding token of its tokenizer.

    `Trainer.train` also does so. However, a model that is rebuilt predicts before it trains again, and a decoder with
    a classification head needs the padding token to find the last token of an example.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The client's model. Models of other classes are not changed.
        tokenizer (`PreTrainedTokenizerBase`): The client's tokenizer.
    """
    if isinstance(model, (PreTrainedModel, PeftModel)) and isinstance(tokenizer, PreTrainedTokenizerBase):
        if tokenizer.pad_token_id is not None:
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def check_labels(client_id: str, model: Any, server_model: Any) -> None:
    """
    Check that a client's model has the same labels as the server's model, in the same order.

    Args:
        client_id (`str`): Id of the client.
        model (`PreTrainedModel`): The client's model.
        server_model (`PreTrainedModel`): The server's model.

    Raises:
        ValueError: If the labels differ in number or order. The message names the client and both orders.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(server_model, PreTrainedModel):
        return
    labels, server_labels = model.config.id2label, server_model.config.id2label
    unnamed = {f"LABEL_{number}" for number in range(max(len(labels), len(server_labels)))}
    if len(labels) == len(server_labels) and (
        labels == server_labels or {*labels.values()} <= unnamed or {*server_labels.values()} <= unnamed
    ):
        return
    raise ValueError(
        f"The model of client {client_id!r} has the labels {list(labels.values())}, but the server's model has the "
        f"labels {list(server_labels.values())}. Predictions are aligned by class index. Give all models the same "
        "labels in the same order (`id2label` and `label2id` of their configs)."
    )


def check_given_models(participants: Participants, server_model: Any) -> None:
    """
    Run [`check_labels`] for the models that exist when a trainer is constructed.

    Models given by name or function are checked when they are first built, which is in the first round in which the
    client participates.

    Args:
        participants ([`Participants`]): The clients and their models.
        server_model (`PreTrainedModel`): The server's model.
    """
    for client_id, spec in participants.clients.items():
        check_labels(client_id, spec.model, server_model)


def check_vocabulary(client_id: str, model: Any, server_model: Any) -> None:
    """
    Check that a client's model has the same vocabulary size as the server's model.

    Args:
        client_id (`str`): Id of the client.
        model (`PreTrainedModel`): The client's model.
        server_model (`PreTrainedModel`): The server's model.

    Raises:
        ValueError: If the vocabulary sizes differ.
    """
    size, server_size = (each.config.get_text_config(decoder=True).vocab_size for each in (model, server_model))
    if size != server_size:
        raise ValueError(
            f"The model of client {client_id!r} has a vocabulary of {size} tokens, but the server's model has "
            f"{server_size}. Predictions of tokens are aligned by token id. Give all models the same vocabulary. If "
            "only the padding of the vocabulary differs, call `resize_token_embeddings`."
        )


def check_tokenizers(participants: Participants, server_tokenizer: Any) -> None:
    """
    Check that all clients have the vocabulary of the server's tokenizer. Predictions of tokens require it.

    Args:
        participants ([`Participants`]): The clients and their tokenizers.
        server_tokenizer (`PreTrainedTokenizerBase`): The server's tokenizer.

    Raises:
        ValueError: If a vocabulary differs. The message names the client.
    """
    server_vocab = server_tokenizer.get_vocab()
    for client_id, spec in participants.clients.items():
        if spec.processing_class is None or spec.processing_class is server_tokenizer:
            continue
        vocab = spec.processing_class.get_vocab()
        if vocab != server_vocab:
            token = next(token for token in [*vocab, *server_vocab] if vocab.get(token) != server_vocab.get(token))
            raise ValueError(
                f"The tokenizer of client {client_id!r} has another vocabulary than the server's tokenizer: {token!r} "
                f"has the id {vocab.get(token)} for the client and {server_vocab.get(token)} for the server. "
                "Predictions of tokens are aligned by token id. Use the server's tokenizer for all clients. "
                "Distillation of tags and labels supports different tokenizers."
            )
