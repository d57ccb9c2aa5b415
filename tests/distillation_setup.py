"""A small distillation with three clients of different architectures, public data and labeled data of the server."""

from __future__ import annotations

import os
from typing import Any

import torch
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer
from hf_federated.clients import OwnModels
from hf_federated.messages import Message


SIZES = {"a": 8, "b": 12, "c": 4}
NUM_PUBLIC, BATCH_SIZE, NUM_CLASSES = 10, 4, 2
NUM_BATCHES = -(-NUM_PUBLIC // BATCH_SIZE)

# Every method, with the settings that change its behavior.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("adafd", {"weighting": "enwc"}),
    ("adafd", {"weighting": "rnwc", "center": True}),
    ("cronus", {}),
    ("dsfl", {}),
    ("fedaux", {}),
    ("fedaux", {"dp_epsilon": 0.5, "dp_delta": 1e-5}),
    ("feddf", {}),
    ("feddrs", {"num_samples": 6, "sample_length": 5, "num_steps": 3}),
    ("feded", {}),
    ("fedid", {"feedback": "chain_rule"}),
    ("fedid", {"feedback": "per_example"}),
    ("fedid", {"feedback": "mpl_sampled"}),
    ("fedid", {"feedback": "mpl"}),
    ("fedid", {"feedback": "none"}),
    ("fedkd", {"weighting": "class_counts"}),
    ("fedkd", {"weighting": "size"}),
    ("fedmd", {}),
    ("mhat", {}),
]

# Methods whose clients have the server's architecture.
SHARED_MODEL = ("fedaux", "feddf", "feddrs", "feded")


def client_model(client_id: str) -> Any:
    """A client's own model. The client id decides whether it has one or three layers."""
    return tiny_model(seed=ord(client_id), num_hidden_layers=1 + 2 * (ord(client_id) % 2))


class Recorder(FederatedCallback):
    """
    Record the messages between the server and the clients.

    Args:
        serialize (`bool`, *optional*, defaults to `False`): Whether messages are converted to bytes and back.
    """

    def __init__(self, serialize: bool = False) -> None:
        self.serialize = serialize
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.trainer: Any = None

    def on_round_begin(self, args, state, control, **kwargs):
        engine = self.trainer.engine
        engine.serialize = self.serialize
        if engine.worker.handle.__func__ is type(engine.worker).handle:
            handle = engine.worker.handle

            def recorded(message: Message) -> Message:
                self.sent.append(message)
                reply = handle(message)
                self.received.append(reply)
                return reply

            recorded.__func__ = recorded  # type: ignore[attr-defined]  # the check above reads it
            engine.worker.handle = recorded


def distillation_trainer(
    output_dir: str | os.PathLike[str],
    method: str,
    kwargs: dict[str, Any] | None = None,
    *,
    federation: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    different_models: bool = True,
    record: Recorder | None = None,
    **trainer_kwargs: Any,
) -> FederatedTrainer:
    """
    Build a trainer for a distillation, without training it.

    Args:
        output_dir (`str` or `os.PathLike`): Output directory of the trainer.
        method (`str`): Name in `DISTILLATIONS`.
        kwargs (`dict`, *optional*): Settings of the method.
        federation (`dict`, *optional*): Further fields of `FederatedConfig`.
        args (`dict`, *optional*): Further training arguments.
        different_models (`bool`, *optional*, defaults to `True`): Whether clients have different architectures.
        record (`Recorder`, *optional*): Callback that records the messages.
        trainer_kwargs (`Any`): Further arguments of the trainer. They override the defaults here.
    """
    defaults: dict[str, Any] = {
        "model": tiny_model(),
        "train_dataset": {client_id: rows(size, seed=ord(client_id)) for client_id, size in SIZES.items()},
        "public_dataset": rows(NUM_PUBLIC, seed=5).remove_columns("labels"),
        "server_dataset": rows(6, seed=6),
        "eval_dataset": rows(8, seed=7),
    }
    if method == "feddrs":
        del defaults["public_dataset"], defaults["server_dataset"]
    if different_models and method not in SHARED_MODEL:
        defaults["client_model_init"] = client_model
    trainer = FederatedTrainer(
        args=arguments(output_dir, **(args or {})),
        federation=FederatedConfig(
            distillation=method,
            distillation_kwargs=kwargs,
            **{"num_rounds": 1 if method == "fedkd" else 2, "local_epochs": 2, **(federation or {})},
        ),
        callbacks=[] if record is None else [record],
        **{**defaults, **trainer_kwargs},
    )
    if record is not None:
        record.trainer = trainer
    return trainer


def client_weights(trainer: FederatedTrainer) -> dict[str, dict[str, torch.Tensor]]:
    """Current weights of each client's own model. Empty if the clients share one model."""
    models = trainer.engine.worker.models
    if not isinstance(models, OwnModels):
        return {}
    return {client_id: models.open(client_id).exchange.read() for client_id in trainer.clients}


def same_clients(trainer: FederatedTrainer, other: FederatedTrainer) -> bool:
    """Whether the clients of two trainers have bit-identical models."""
    a, b = client_weights(trainer), client_weights(other)
    return all(torch.equal(a[client_id][name], b[client_id][name]) for client_id in a for name in a[client_id])
