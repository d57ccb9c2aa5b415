"""Building the models of clients that keep their own model, with its tokenizer, arguments and encoded examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ..adapters import Exchange, copy_model, freeze_layers
from ..utils.random import derived_seed, isolated_rng, preserved_generators
from . import ClientSpec, Student, client_arguments
from .participants import INPUT_IDS, Participants, PublicRowsEncoded


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
        with isolated_rng(derived_seed(self._seed, "model", client_id)):
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
