"""FedNova: mean of the parameter changes per unit of local progress."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from client_parts import received, sent
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FedAvg, FederatedConfig, FederatedTrainer, FedNova
from hf_federated.aggregation.fednova import NORMALIZER
from hf_federated.messages import ClientUpdate, Fit


GLOBAL = np.array([1.0, -2.0, 0.5])
CHANGES = np.random.default_rng(0).normal(size=(3, 3))
EXAMPLES = (3, 5, 2)
NORMALIZERS = (0.2, 0.05, 0.4)
WITHOUT_PROXIMAL_TERM = Fit(0, "a", 0, {}, settings={"proximal_weight": 0.0})


def update(number: int, normalizer: float) -> ClientUpdate:
    state = {"w": torch.tensor(GLOBAL + CHANGES[number]), "count": torch.tensor(number + 7)}
    extra = {NORMALIZER: torch.tensor(normalizer, dtype=torch.float64)}
    return ClientUpdate(0, str(number), state, EXAMPLES[number], num_tokens=0, num_steps=1, extra=extra)


def aggregated(algorithm, normalizers) -> dict[str, torch.Tensor]:
    state = {"w": torch.tensor(GLOBAL), "count": torch.tensor(0)}
    accumulator = algorithm.accumulator(state)
    for number, normalizer in enumerate(normalizers):
        accumulator.add(update(number, normalizer))
    return algorithm.aggregate(accumulator, state)


def test_aggregate_equals_the_formula_of_the_paper():
    shares = np.array(EXAMPLES) / sum(EXAMPLES)
    effective_steps = sum(shares * NORMALIZERS)
    direction = sum(p * change / tau for p, change, tau in zip(shares, CHANGES, NORMALIZERS, strict=True))
    result = aggregated(FedNova(), NORMALIZERS)
    np.testing.assert_allclose(result["w"].numpy(), GLOBAL + effective_steps * direction, rtol=0, atol=1e-14)
    assert result["count"].item() == 7


def test_additional_tensors_of_a_distillation_are_averaged():
    state = {"w": torch.tensor(GLOBAL), "count": torch.tensor(0)}
    extra = {NORMALIZER: torch.zeros((), dtype=torch.float64), "logits": torch.zeros(2)}
    accumulator = FedNova().accumulator(state, extra)
    for number, normalizer in enumerate(NORMALIZERS):
        sent_by_client = update(number, normalizer)
        logits = torch.tensor([float(number), 4.0])
        accumulator.add(dataclasses.replace(sent_by_client, extra={**sent_by_client.extra, "logits": logits}))
    assert accumulator.extra.mean_of("logits").tolist() == [1.0, 4.0]
    assert torch.equal(FedNova().aggregate(accumulator, state)["w"], aggregated(FedNova(), NORMALIZERS)["w"])


def test_equal_normalizers_give_fedavg():
    state = {"w": torch.tensor(GLOBAL), "count": torch.tensor(0)}
    accumulator = FedAvg().accumulator(state, {NORMALIZER: torch.zeros((), dtype=torch.float64)})
    for number in range(3):
        accumulator.add(update(number, 0.3))
    expected = FedAvg().aggregate(accumulator, state)["w"]
    torch.testing.assert_close(aggregated(FedNova(), [0.3] * 3)["w"], expected, rtol=0, atol=1e-14)


def groups(rate: float, momentum: float = 0.0) -> list[dict[str, object]]:
    return [{"lr": rate, "momentum": momentum, "nesterov": False, "dampening": 0.0}]


def normalizer_after(rates, momentum: float = 0.0, proximal_weight: float = 0.0) -> float:
    part = received(FedNova(), Fit(0, "a", 0, {}, settings={"proximal_weight": proximal_weight}))
    for rate in rates:
        part.on_step(groups(rate, momentum))
    update = sent(part)
    assert not part.memory
    return update.extra[NORMALIZER].item()


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_normalizer_of_plain_sgd_is_proportional_to_the_number_of_steps(num_steps):
    assert normalizer_after([0.1] * num_steps) == pytest.approx(0.1 * num_steps, rel=1e-14)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_normalizer_with_momentum_equals_the_closed_form(momentum):
    # Section 4.2 of the paper: ‖a_i‖₁ = [τ − ρ (1 − ρ^τ) / (1 − ρ)] / (1 − ρ).
    steps = 6
    closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert normalizer_after([0.1] * steps, momentum) == pytest.approx(0.1 * closed, rel=1e-13)


@pytest.mark.parametrize("proximal_weight", [0.1, 2.0])
def test_normalizer_with_proximal_term_equals_the_closed_form(proximal_weight):
    # Section 4.1 of the paper: ‖a_i‖₁ = [1 − (1 − α)^τ] / α with α = η μ.
    steps, alpha = 5, 0.1 * proximal_weight
    closed = (1 - (1 - alpha) ** steps) / alpha
    assert normalizer_after([0.1] * steps, 0.0, proximal_weight) == pytest.approx(0.1 * closed, rel=1e-13)


@pytest.mark.parametrize(("momentum", "proximal_weight"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.9, 0.5)])
def test_normalizer_is_the_distance_of_sgd_under_a_unit_gradient(momentum, proximal_weight):
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.2, momentum=momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    anchor = {"w": torch.zeros(1, dtype=torch.float64)}
    part = received(FedNova(), Fit(0, "a", 0, anchor, settings={"proximal_weight": proximal_weight}))
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        part.on_gradients({"w": weight})
        part.on_step(optimizer.param_groups)
        optimizer.step()
        schedule.step()
    assert sent(part).extra[NORMALIZER].item() == pytest.approx(-weight.item(), rel=1e-13)


def trained(tmp_path, aggregation, clients, **training):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path, optim="sgd", learning_rate=0.05, **training),
        train_dataset=clients,
        federation=FederatedConfig(num_rounds=2, aggregation=aggregation),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("optim_args", [None, "momentum=0.9"])
def test_equal_numbers_of_local_steps_give_the_fedavg_model(tmp_path, optim_args):
    clients = {"a": rows(8), "b": rows(8, seed=1)}
    nova, average = (trained(tmp_path, name, clients, optim_args=optim_args) for name in ("fednova", "fedavg"))
    for name, value in average.model.state_dict().items():
        torch.testing.assert_close(nova.model.state_dict()[name], value, rtol=0, atol=1e-6)
    assert not same_weights(nova.model, tiny_model())


def test_different_numbers_of_local_steps_differ_from_fedavg(tmp_path):
    clients = {"a": rows(4), "b": rows(16, seed=1)}
    nova, average = (trained(tmp_path, name, clients) for name in ("fednova", "fedavg"))
    difference = max(
        (nova.model.state_dict()[name] - value).abs().max() for name, value in average.model.state_dict().items()
    )
    assert difference > 1e-4


def test_proximal_weight_changes_the_trained_model(tmp_path):
    clients = {"a": rows(8), "b": rows(16, seed=1)}
    plain, proximal = (trained(tmp_path, FedNova(weight), clients) for weight in (0.0, 1.0))
    assert not same_weights(plain.model, proximal.model)


@pytest.mark.parametrize(
    ("training", "federation", "message"),
    [
        ({"optim": "adamw_torch"}, {}, "cannot compute a normalizer for optim='adamw_torch.*Set optim='sgd'"),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9"},
            {"client_optimizer_state": "carry"},
            "needs a fresh client optimizer in each round.*. Set client_optimizer_state='reset'",
        ),
    ],
)
def test_unsupported_training_arguments_raise_an_error(tmp_path, training, federation, message):
    with pytest.raises(ValueError, match=message):
        FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path, **training),
            train_dataset={"a": rows(4)},
            federation=FederatedConfig(num_rounds=1, aggregation="fednova", **federation),
        )


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": 0.1, "betas": (0.9, 0.999)}, "FedNova needs SGD with one learning rate"),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0.0}, "does not support Nesterov"),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": False, "dampening": 0.1}, "does not support Nesterov"),
    ],
)
def test_unsupported_optimizers_raise_an_error(group, message):
    with pytest.raises(ValueError, match=message):
        received(FedNova(), WITHOUT_PROXIMAL_TERM).on_step([group])


def test_two_learning_rates_raise_an_error():
    with pytest.raises(ValueError, match="one learning rate"):
        received(FedNova(), WITHOUT_PROXIMAL_TERM).on_step([*groups(0.1), *groups(0.2)])


@pytest.mark.parametrize("value", [0.0, -0.1])
def test_update_without_positive_normalizer_is_rejected(value):
    with pytest.raises(ValueError, match=rf"the normalizer is {value}; it must be positive"):
        FedNova().check_extra({NORMALIZER: torch.tensor(value, dtype=torch.float64)})


def test_negative_proximal_weight_raises_an_error():
    with pytest.raises(ValueError, match="`proximal_weight` is -1; it must be at least 0"):
        FedNova(-1)
