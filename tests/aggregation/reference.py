"""Reference implementation of local training without a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tiny import tiny_model
from torch import nn


State = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def smooth_model() -> nn.Module:
    """A tiny model in float64 without dropout, so that two implementations agree to many digits."""
    return tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()


def cross_entropy(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(input_ids=input_ids).logits, labels)


def loss_over_accumulated_examples(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor
) -> torch.Tensor:
    """`compute_loss_func`: the mean over the examples of a step, for any number of accumulated batches."""
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def train(
    start: State,
    dataset: Dataset,
    num_steps: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss = cross_entropy,
    objective: Callable[[nn.Parameter, str], torch.Tensor] | None = None,
    correction: State | None = None,
    max_grad_norm: float = 0.0,
) -> State:
    """
    Train with full-batch steps from a state.

    Args:
        objective: Term that is added to the loss, once per parameter.
        correction: Tensors that are added to the gradients, by parameter name.
    """
    model = smooth_model()
    model.load_state_dict(start, strict=False)
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(list(parameters.values()))
    input_ids, labels = torch.tensor(dataset["input_ids"]), torch.tensor(dataset["labels"])
    for _ in range(num_steps):
        optimizer.zero_grad()
        value = loss(model, input_ids, labels)
        if objective is not None:
            value = value + sum(objective(parameter, name) for name, parameter in parameters.items())
        value.backward()
        if correction is not None:
            for name, parameter in parameters.items():
                parameter.grad += correction[name]
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def weights(model: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def mean(states: list[State]) -> State:
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def assert_close(actual: State, expected: State, atol: float = 1e-10) -> None:
    assert list(actual) == list(expected)
    for name in actual:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def distance(a: State, b: State) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)
