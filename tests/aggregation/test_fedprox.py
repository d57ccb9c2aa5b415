"""FedProx: `F(w) + (μ/2) ‖w − w_t‖²`, with several optimizers, losses and clipping norms."""

from __future__ import annotations

import pytest
import torch
from client_parts import received
from reference import (
    assert_close,
    cross_entropy,
    distance,
    loss_over_accumulated_examples,
    mean,
    smooth_model,
    train,
    weights,
)
from tiny import arguments, rows, same_weights, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, FederatedTrainer, FedProx, federate
from hf_federated.aggregation import build_aggregation
from hf_federated.messages import Fit


CLIENTS = {"a": rows(4), "b": rows(4, seed=1)}


# ---- Hook


def test_hook_adds_the_gradient_of_the_proximal_term():
    mu = 0.3
    anchor = {"w": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    parameters = {name: torch.nn.Parameter(torch.randn_like(value)) for name, value in anchor.items()}
    own = {name: torch.randn_like(value) for name, value in anchor.items()}
    for name, parameter in parameters.items():
        parameter.grad = own[name].clone()
    message = Fit(0, "a", 0, anchor, settings=FedProx(mu).fit_settings())
    received(FedProx(), message).on_gradients(parameters)
    for name, parameter in parameters.items():
        copy = parameter.detach().clone().requires_grad_()
        (mu / 2 * (copy - anchor[name]).square().sum()).backward()
        torch.testing.assert_close(parameter.grad, own[name] + copy.grad, rtol=0, atol=1e-15)
        torch.testing.assert_close(parameter.grad, own[name] + mu * (parameter.detach() - anchor[name]))


def test_hook_reads_the_weight_from_the_message():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.zeros(1)
    message = Fit(0, "a", 0, {"w": torch.zeros(1)}, settings={"proximal_weight": 0.5})
    received(FedProx(proximal_weight=100.0), message).on_gradients({"w": parameter})
    assert parameter.grad.item() == 0.5


def test_parameter_without_gradient_is_not_changed():
    parameter = torch.nn.Parameter(torch.ones(1))
    message = Fit(0, "a", 0, {"w": torch.zeros(1)}, settings={"proximal_weight": 0.5})
    received(FedProx(), message).on_gradients({"w": parameter})
    assert parameter.grad is None


def test_half_precision_gradients_keep_their_dtype():
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    parameter.grad = torch.ones(1, dtype=torch.bfloat16)
    message = Fit(0, "a", 0, {"w": torch.zeros(1)}, settings={"proximal_weight": 0.5})
    received(FedProx(), message).on_gradients({"w": parameter})
    assert parameter.grad.dtype == torch.bfloat16 and parameter.grad.item() == 1.5


def test_negative_weight_raises_an_error():
    with pytest.raises(ValueError, match="`proximal_weight` is -0.1; it must be at least 0"):
        FedProx(-0.1)


# ---- Federated runs


def custom_loss(model, input_ids, labels):
    """A custom loss."""
    logits = model(input_ids=input_ids).logits
    return torch.nn.functional.cross_entropy(logits, labels) + 0.1 * logits.square().mean()


class CustomLossTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return custom_loss(model, inputs["input_ids"], inputs["labels"])


def federated(tmp_path, mu, trainer_class=FederatedTrainer, num_rounds=1, **kwargs):
    trainer = trainer_class(
        model=smooth_model(),
        args=arguments(tmp_path, lr_scheduler_type="constant", **kwargs),
        compute_loss_func=loss_over_accumulated_examples,
        train_dataset=CLIENTS,
        federation=FederatedConfig(num_rounds=num_rounds, local_epochs=3, aggregation=FedProx(mu)),
    )
    trainer.train()
    return weights(trainer.model)


def reference(mu, optimizer, num_rounds=1, **kwargs):
    state = weights(smooth_model())
    for _ in range(num_rounds):
        anchor = state

        def proximal_term(parameter, name, anchor=anchor):
            return mu / 2 * (parameter - anchor[name]).square().sum()

        state = mean(
            [train(anchor, data, 3, optimizer, objective=proximal_term, **kwargs) for data in CLIENTS.values()]
        )
    return state


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    # With a small eps, gradients that are zero up to rounding would cause a full step.
    "adamw_torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.0),
}
ARGUMENTS = {
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    "adamw_torch": {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-3},
}
MU = 2.0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.sampled(4)
def test_clients_minimize_loss_and_proximal_term(tmp_path, optimizer, max_grad_norm, accumulation):
    result = federated(
        tmp_path,
        MU,
        max_grad_norm=max_grad_norm,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        **ARGUMENTS[optimizer],
    )
    expected = reference(MU, OPTIMIZERS[optimizer], max_grad_norm=max_grad_norm)
    assert_close(result, expected)
    assert distance(expected, reference(0.0, OPTIMIZERS[optimizer], max_grad_norm=max_grad_norm)) > 1e-3


def test_proximal_term_works_with_a_custom_loss(tmp_path):
    result = federated(tmp_path, MU, federate(CustomLossTrainer), max_grad_norm=0.0, **ARGUMENTS["sgd"])
    expected = reference(MU, OPTIMIZERS["sgd"], loss=custom_loss)
    assert_close(result, expected)
    assert distance(expected, reference(MU, OPTIMIZERS["sgd"], loss=cross_entropy)) > 1e-3


def test_anchor_is_the_global_state_of_each_round(tmp_path):
    result = federated(tmp_path, MU, num_rounds=2, max_grad_norm=0.0, **ARGUMENTS["sgd"])
    assert_close(result, reference(MU, OPTIMIZERS["sgd"], num_rounds=2))


def test_zero_weight_equals_fedavg_bit_for_bit(tmp_path):
    models = []
    for aggregation in ("fedavg", FedProx(0.0)):
        trainer = FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset={"a": rows(8), "b": rows(5, seed=1)},
            federation=FederatedConfig(num_rounds=2, aggregation=aggregation),
        )
        trainer.train()
        models.append(trainer.model)
    assert same_weights(*models)


def test_larger_weight_keeps_clients_nearer_to_the_global_state(tmp_path):
    start = weights(smooth_model())
    moved = [distance(start, federated(tmp_path, mu, **ARGUMENTS["sgd"])) for mu in (0.0, 0.5, 1.5)]
    assert moved[0] > moved[1] > moved[2] > 0


def test_mu_is_an_alias_of_proximal_weight():
    named = FedProx(mu=0.3)
    assert (named.proximal_weight, repr(named)) == (0.3, "FedProx(proximal_weight=0.3)")
    assert named.settings() == FedProx(0.3).settings() and named.fit_settings() == {"proximal_weight": 0.3}
    assert build_aggregation("fedprox", {"mu": 0.3}).proximal_weight == 0.3
    with pytest.raises(ValueError, match="`proximal_weight` is 0.1 and its alias `mu` is 0.3. Set only one"):
        FedProx(0.1, mu=0.3)
    with pytest.raises(ValueError, match="`proximal_weight` is -1; it must be at least 0"):
        FedProx(mu=-1)
