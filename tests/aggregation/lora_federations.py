"""Models with LoRA, rounds of a method on them, and federations whose logits are recorded."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from federations import build_federation
from peft import LoraConfig, get_peft_model
from robust_reference import as_update
from tiny import rows, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_federated import FederatedCallback, Round
from hf_federated.adapters import Exchange
from hf_federated.aggregation.base_changes import VERSION
from hf_federated.messages import Fit
from hf_federated.methods import ClientContext


class ManyLayers(nn.Module):
    """A wide and a narrow linear layer, a layer with a transposed weight, a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(5, 9), nn.Linear(9, 5)
        self.transposed = Conv1D(7, 4)
        self.convolution = nn.Conv2d(3, 5, 2)
        self.embedding = nn.Embedding(11, 6)


LAYERS = [name for name, _ in ManyLayers().named_children()]


def many_layers(rank=2, is_tied=False):
    """A model in float64. With a tied weight, its base weights cannot be written."""
    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=5, target_modules=LAYERS, use_rslora=True)
    layers = ManyLayers().double()
    if is_tied:
        layers.tied = nn.Linear(5, 9, dtype=torch.float64)
        layers.tied.weight = layers.wide.weight
    model = get_peft_model(layers, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return model


def weights_of(model):
    """The weights that PEFT computes from the base weights and the active adapters."""
    layers = {name: getattr(model.base_model.model, name) for name in LAYERS}
    return {
        name: sum(map(layer.get_delta_weight, layer.active_adapters), layer.base_layer.weight).detach()
        for name, layer in layers.items()
    }


def run_round(method, exchange, client_models, examples, number=0):
    """Aggregate the adapters of models whose base weights are those of the server, and write the result."""
    state, clients = exchange.read(), list(client_models)
    method.begin(Round(number, tuple(clients), state))
    accumulator = method.accumulator(state)
    for client_id, model in client_models.items():
        sent = {name: value for name, value in Exchange(model).read().items() if "lora_" in name}
        assert sent.keys() == method.expected_for(client_id, state).keys()
        update = as_update(client_id, sent, examples[client_id])
        accumulator.add(method.whole_update(update, state))
    round = Round(number, tuple(clients), state, sums=accumulator)
    exchange.write(method.finish(round))


def trained(model, seed):
    """A copy of a model with other factors."""
    client, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in client.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return client


def client_part(method, exchange, model, memory, version):
    """The client half of a client with a memory, for a request with the given number of changes."""
    context = ClientContext(
        "c", SimpleNamespace(exchange=exchange, trainer=SimpleNamespace(model=model)), memory=memory
    )
    part = method.client(context)
    part.receive(Fit(0, "c", 0, {}, settings={VERSION: version}))
    return part


def lora_model(**config):
    torch.manual_seed(0)
    model = tiny_model(problem_type="single_label_classification", **config)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


class Logits(FederatedCallback):
    """Records the logits of the server before each round, and those of the clients before they train."""

    def __init__(self) -> None:
        self.inputs = torch.tensor(rows(4, seed=5)["input_ids"])
        self.server, self.clients = [], []

    def read(self, model):
        was_training = model.training
        with torch.no_grad():
            logits = model.eval()(input_ids=self.inputs).logits
        model.train(was_training)
        return logits

    def on_round_begin(self, args, state, control, model, **kwargs):
        self.server.append(self.read(model))
        self.clients.append([])

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.clients:
            self.clients[-1].append(self.read(model))


TEN = {f"client {number}": rows(4 + number % 3, seed=number) for number in range(10)}


def build(directory, aggregation, num_rounds=6, clients=TEN, model=None, args=(), **trainer):
    """A federation of which two clients train in a round, and the recorded logits."""
    logits = Logits()
    trainer = build_federation(
        directory,
        clients,
        num_rounds=num_rounds,
        federation={"clients_per_round": 2, **aggregation},
        trainer={
            "model": lora_model() if model is None else model,
            "callbacks": [logits],
            "client_callbacks": [logits],
            **trainer,
        },
        **{"learning_rate": 0.05, **dict(args)},
    )
    return trainer, logits


def train(directory, aggregation, num_rounds=6, clients=TEN, **options):
    trainer, logits = build(directory, aggregation, num_rounds, clients, **options)
    trainer.train()
    return trainer, logits


METHODS = {
    "fedex_lora": {"aggregation": "fedex_lora"},
    "reset": {"aggregation": "stacked_lora", "aggregation_kwargs": {"reset": True}},
}
