"""Methods with one deliberate fault each, for the tests of the conformance kit."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_federated import Aggregation, ClientPart, Distillation, DistillationPart, FedAvg
from hf_federated.distillation import soft_cross_entropy
from hf_federated.messages import Message
from hf_federated.methods import Accumulator
from hf_federated.utils.weighted_mean import State


# ---- A method without a fault


@dataclass(frozen=True)
class AskCount(Message):
    """Asks for the number of examples."""

    kind: ClassVar[str] = "ask_count"
    answered_by: ClassVar[str] = "count"


@dataclass(frozen=True)
class Count(Message):
    """The number of examples, and how often the server has asked."""

    kind: ClassVar[str] = "count"

    num_examples: int
    num_questions: int


class CountingPart(ClientPart):
    def answer(self, message: Message) -> Message:
        self.memory["questions"] = self.memory.get("questions", 0) + 1
        return Count(message.round, message.client_id, len(self.context.open_dataset()), self.memory["questions"])


class Counting(Aggregation):
    """Moves the state by a share of the mean change that depends on the answers of the clients, and on its rounds."""

    messages: ClassVar[tuple[type[Message], ...]] = (AskCount, Count)
    client_part: ClassVar[type[ClientPart]] = CountingPart

    def __init__(self, largest_share: float = 0.9, weighting: str = "examples") -> None:
        super().__init__(weighting)
        self.largest_share = largest_share
        self._share = 0.0
        self._num_rounds = 0

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._num_rounds = 0

    def begin(self, round: Any) -> None:
        answers = round.ask("count", lambda client_id: AskCount(round.number, client_id)).values()
        largest = max(answer.num_examples / answer.num_questions for answer in answers)
        self._share = self.largest_share * largest / (1 + largest + self._num_rounds)

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        self._num_rounds += 1
        mean = accumulator.mean.finalize()
        return {name: torch.lerp(value, mean[name], self._share) for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"num_rounds": self._num_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_rounds = state["num_rounds"]


# ---- Faults of the server half


class LosesArgument(Counting):
    def __init__(self, largest_share: float = 0.9, momentum: float = 0.5) -> None:
        super().__init__(largest_share)
        self._momentum = momentum


class ForgetsState(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class DependsOnOrder(FedAvg):
    """Adds a part of the update that arrived last."""

    def accumulate(self, accumulator: Accumulator, update: Any) -> None:
        super().accumulate(accumulator, update)
        self._last = update.state

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        return {name: torch.lerp(value, self._last[name], 0.1) for name, value in accumulator.mean.finalize().items()}


class RefusesRanks(FedAvg):
    """A method without a fault that does not run on ranks."""

    refused_engines: ClassVar[dict[str, str]] = {"RankEngine": "it needs one process. Use LocalEngine."}


class RefusesNothing(RefusesRanks):
    """Does not raise the error that it declares."""

    def check_engine(self, engine: str) -> None:
        pass


# ---- Faults of the client half


class ReadsServerPart(ClientPart):
    def receive(self, message: Any) -> None:
        self.scale = ReadsServer.rounds_of_server

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Any) -> torch.Tensor:
        return loss * (1 + self.scale)


class ReadsServer(FedAvg):
    """Its client half reads a class attribute that the server changes."""

    client_part: ClassVar[type[ClientPart]] = ReadsServerPart
    rounds_of_server: ClassVar[int] = 0

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        ReadsServer.rounds_of_server += 1
        return super().aggregate(accumulator, state)


class ScalesLossPart(ClientPart):
    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Any) -> torch.Tensor:
        return loss * (1 + self.method.scale)


class SharesInstance(FedAvg):
    """Its client half is on the instance of the server, which changes."""

    client_part: ClassVar[type[ClientPart]] = ScalesLossPart
    scale = 0

    def on_client(self) -> SharesInstance:
        return self

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        self.scale += 1
        return super().aggregate(accumulator, state)


class KeepsOnInstancePart(ClientPart):
    def receive(self, message: Any) -> None:
        seen = self.method.seen
        seen[message.client_id] = seen.get(message.client_id, 0) + 1
        self.scale = seen[message.client_id]

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Any) -> torch.Tensor:
        return loss * self.scale


class KeepsOnInstance(FedAvg):
    """Its client half counts its rounds in an attribute of the method instead of its memory."""

    client_part: ClassVar[type[ClientPart]] = KeepsOnInstancePart

    def __init__(self, weighting: str = "examples") -> None:
        super().__init__(weighting)
        self.seen: dict[str, int] = {}


class ReadsOtherClientsPart(ClientPart):
    def receive(self, message: Any) -> None:
        datasets = self.context.model.trainer.train_dataset
        self.scale = float(datasets["client 1"][0]["labels"] + datasets["client 3"][0]["input_ids"][0])

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Any) -> torch.Tensor:
        return loss * (1 + self.scale)


class ReadsOtherClients(FedAvg):
    """Its client half reads the examples of other clients, which are in the same process in a simulation."""

    client_part: ClassVar[type[ClientPart]] = ReadsOtherClientsPart


class ContinuesLocallyPart(ClientPart):
    def receive(self, message: Any) -> None:
        model = self.context.model.trainer.model
        self.before = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_gradients(self, parameters: Any) -> None:
        for name, parameter in parameters.items():
            parameter.grad += 0.1 * (parameter.detach() - self.before[name])


class ContinuesLocally(FedAvg):
    """Its client half pulls the weights towards those that the model has before it receives the global state."""

    client_part: ClassVar[type[ClientPart]] = ContinuesLocallyPart
    needs_gradients: ClassVar[bool] = True


class ChangesMessagePart(ClientPart):
    def receive(self, message: Any) -> None:
        for value in message.state.values():
            value.mul_(0.9)


class ChangesMessage(FedAvg):
    """Its client half changes the tensors of the message, which clients of one process share."""

    client_part: ClassVar[type[ClientPart]] = ChangesMessagePart


class WrongDtypePart(ClientPart):
    def send(self, update: Any) -> Any:
        return dataclasses.replace(update, state={name: value.double() for name, value in update.state.items()})


class WrongDtype(FedAvg):
    client_part: ClassVar[type[ClientPart]] = WrongDtypePart


class GlobalGeneratorPart(ClientPart):
    def receive(self, message: Any) -> None:
        self.scale = random.random()

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Any) -> torch.Tensor:
        return loss * self.scale


class GlobalGenerator(FedAvg):
    """Its client half draws from the global generator of Python, which is seeded inside the training only."""

    client_part: ClassVar[type[ClientPart]] = GlobalGeneratorPart


# ---- Faults of messages


@dataclass(frozen=True)
class AskLarge(Message):
    kind: ClassVar[str] = "ask_large"
    answered_by: ClassVar[str] = "large"


@dataclass(frozen=True)
class Large(Message):
    """The changes of a client that are larger than 0.001."""

    kind: ClassVar[str] = "large"

    values: torch.Tensor


class SendsLargePart(ClientPart):
    def receive(self, message: Any) -> None:
        self.before = message.state

    def send(self, update: Any) -> Any:
        changes = torch.cat([(value - self.before[name]).flatten() for name, value in update.state.items()])
        self.memory["large"] = changes[changes > 1e-3]
        return update

    def answer(self, message: Message) -> Message:
        return Large(message.round, message.client_id, self.memory["large"])


class SendsLarge(FedAvg):
    """The bytes of its messages depend on the training."""

    messages: ClassVar[tuple[type[Message], ...]] = (AskLarge, Large)
    client_part: ClassVar[type[ClientPart]] = SendsLargePart

    def finish(self, round: Any) -> State:
        replies = round.ask("large changes", lambda client_id: AskLarge(round.number, client_id))
        round.logs["num_large"] = float(sum(len(reply.values) for reply in replies.values()))
        return super().finish(round)


class UndeclaredReply(Counting):
    messages: ClassVar[tuple[type[Message], ...]] = (AskCount,)


# ---- Faults of a distillation


@dataclass(kw_only=True, repr=False, eq=False)
class MeanOfLogits(Distillation):
    """A distillation without a fault."""

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets.softmax(-1))

    def ensemble(self, predictions: Any, cohort: Any) -> torch.Tensor:
        return sum(logits.double() for logits in predictions.values()).float() / len(predictions)


class SoftTargetsPart(DistillationPart):
    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Any) -> torch.Tensor:
        return soft_cross_entropy(logits, targets.softmax(-1))


@dataclass(kw_only=True, repr=False, eq=False)
class Distilling(MeanOfLogits):
    client_part: ClassVar[type[ClientPart]] = SoftTargetsPart


UNSEEDED = np.random.default_rng()


class UnseededLossPart(SoftTargetsPart):
    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Any) -> torch.Tensor:
        return super().client_loss(logits, targets, settings) * (0.5 + UNSEEDED.random())


@dataclass(kw_only=True, repr=False, eq=False)
class UnseededLoss(MeanOfLogits):
    """The loss of its clients draws from a generator without a seed."""

    client_part: ClassVar[type[ClientPart]] = UnseededLossPart
