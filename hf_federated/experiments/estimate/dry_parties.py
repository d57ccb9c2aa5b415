"""The clients and the server's model of a dry round: the code of a run without training, predictions and examples.

If the parameters of the model have values, a local training adds noise to the values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerState, TrainingArguments

from hf_federated.adapters import Exchange
from hf_federated.aggregation import Aggregation
from hf_federated.clients import (
    ClientModels,
    ClientWorker,
    MemoryStore,
    OwnModels,
    SharedModel,
    Student,
    batches_per_round,
)
from hf_federated.clients.journal import ClientJournal
from hf_federated.clients.models import ClientModel
from hf_federated.clients.sampling import limit_examples
from hf_federated.config import FederatedConfig
from hf_federated.distillation import Distillation, DistillationServer, PublicRows
from hf_federated.experiments.estimate.dry_secure_sums import DryAnswers
from hf_federated.experiments.estimate.step_cost import StepCost
from hf_federated.messages import Evaluate, Fit, Message, Metrics
from hf_federated.methods import ClientPart, Method
from hf_federated.postprocessing import Postprocessor
from hf_federated.secure_aggregation import SecureAggregation
from hf_federated.secure_aggregation.credentials import Credentials, simulated_identity
from hf_federated.server.round_loop import SERVER_NAME
from hf_federated.utils.random import isolated_rng


# Metrics of `Trainer.evaluate`, and one metric of the task.
EVALUATION_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second", "f1")
# Number of mini-batches of a pass whose messages are built. The other ones count as the mini-batch in the middle.
MAX_MINI_BATCHES = 32
# Standard deviation of the change of a parameter.
NOISE = 1e-3
# What an optimizer of a local training has, for client halves that read the settings of a step.
PARAM_GROUP = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "dampening": 0.0}


@dataclass(frozen=True, kw_only=True)
class DryFederation:
    """
    What the bytes of a federation depend on.

    Args:
        config ([`FederatedConfig`]): The configuration, with `num_rounds` and `federation_seed` filled in.
        args (`TrainingArguments`): The training arguments.
        model (`torch.nn.Module`): The model, possibly on the meta device. A dry round adds noise to its values.
        aggregation ([`Aggregation`]): The averaging algorithm, before a run.
        distillation ([`Distillation`], *optional*): The distillation algorithm, before a run.
        postprocessors (`Sequence[Postprocessor]`): All postprocessors, with those of the algorithm.
        num_examples (`Mapping[str, int | None]`): Number of training examples by client. `None` counts as one.
        num_tokens (`int`, *optional*, defaults to `1`): Number of tokens of an example, if the method counts tokens.
        num_public (`int`, *optional*, defaults to `0`): Number of public examples.
        num_positions (`int`, *optional*, defaults to `0`): Number of predictions for all public examples.
        num_classes (`int`, *optional*, defaults to `0`): Number of classes of a prediction.
        secure_aggregation ([`SecureAggregation`], *optional*): The protocol of secure aggregation.
        peft_configs (`Mapping[str, peft.LoraConfig]`, *optional*): LoRA configurations of clients, by client id.
    """

    config: FederatedConfig
    args: TrainingArguments
    model: nn.Module
    aggregation: Aggregation
    distillation: Distillation | None
    postprocessors: Sequence[Postprocessor]
    num_examples: Mapping[str, int | None]
    num_tokens: int = 1
    num_public: int = 0
    num_positions: int = 0
    num_classes: int = 0
    secure_aggregation: SecureAggregation | None = None
    peft_configs: Mapping[str, Any] = field(default_factory=dict)

    def exchange(self) -> Exchange:
        """Return an exchange of the tensors of the model."""
        return Exchange(self.model, self.config.exchange, self.config.keep_local, self.aggregation.changes_base)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of a round, in order."""
        return (self.aggregation,) if self.distillation is None else (self.aggregation, self.distillation)


class DryTrainer:
    """
    The trainer of a client, after a local training.

    Args:
        federation ([`DryFederation`]): The federation.

    Attributes:
        repeats (`int`): How often the messages of the current mini-batch count.
    """

    def __init__(self, federation: DryFederation) -> None:
        self.model: Any = federation.model
        self.args = federation.args
        self.processing_class = None
        self.train_dataset: Sequence[int] = ()
        self.accelerator = SimpleNamespace(num_processes=1)
        self.local_training = SimpleNamespace(stream=None, scaler=None, sampler_position=None, kept_position=None)
        self.optimizer: Any = SimpleNamespace(state={}, state_dict=dict, param_groups=[])
        self.state = TrainerState(log_history=[{"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0}])
        self.repeats = 1

    def create_optimizer(self) -> None:
        """Create an optimizer for a client half that trains a private model."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)


class DryStudent(Student):
    """
    A model on public examples that predicts zeros and learns nothing. It counts batches.

    Args:
        trainer ([`DryTrainer`]): The trainer of the model.
        federation ([`DryFederation`]): The federation.
    """

    def __init__(self, trainer: DryTrainer, federation: DryFederation) -> None:
        self.trainer = trainer
        self._trainer: Any = trainer
        self.positions = None
        self.num_rows = federation.num_public
        self.num_classes = federation.num_classes
        self._num_positions = federation.num_positions
        self.num_predicted = self.num_trained = 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def count(self, trained: int = 0, predicted: int = 0) -> float:
        """Add batches of public examples, and return the loss."""
        self.num_trained += trained * self.trainer.repeats
        self.num_predicted += predicted * self.trainer.repeats
        return 0.0

    def flops(self, cost: StepCost) -> int:
        """Return the operations of the counted batches, for the cost of a batch."""
        return self.num_trained * cost.flops + self.num_predicted * cost.forward_flops

    def num_positions(self, num_rows: int) -> int:
        """Return the largest number of predictions for some public examples."""
        return math.ceil(self._num_positions * num_rows / max(self.num_rows, 1))

    def inputs(self, rows: Sequence[int] | torch.Tensor) -> dict[str, Any]:
        return {"rows": rows}

    def forward(self, inputs: dict[str, Any], model: nn.Module | None = None) -> torch.Tensor:
        return torch.zeros(self.num_positions(len(inputs["rows"])), self.num_classes, device=self.device)

    def predict(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        self.count(predicted=math.ceil(len(rows) / self.batch_size))
        return self.forward({"rows": rows})

    def features(self, rows: Dataset | None = None) -> torch.Tensor:
        return torch.linspace(0, 1, self.num_rows if rows is None else len(rows), device=self.device).unsqueeze(1)

    def prepare(self, num_training_steps: int, position: int = 0) -> None:
        pass

    def learn(self, loss: Callable[[], torch.Tensor]) -> float:
        return self.count(trained=1)

    def fit(self, rows: torch.Tensor, targets: Any, loss: Any, num_epochs: int, seed: int) -> float:
        return self.count(trained=num_epochs * math.ceil(len(rows) / self.batch_size))


class DryServer(DistillationServer):
    """The server of a distillation that computes nothing. It has labeled examples if a method asks for them."""

    student: DryStudent

    def shape_of(self, rows: PublicRows) -> tuple[int, int]:
        return self.num_agreed(rows), self.student.num_classes

    def num_agreed(self, rows: PublicRows) -> int:
        return self.student.num_positions(len(rows))

    def mini_batches(self, round: int, epoch: int) -> Iterator[PublicRows]:
        batches = list(super().mini_batches(round, epoch))
        half, num_alike = MAX_MINI_BATCHES // 2, max(len(batches) - MAX_MINI_BATCHES, 0)
        yield from batches[:half]
        if num_alike:
            self.student.trainer.repeats = num_alike
            yield batches[len(batches) // 2]
            self.student.trainer.repeats = 1
        yield from batches[half + num_alike :]

    def fit_labeled(self, num_epochs: int, round: int) -> float:
        return 0.0

    def train_step(self, inputs: dict[str, Any], loss: Any, purpose: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(self.student.learn(loss))

    def evaluate_loss(self, loss: Callable[[], torch.Tensor]) -> float:
        return 0.0

    def ensemble_gradient(self, inputs: dict[str, Any], ensemble: torch.Tensor, *args: Any) -> torch.Tensor:
        self.student.count(trained=2, predicted=2)  # two gradients, and a pass in forward mode
        return torch.zeros_like(ensemble)


class DryWorker(ClientWorker):
    """
    Answers messages as [`ClientWorker`], without training. The client halves of the methods run.

    A client half takes one step with gradients of zeros, so that it can compute what it sends. The server that trains
    on its own examples has one example.

    Args:
        federation ([`DryFederation`]): The federation.

    Attributes:
        trainer ([`DryTrainer`]): The trainer that all clients share.
        student ([`DryStudent`], *optional*): Counts the batches of public examples of all clients.
        num_batches (`int`): Number of batches of the largest local training.
    """

    def __init__(self, federation: DryFederation) -> None:
        self.trainer: Any = DryTrainer(federation)
        self.student = None if federation.distillation is None else DryStudent(self.trainer, federation)
        self.num_batches = 0
        self._num_tokens = federation.num_tokens
        self._num_examples = {
            SERVER_NAME: 1,
            **{name: number or 1 for name, number in federation.num_examples.items()},
        }

        exchange, store = federation.exchange(), MemoryStore()

        def open_model(client_id: str) -> tuple[Any, Exchange, Student | None]:
            return self.trainer, exchange, self.student

        models: ClientModels = OwnModels(open_model, store)
        if federation.aggregation.exchanges_parameters:
            models = SharedModel(self.trainer, exchange, federation.args, store, self.student, exchange.read())
        settings = federation.methods, federation.config, open_model, federation.postprocessors
        super().__init__(models, self._num_examples, None, *settings, peft_configs=federation.peft_configs)
        if federation.secure_aggregation is not None:
            identity = simulated_identity()
            self.secure = DryAnswers(
                federation.secure_aggregation,
                federation.aggregation.on_client(),
                Credentials(identity, None),
                ClientJournal(),
            )
        for method in self._methods.values():
            # The numbers of examples of each class are values of the examples.
            vars(method)["class_counts"] = lambda dataset, num_classes, tokenizer: [0] * num_classes

    def _log_traceback(self, error: Exception, message: Message) -> None:
        pass  # The error of the dry round names the cause.

    def _open_examples(self, client_id: str) -> tuple[Dataset, bool]:
        return Dataset.from_dict({"row": list(range(self._num_examples[client_id]))}), False

    def _train(self, message: Fit, model: ClientModel, parts: Sequence[ClientPart], kept: Mapping[str, Any]) -> Any:
        trainer = self._after_training(message, self._arguments(model))
        for part in parts:
            part.context.trainer = trainer
            part.on_batch(trainer.model, {}, None)
        state, trained = model.exchange.read(), list(model.exchange.trainable)
        if changing := [part for part in parts if part.changes_gradients]:
            parameters = {name: nn.Parameter(torch.zeros_like(state[name])) for name in trained}
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            for part in changing:
                part.on_gradients(parameters)
                part.on_step([PARAM_GROUP])
        with isolated_rng(message.seed):
            noise = {name: torch.randn_like(state[name]) for name in trained if not state[name].is_meta}
        model.exchange.write(state | {name: state[name] + NOISE * value for name, value in noise.items()})
        return trainer

    def _after_training(self, message: Fit, args: TrainingArguments) -> Any:
        """Return the trainer after a local training, with its counts and its log."""
        config, rows = self._config, limit_examples(self._num_examples[message.client_id], message.max_rows)
        epochs = 1 if config.local_steps is not None else config.local_epochs
        (batches,) = batches_per_round({"": rows}, config.local_epochs, config.local_steps, args).values()
        self.num_batches = max(self.num_batches, int(batches))
        trainer: Any = copy.copy(self.trainer)
        trainer.train_dataset, trainer.state = range(rows), copy.copy(trainer.state)
        trainer.state.global_step = epochs * math.ceil(batches / epochs / args.gradient_accumulation_steps)
        if args.include_num_input_tokens_seen != "no":
            trainer.state.num_input_tokens_seen = rows * self._num_tokens * config.local_epochs
            speed = {"train_runtime": 0.0, "train_tokens_per_second": 0.0}
            trainer.state.log_history = [{**entry, **speed} for entry in trainer.state.log_history]
        return trainer

    def _evaluate(self, message: Evaluate, model: ClientModel) -> Metrics:
        metrics = {f"eval_{name}": 0.0 for name in EVALUATION_METRICS}
        return Metrics(message.round, message.client_id, self._num_examples[message.client_id], metrics)
