"""`Scenario`: the tiny federation in which the conformance kit runs a method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ..aggregation import Aggregation, build_aggregation
from ..clients import ClientSpec
from ..codecs import Codec
from ..data import FederatedDataset
from ..distillation import Distillation, build_distillation
from ..methods import Method
from ..secure_aggregation import SecureAggregation
from ..utils.algorithm_names import EXCHANGE_CODEC_NAMES, SECURE_AGGREGATION_NAMES, import_reference
from ..utils.random import isolated_rng
from .tiny import tiny_dataset, tiny_model


NUM_ROUNDS = 3
# Numbers of examples of the clients.
SIZES = (11, 3, 7, 20, 5)
CLIENTS = tuple(f"client {number}" for number in range(len(SIZES)))


@dataclass(frozen=True)
class Scenario:
    """
    A federation of five clients, of which a round asks four, with a method.

    Args:
        family (`str`): Where the method is passed: the field `"aggregation"`, `"distillation"`, `"collector"`,
            `"secure_aggregation"` or `"exchange_codec"` of [`FederatedConfig`], or the argument `"postprocessors"` of
            the trainer.
        method (`str`): Name of the method, or a reference `module:Class`.
        arguments (`dict[str, Any]`, *optional*): Constructor arguments of the method, as JSON values.
        federation (`dict[str, Any]`, *optional*): Further fields of [`FederatedConfig`].
        training (`dict[str, Any]`, *optional*): Further training arguments.
        dtype (`str`, *optional*): Dtype of the base model of a method for LoRA, by default `"float32"`.

    Example:

    ```python
    >>> from hf_federated.testing.scenario import Scenario

    >>> model, federation, training, others = Scenario("aggregation", "fedprox").build()
    >>> list(others["train_dataset"])
    ['client 0', 'client 1', 'client 2', 'client 3', 'client 4']
    ```
    """

    family: str
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    def build_method(self) -> Any:
        """Build the method under test."""
        if self.family == "aggregation":
            return build_aggregation(self.method, self.arguments)
        if self.family == "distillation":
            return build_distillation(self.method, self.arguments)
        if self.family == "secure_aggregation":
            return SECURE_AGGREGATION_NAMES.build(self.method, self.arguments, SecureAggregation)
        if self.family == "exchange_codec":
            return EXCHANGE_CODEC_NAMES.build(self.method, self.arguments, Codec)
        return import_reference(self.method)(**self.arguments)

    @property
    def title(self) -> str:
        """The method with its arguments."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.method.rpartition(':')[2]}({arguments})"

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the run."""
        return self.federation.get("num_rounds", NUM_ROUNDS)

    def build(self, unchanged: str | None = None) -> tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]:
        """
        Build the arguments of the trainer.

        Args:
            unchanged (`str`, *optional*): Id of a client. If it is given, all other clients get other examples.

        Returns:
            `tuple`: The model, the fields of the configuration, the training arguments and other trainer arguments.
        """
        method = self.build_method()
        federation: dict[str, Any] = {"parallelism": "clients", "clients_per_round": 4, "log_clients": True}
        federation |= {"client_optimizer_state": "carry"}
        if self.family == "secure_aggregation":
            # The server has no metrics of single clients.
            federation["log_clients"] = False
        training: dict[str, Any] = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "eval_strategy": "steps"}
        clients = {
            name: tiny_dataset(size, seed=number if unchanged in (None, name) else 100 + number)
            for number, (name, size) in enumerate(zip(CLIENTS, SIZES, strict=True))
        }
        others: dict[str, Any] = {"eval_dataset": tiny_dataset(11, seed=9)}
        others["train_dataset"] = FederatedDataset.from_dict(clients)
        if self.federation.get("evaluate_clients"):
            others["eval_dataset"] = FederatedDataset.from_dict({name: tiny_dataset(5, seed=9) for name in clients})
        if self.family == "postprocessors":
            others["postprocessors"] = [method]
        else:
            federation |= {self.family: self.method, f"{self.family}_kwargs": self.arguments or None}
        if isinstance(method, Method):
            needs_public = isinstance(method, Distillation) and method.requirements.public_dataset
            if needs_public:
                others["public_dataset"] = tiny_dataset(10, seed=20)
            if needs_public or method.trains_on_server:
                others["server_dataset"] = tiny_dataset(6, seed=21)
            if keeps_models(method):
                others["client_model_init"] = client_model
        model: nn.Module = tiny_model(problem_type="single_label_classification")
        if isinstance(method, Aggregation) and method.needs_lora:
            model = with_lora(model.to(getattr(torch, self.dtype)))
        if isinstance(method, Aggregation) and method.supports_ranks:
            others["clients"] = {CLIENTS[0]: ClientSpec(peft_config=LoraConfig(r=1, lora_alpha=6))}
        return model, federation | self.federation, training | self.training, others


def keeps_models(method: Any) -> bool:
    """Whether the clients of a method have their own models."""
    if isinstance(method, Distillation):
        return not method.sends_parameters
    return isinstance(method, Aggregation) and method.trains_private_models


def with_lora(model: nn.Module) -> nn.Module:
    """Add LoRA modules of rank 2. The global generator does not change."""
    config = LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"])
    with isolated_rng(1):
        return get_peft_model(model, config)


def client_model(client_id: str) -> nn.Module:
    """Build the own model of a client, with one to three layers."""
    number = int(client_id.split()[1])
    return tiny_model(seed=number, num_hidden_layers=1 + number % 3, problem_type="single_label_classification")
