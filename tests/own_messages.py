"""Messages with kinds that the library does not know, and clients that answer them without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_federated.clients import Agreement, MemoryStore
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import Engine, EngineContext, Plan
from hf_federated.messages import Message, kinds_of
from hf_federated.utils.fields import Count


@dataclass(frozen=True)
class AskSum(Message):
    """Asks for the sum of the values, times a factor."""

    kind: ClassVar[str] = "ask_sum"
    answered_by: ClassVar[str] = "sum"

    values: dict[str, torch.Tensor]
    factor: Count = 1


@dataclass(frozen=True)
class Sum(Message):
    kind: ClassVar[str] = "sum"

    value: torch.Tensor


OWN_KINDS = kinds_of(AskSum, Sum)


def ask_sum(client_id: str, round: int = 0) -> AskSum:
    return AskSum(round, client_id, {"x": torch.arange(3.0), "y": torch.ones(2)}, factor=len(client_id))


def answer(message: Message) -> Message:
    assert isinstance(message, AskSum)
    total = message.factor * sum(value.sum() for value in message.values.values())
    return Sum(message.round, message.client_id, total, nonce=message.nonce)


class SumWorker:
    """The clients of a process. Each client answers with the sum."""

    def __init__(self, models: Any = None) -> None:
        self.models: Any = MemoryStore() if models is None else models
        self.last_error: Exception | None = None
        self.last_metrics, self.secure, self.shards = None, None, None
        self.agreement = Agreement([], num_rounds=2)

    def handle(self, message: Message) -> Message:
        return answer(message)


def sums_of(engine: Engine, clients: Sequence[str] = ("a", "bb", "ccc"), **context: Any) -> dict[str, float]:
    """Ask all clients, and return their replies on each rank."""
    given = {"parallelism": "clients", "kinds": OWN_KINDS, **context}
    engine.start(EngineContext(SumWorker, dict.fromkeys(clients, 1.0), processes=process_group(), **given))
    replies = engine.collect(Plan(0, tuple(clients), ask_sum))
    assert all(type(reply) is Sum for reply in replies.values())
    return {client_id: reply.value.item() for client_id, reply in replies.items() if isinstance(reply, Sum)}
