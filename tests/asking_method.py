"""An averaging algorithm with its own messages, additional tensors, metrics and memories in all phases of a round."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_federated import Aggregation, ClientPart, Round
from hf_federated.messages import ClientUpdate, Message
from hf_federated.utils.fields import Count


@dataclass(frozen=True)
class AskNorms(Message):
    """Asks for the norm of each tensor of the client, and for the number of earlier requests."""

    kind: ClassVar[str] = "ask_norms"
    answered_by: ClassVar[str] = "norms"
    max_per_round: ClassVar[int] = 2

    center: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Norms(Message):
    kind: ClassVar[str] = "norms"

    norms: dict[str, torch.Tensor]
    num_asked: Count


class AnswerNorms(ClientPart):
    def answer(self, message: Message) -> Message:
        if not isinstance(message, AskNorms):
            return super().answer(message)
        num_asked = self.memory["num_asked"] = self.memory.get("num_asked", 0) + 1
        state = self.context.model.exchange.read()
        norms = {name: value.norm() for name, value in state.items() if name.endswith("bias")}
        return Norms(message.round, message.client_id, norms, num_asked)

    def send(self, update: ClientUpdate) -> ClientUpdate:
        extra = {"largest": torch.stack([value.abs().max() for value in update.state.values()])}
        metrics = {"num_asked": float(self.memory["num_asked"])}
        return dataclasses.replace(update, extra={**update.extra, **extra}, metrics={**update.metrics, **metrics})


class AskingAverage(Aggregation):
    """
    FedAvg that asks the clients before and after their training, and sends its velocity from the second round on.

    Args:
        reads_values (`bool`, *optional*, defaults to `False`): Whether the server reads values of tensors.
    """

    name: ClassVar[str] = "asking"
    messages: ClassVar[tuple[type[Message], ...]] = (AskNorms, Norms)
    client_part: ClassVar[type[ClientPart]] = AnswerNorms

    def __init__(self, weighting: str = "examples", reads_values: bool = False) -> None:
        super().__init__(weighting)
        self.reads_values = reads_values
        self._velocity: dict[str, torch.Tensor] = {}

    def expected_extra(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"largest": torch.zeros(len(state))}

    def fit_extra(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"velocity of {name}": value for name, value in self._velocity.items()}

    def _ask(self, round: Round, phase: str) -> None:
        center = {name: value for name, value in round.state.items() if name.endswith("bias")}
        replies = round.ask(phase, lambda client_id: AskNorms(round.number, client_id, center))
        if not all(isinstance(reply, Norms) for reply in replies.values()):
            raise TypeError(f"{phase}: {replies}")

    def begin(self, round: Round) -> None:
        self._ask(round, "norms before")

    def finish(self, round: Round) -> dict[str, torch.Tensor]:
        state = super().finish(round)
        if self.reads_values and not all(bool(value.isfinite().all()) for value in state.values()):
            raise ValueError("not finite")
        self._velocity = {name: value - round.state[name] for name, value in state.items()}
        self._ask(round, "norms after")
        return state

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._velocity = dict(state["velocity"])


class NeedsTraining(AnswerNorms):
    """Answers with the loss of the last training, which the client did not keep."""

    def answer(self, message: Message) -> Message:
        loss = self.context.local_trainer.state.log_history[-1]["loss"]
        return Norms(message.round, message.client_id, {"loss": torch.tensor(loss)}, 0)


class NeedsTrainingAverage(AskingAverage):
    name: ClassVar[str] = "needs_training"
    client_part: ClassVar[type[ClientPart]] = NeedsTraining
