"""The federations of the conformance suite: one for each registered algorithm, and dummies that use every hook."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import TrainerCallback

from hf_federated import (
    AGGREGATIONS,
    DISTILLATIONS,
    Aggregation,
    ClientPart,
    Distillation,
    DistillationPart,
    Round,
)
from hf_federated.aggregation import Accumulator, WeightedMean
from hf_federated.codecs import EXCHANGE_CODECS
from hf_federated.distillation import Requirements
from hf_federated.messages import ClientUpdate, Fit, Message
from hf_federated.postprocessing import ClipUpdate, Postprocessor
from hf_federated.secure_aggregation import SECURE_AGGREGATIONS
from hf_federated.testing.scenario import Scenario


REFERENCE = "local"
# This engine serializes messages and has several processes. Tests with the other engines are marked slow.
STRICTEST = "2 serialized ranks"


@dataclass(frozen=True)
class Question(Message):
    """A message of `EveryAggregationHook` only."""

    kind: ClassVar[str] = "question"
    answered_by: ClassVar[str] = "answer"
    max_per_round: ClassVar[int] = 2

    factor: float


@dataclass(frozen=True)
class Answer(Message):
    kind: ClassVar[str] = "answer"

    values: dict[str, torch.Tensor]


class EveryAggregationPart(ClientPart):
    """Client half of `EveryAggregationHook`."""

    _steps = 0
    _rate = 0.0

    def receive(self, message: Fit) -> None:
        self._message = message

    def answer(self, message: Question) -> Message:
        number = self.memory["answers"] = self.memory.get("answers", 0) + 1
        size = message.factor * len(self.context.open_dataset())
        return Answer(message.round, message.client_id, {"number": torch.tensor(number), "size": torch.tensor(size)})

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, "output_hidden_states": True}

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        penalty = outputs["hidden_states"][-1].square().mean()
        return self._message.settings["scale"] * loss + 1e-2 * penalty * float(self._message.extra["shift"].sum())

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad += self.method.pull * (parameter.detach() - self._message.state[name])

    def on_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._steps += 1
        self._rate += param_groups[0]["lr"]

    def send(self, update: ClientUpdate) -> ClientUpdate:
        seen = self.memory["seen"] = self.memory.get("seen", 0) + self._steps
        offset = self.memory.get("offset", torch.zeros(2)) + torch.tensor([1.0, self._rate])
        self.memory["offset"] = offset
        extra = {"steps": torch.tensor([float(self._steps), float(offset[1])]), "seen": torch.tensor(seen)}
        return dataclasses.replace(update, extra={**update.extra, **extra})


class EveryAggregationHook(Aggregation):
    """Overrides every hook of an averaging algorithm, so that each of them changes the result."""

    name: ClassVar[str] = "every_aggregation_hook"
    client_part: ClassVar[type[ClientPart]] = EveryAggregationPart
    messages: ClassVar[tuple[type[Message], ...]] = (Question, Answer)
    needs_gradients: ClassVar[bool] = True

    def __init__(self, weighting: str = "tokens", pull: float = 0.1) -> None:
        super().__init__(weighting)
        self.pull = pull
        self._velocity: dict[str, torch.Tensor] = {}
        self._rounds = 0
        self._num_clients = 0

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._velocity, self._rounds, self._num_clients = {}, 0, num_clients

    def postprocessors(self) -> list[Postprocessor]:
        return [ClipUpdate(0.05)]

    def begin(self, round: Round) -> None:
        self._answered = self._ask(round, "first questions", 0.1)

    def finish(self, round: Round) -> dict[str, torch.Tensor]:
        round.logs["answered"] = self._ask(round, "last questions", self._answered)
        return super().finish(round)

    def _ask(self, round: Round, phase: str, factor: float) -> float:
        replies = round.ask(phase, lambda client_id: Question(round.number, client_id, factor)).values()
        values = [reply.values for reply in replies if isinstance(reply, Answer)]
        return sum(float(each["number"] * each["size"]) for each in values) / len(values)

    def fit_settings(self) -> dict[str, Any]:
        return {"scale": 1.0 + self._rounds / 7}

    def fit_extra(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"shift": torch.tensor([0.01 * self._rounds, 0.02])}

    def expected_extra(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"steps": torch.zeros(2), "seen": torch.zeros((), dtype=torch.int64)}

    def check_extra(self, extra: Mapping[str, torch.Tensor]) -> None:
        if extra["steps"][0] < 1:
            raise ValueError("no step")

    def weight(self, update: ClientUpdate) -> float:
        return super().weight(update) + update.num_steps

    def accumulator(self, state: dict[str, torch.Tensor], extra: dict[str, torch.Tensor] | None = None) -> Accumulator:
        accumulator = super().accumulator(state, extra)
        accumulator.means["squares"] = WeightedMean({name: value.double() for name, value in state.items()})
        accumulator.means["counts"] = WeightedMean({"examples": torch.zeros(1), "first": torch.zeros(1).long()})
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        super().accumulate(accumulator, update)
        squares = {name: value.double().square() for name, value in update.state.items()}
        accumulator.means["squares"].add(squares, float(update.num_examples))
        counts = {"examples": torch.tensor([float(update.num_examples)]), "first": torch.tensor([update.num_examples])}
        accumulator.means["counts"].add(counts, 1.0)

    def aggregate(self, accumulator: Accumulator, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._rounds += 1
        squares, counts = accumulator.means["squares"], accumulator.means["counts"]
        factor = 1e-2 * self._answered + float(counts.mean_of("examples")) / (
            accumulator.num_updates * self._num_clients
        )
        factor += float(accumulator.extra.mean_of("steps")[1]) + 1e-3 * int(counts.mean_of("first"))
        result = {}
        for name, mean in accumulator.mean.finalize().items():
            spread = (squares.mean_of(name) - mean.double().square()).clamp(min=0).sqrt().to(mean)
            velocity = self._velocity.get(name, torch.zeros_like(mean)) * 0.5 + (mean - state[name])
            self._velocity[name] = velocity
            result[name] = state[name] + velocity * (1 + 1e-2 * factor) + 1e-3 * spread
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self._velocity, "rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._velocity, self._rounds = dict(state["velocity"]), state["rounds"]


class CountBatches(TrainerCallback):
    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1


class EveryDistillationPart(DistillationPart):
    """Client half of `EveryDistillationHook`."""

    _num_batches = 0

    def receive(self, message):
        self._counter = CountBatches()
        self.callbacks = (self._counter,)
        model = self.context.model.trainer.model
        self.frozen = [parameter for name, parameter in model.named_parameters() if name.endswith("LayerNorm.bias")]
        self.memory["rounds"] = self.memory.get("rounds", 0) + 1
        self.memory["size"] = torch.tensor(len(self.context.open_dataset()))

    def on_batch(self, model, inputs, num_items):
        self._num_batches += 1

    def send(self, update):
        batches = float(self._num_batches + self._counter.num_steps + self.memory["rounds"])
        return dataclasses.replace(update, metrics={**update.metrics, "batches": batches})

    def client_loss(self, logits, targets, settings):
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()

    def answer(self, message):
        self.memory["answers"] = self.memory.get("answers", 0) + 1
        return super().answer(message)


@dataclass(kw_only=True, repr=False, eq=False)
class EveryDistillationHook(Distillation):
    """Overrides every hook of a distillation in which clients keep their parameters."""

    name: ClassVar[str] = "every_distillation_hook"
    broadcasts: ClassVar[str] = "probabilities"
    client_part: ClassVar[type[ClientPart]] = EveryDistillationPart

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._total = torch.zeros(1)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, server_dataset=True)

    def setup(self, num_rounds: int) -> None:
        self._total = torch.zeros(1)

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        if metrics["batches"] < 1:
            raise ValueError("no batch")

    def accept(self, round: Round, update: ClientUpdate) -> None:
        if update.state:
            raise ValueError("a client that keeps its parameters sent some")

    def ensemble(self, predictions, cohort):
        weights = {client_id: cohort.metrics[client_id]["batches"] for client_id in predictions}
        mean = sum(predictions[name].double() * weight for name, weight in weights.items()) / sum(weights.values())
        self._total = self._total + mean.abs().sum().float()
        return (self.power * mean.float()).softmax(-1)

    def server_loss(self, logits, targets):
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()

    def broadcast(self, ensemble, server):
        return (ensemble + server.predict().softmax(-1)) / 2

    def state_dict(self) -> dict[str, Any]:
        return {"total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._total = state["total"]


AGGREGATION_NAMES = [*AGGREGATIONS, EveryAggregationHook.name]
# A method on a base model whose weights cannot be written.
DTYPES = {"fedex_lora bfloat16": "bfloat16"}
AGGREGATION_NAMES += DTYPES
DISTILLATION_NAMES = [*DISTILLATIONS, EveryDistillationHook.name]
SCENARIOS = [f"aggregation {name}" for name in AGGREGATION_NAMES]
SCENARIOS += [f"distillation {name}" for name in DISTILLATION_NAMES]
SCENARIOS += [f"secure_aggregation {name}" for name in SECURE_AGGREGATIONS]
SCENARIOS += [f"exchange_codec {name}" for name in EXCHANGE_CODECS]

# Algorithms that run in the slow tests only. The engines handle FedExP like `fednova`, which has a further mean too,
# the robust aggregations like `median`, whose updates are on disk too, the LoRA methods like `fedex_lora`, whose
# clients receive other tensors and send a part of the state, and these distillations like `dsfl`, whose clients also
# send predictions only.
ROBUST_AGGREGATIONS = ("trimmed_mean", "geometric_median", "krum", "norm_bounded_mean", "centered_clipping", "fltrust")
LORA_AGGREGATIONS = ("fedit", "ffa_lora", "rolora", "fedsvd", "stacked_lora", *DTYPES)
SLOW_AGGREGATIONS = ("fedexp", "fednova", "local_only", *ROBUST_AGGREGATIONS, *LORA_AGGREGATIONS)
SLOW_DISTILLATIONS = ("cronus", "dsfl", "feddf", "feded", "fedkd", "fedmd", "mhat")
SLOW_SCENARIOS = {f"aggregation {name}" for name in SLOW_AGGREGATIONS}
SLOW_SCENARIOS |= {f"distillation {name}" for name in SLOW_DISTILLATIONS}
# PowerSGD keeps the most between rounds.
SLOW_SCENARIOS |= {f"exchange_codec {name}" for name in EXCHANGE_CODECS if name != "powersgd"}
SLOW_SCENARIOS |= {f"secure_aggregation {name}" for name in ("secagg+", "lightsecagg")}

# Arguments, fields of the configuration and training arguments without which an algorithm does not run, or too long.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "feddrs": {"num_samples": 3, "sample_length": 4, "num_steps": 2},
    "fedopt": {"server_optimizer": "adam", "server_lr": 0.01},
    # A cohort of four clients allows no hostile client.
    "norm_bounded_mean": {"max_norm": 0.05},
    "krum": {"num_hostile": 0, "num_selected": 2},
    "median": {"server_optimizer": "momentum", "max_memory_mb": 0.01},
    # The clients of the tests have no certificates.
    **{
        name: {"max_weight": 15, "min_survivors": 2, "pins": "none", "bits": 32}
        for name in ("secagg", "secagg+", "lightsecagg")
    },
}
FEDERATIONS: dict[str, dict[str, Any]] = {
    "fedkd": {"num_rounds": 1},
    # Each client evaluates with its own head.
    "fedper": {"evaluate_clients": True, "client_store": "disk"},
    "fednova": {"client_optimizer_state": "reset"},
    "fedsvd": {"client_optimizer_state": "reset"},
    "stacked_lora": {"client_optimizer_state": "reset"},
    "median": {"report_anomalies": True},
    "secagg": {"aggregation": "scaffold"},
}
TRAININGS: dict[str, dict[str, Any]] = {
    "fednova": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.05},
    "scaffold": {"optim": "sgd", "learning_rate": 0.05},
}
DUMMIES = {cls.name: f"{__name__}:{cls.__name__}" for cls in (EveryAggregationHook, EveryDistillationHook)}


def scenario(name: str) -> Scenario:
    """The federation of an algorithm, by its name in `SCENARIOS`."""
    family, _, algorithm = name.partition(" ")
    return Scenario(
        family,
        DUMMIES.get(algorithm, algorithm.partition(" ")[0]),
        ARGUMENTS.get(algorithm, {}),
        FEDERATIONS.get(algorithm, {}),
        TRAININGS.get(algorithm, {}),
        DTYPES.get(algorithm, "float32"),
    )
