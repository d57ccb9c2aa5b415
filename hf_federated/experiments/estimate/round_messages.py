"""Messages of a round of averaging or distillation, and their sizes.

The messages are built from tensors on the meta device, and their sizes are those that the ledger records. Seeds and
counts are written as decimal numbers whose length varies, so a message can differ from the estimate by 8 bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from hf_federated.aggregation import Aggregation
from hf_federated.config import FederatedConfig
from hf_federated.distillation import AdaFD, Distillation, FedID
from hf_federated.engines.base import NONCE_LENGTH
from hf_federated.messages import (
    ClientUpdate,
    Distill,
    Evaluate,
    Feedback,
    Fit,
    Message,
    Metrics,
    Predict,
    Predictions,
)
from hf_federated.messages.training import CLASS_COUNT
from hf_federated.postprocessing.exchange_dtype import cast_floating, exchange_dtype


# Metrics of a client's local training and of its distillation.
TRAINING_METRICS = ("total_flos", "loss", "grad_norm", "learning_rate")
DISTILLATION_METRICS = ("distillation_loss",)
# A seed with ten digits, which three quarters of all seeds have.
SEED = 4_000_000_000
NONCE = "0" * (2 * NONCE_LENGTH)

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """
    A message of the server and the reply of a client.

    Args:
        name (`str`): Kind of the message.
        bytes_down (`int`): Size of the message.
        bytes_up (`int`): Size of the reply.
        count (`int`, *optional*, defaults to `1`): Number of such exchanges in a round.
    """

    name: str
    bytes_down: int
    bytes_up: int
    count: int = 1


def total_bytes(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """Return the bytes down and up of some exchanges."""
    found = list(exchanges)
    return sum(item.bytes_down * item.count for item in found), sum(item.bytes_up * item.count for item in found)


@dataclass
class RoundMessages:
    """
    Builds the messages between the server and one client in a round.

    Args:
        config ([`FederatedConfig`]): The configuration.
        aggregation ([`Aggregation`]): The averaging algorithm.
        state (`dict[str, torch.Tensor]`): The exchanged tensors, on the meta device.
        num_examples (`int`): Number of training examples of the client.
        num_steps (`int`): Number of optimizer steps of the client.
        distillation ([`Distillation`], *optional*): The distillation algorithm.
        num_public (`int`, *optional*, defaults to `0`): Number of public examples.
        num_positions (`int`, *optional*, defaults to `0`): Number of predictions for all public examples.
        num_classes (`int`, *optional*, defaults to `0`): Number of classes of a prediction.
        batch_size (`int`, *optional*, defaults to `1`): Number of public examples in a batch of the server.
        num_rounds (`int`, *optional*, defaults to `1`): Number of rounds of the run.
    """

    config: FederatedConfig
    aggregation: Aggregation
    state: State
    num_examples: int
    num_steps: int
    distillation: Distillation | None = None
    num_public: int = 0
    num_positions: int = 0
    num_classes: int = 0
    batch_size: int = 1
    num_rounds: int = 1
    client_id: str = field(default="", init=False)

    def of_client(self, client_id: str) -> list[Exchange]:
        """Return the exchanges with a client in a round, in order."""
        self.client_id = client_id
        return [self._training(), *self._distillation()]

    def _training(self) -> Exchange:
        sends_state = self.aggregation.exchanges_parameters
        sends = sends_state or (self.distillation is not None and self.distillation.sends_parameters)
        dtype = exchange_dtype(self.config.exchange_dtype)
        state = cast_floating(self.state, dtype)
        extra = self.aggregation.expected_extra(self.state)
        if self.distillation is not None:
            extra = extra | _empty(
                self.distillation.extra_shapes(self.num_public, self.num_positions, self.num_classes)
            )
        metrics = [*TRAINING_METRICS, *self._reported_metrics()]
        down = Fit(
            0,
            self.client_id,
            SEED,
            state if sends else {},
            cast_floating(self.aggregation.fit_extra(self.state), dtype),
            self.aggregation.fit_settings(),
            sends_state,
        )
        up = ClientUpdate(
            0,
            self.client_id,
            state if sends_state else {},
            self.num_examples,
            0,
            self.num_steps,
            dict.fromkeys(metrics, 0.0),
            cast_floating(extra, dtype),
        )
        return self._exchange("training", down, up)

    def _reported_metrics(self) -> list[str]:
        if isinstance(self.distillation, AdaFD) and self.distillation.uses_losses:
            return ["min_epoch_loss"]
        if self.distillation is not None and self.distillation.reports_class_counts:
            return [f"{CLASS_COUNT}{label}" for label in range(self.num_classes)]
        return []

    def _distillation(self) -> list[Exchange]:
        algorithm = self.distillation
        if algorithm is None or algorithm.returns_parameters:
            return []
        if isinstance(algorithm, FedID):
            return self._mini_batches(algorithm)
        found = [self._prediction(self.num_public, self.num_positions)]
        if isinstance(algorithm, AdaFD) and algorithm.clients_evaluate:
            metrics = dict.fromkeys(("eval_loss", "eval_f1", "eval_runtime"), 0.0)
            evaluation = Metrics(0, self.client_id, self.num_examples, metrics)
            found.append(self._exchange("evaluation", Evaluate(0, self.client_id, {}), evaluation))
        # A method in which the clients learn from no targets does not use the number of their passes.
        if "client_epochs" not in algorithm.ignores:
            targets = algorithm.encoding.codec.empty({"rows": (self.num_positions, self.num_classes)})
            epochs = algorithm.client_epochs
            message = Distill(
                0, self.client_id, None, 0, self.num_public, SEED, targets, epochs, epochs * self.num_rounds
            )
            found.append(self._exchange("distillation", message, self._loss(self.num_public)))
        return found

    def _prediction(self, num_rows: int, num_positions: int, order: int | None = None) -> Exchange:
        assert self.distillation is not None, "only distillation asks for predictions"
        values = self.distillation.encoding.codec.empty({"rows": (num_positions, self.num_classes)})
        message = Predict(0, self.client_id, order, 0, num_rows, SEED, keeps_graph=order is not None)
        return self._exchange("prediction", message, Predictions(0, self.client_id, values))

    def _mini_batches(self, algorithm: FedID) -> list[Exchange]:
        """The predictions and the feedback of each mini-batch."""
        sizes = {self.batch_size: self.num_public // self.batch_size, self.num_public % self.batch_size: 1}
        found = []
        for size, count in sizes.items():
            if not size or not count:
                continue
            num_positions = math.ceil(self.num_positions * size / max(self.num_public, 1))
            targets = algorithm.encoding.codec.empty({"rows": (num_positions, self.num_classes)})
            feedback: State = {}
            if algorithm.feedback == "chain_rule":
                feedback = algorithm.encoding.codec.dense.empty({"rows": (num_positions, self.num_classes)})
            elif algorithm.feedback == "per_example":
                feedback = _empty({"rewards": (num_positions,)})
            settings = {"weight": 0.0, "improvement": 0.0, "labels": SEED, "exponent": 0}
            num_steps = self.num_rounds * algorithm.public_epochs * math.ceil(self.num_public / self.batch_size)
            message = Feedback(0, self.client_id, SEED, 0, size, SEED, targets, feedback, 0, num_steps, settings)
            count *= algorithm.public_epochs
            prediction = self._prediction(size, num_positions, SEED)
            answer = self._exchange("feedback", message, self._loss(size))
            found += [Exchange(item.name, item.bytes_down, item.bytes_up, count) for item in (prediction, answer)]
        return found

    def _loss(self, num_rows: int) -> Metrics:
        return Metrics(0, self.client_id, num_rows, dict.fromkeys(DISTILLATION_METRICS, 0.0))

    def _exchange(self, name: str, down: Message, up: Message) -> Exchange:
        return Exchange(name, _size(down), _size(up))


def _size(message: Message) -> int:
    """Return the size of a message with a nonce."""
    return dataclasses.replace(message, nonce=NONCE).num_bytes


def _empty(shapes: Mapping[str, tuple[int, ...]]) -> State:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
