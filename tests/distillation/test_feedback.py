"""The server's feedback against double backward through its step, and the restoration of the model."""

from __future__ import annotations

import pytest
import torch
from server_and_clients import STEP_SIZE, exact_gradients, federation
from tiny import rows, tiny_model
from torch import nn

from hf_federated.distillation import (
    chain_rule_feedback,
    directional_derivative,
    evaluation_mode,
    logit_feedback,
    loss_gradients,
    mean_squared_error,
    model_logits,
    per_example_feedback,
    sample_pseudo_labels,
    squared_error_feedback,
    virtual_step,
)


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
@pytest.mark.parametrize("kind", ["mlp", "bert"])
def test_chain_rule_feedback_is_the_gradient_by_the_ensembles_probabilities(kind, method):
    case = federation(kind)
    _, expected = exact_gradients(case, "probabilities")
    v = case.validation_gradients(case.ensemble("probabilities").detach())
    feedback = chain_rule_feedback(case.server, case.public, v, STEP_SIZE, method=method)
    atol = 1e-10 if method == "jvp" else 1e-6
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(feedback, expected, rtol=0, atol=atol)
    probabilities = model_logits(case.server.eval(), case.public).softmax(-1)
    assert (probabilities * feedback).sum(-1).abs().max() < atol


@pytest.mark.parametrize("kind", ["mlp", "bert"])
def test_logit_feedback_is_the_gradient_by_the_ensembles_logits(kind):
    case = federation(kind)
    _, expected = exact_gradients(case, "logits")
    q = case.ensemble("logits").detach().softmax(-1)
    feedback = chain_rule_feedback(case.server, case.public, case.validation_gradients(q), STEP_SIZE)
    torch.testing.assert_close(logit_feedback(q, feedback), expected, rtol=0, atol=1e-10)
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
@pytest.mark.parametrize("kind", ["mlp", "bert"])
def test_squared_error_feedback_is_the_gradient_by_the_ensembles_logits(kind, method):
    case = federation(kind)
    _, expected = exact_gradients(case, "logits", "mean_squared_error")
    v = case.validation_gradients(case.ensemble("logits").detach(), mean_squared_error)
    feedback = squared_error_feedback(case.server, case.public, v, STEP_SIZE, method=method)
    torch.testing.assert_close(feedback, expected, rtol=0, atol=1e-10 if method == "jvp" else 1e-6)
    assert expected.abs().max() > 1e-3


def test_finite_difference_in_float32_is_accurate_to_one_percent():
    case = federation("bert")
    v = case.validation_gradients(case.ensemble("probabilities").detach())
    exact = directional_derivative(case.server, case.public, v)
    low_precision = directional_derivative(case.server.float(), case.public, v, method="finite_difference")
    assert low_precision.dtype == torch.float32
    assert (low_precision - exact).norm() < 0.01 * exact.norm()


def test_finite_difference_does_not_depend_on_the_norm_of_the_direction():
    case = federation()
    v = case.validation_gradients(case.ensemble("probabilities").detach())
    exact = directional_derivative(case.server, case.public, v)
    for scale in (1e-9, 1e9):
        scaled = {name: scale * value for name, value in v.items()}
        found = directional_derivative(case.server, case.public, scaled, method="finite_difference") / scale
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)
    zeros = {name: torch.zeros_like(value) for name, value in v.items()}
    assert not directional_derivative(case.server, case.public, zeros, method="finite_difference").any()


def test_compute_logits_selects_positions():
    """The model predicts every token, and the loss uses two of the tokens."""
    model = tiny_model().double().eval()
    inputs = {"input_ids": torch.tensor(rows(3)["input_ids"])}
    selected = torch.zeros(3, 6, dtype=torch.bool)
    selected[0, 1] = selected[2, 4] = True
    head = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def compute_logits(model, inputs):
        return (model.bert(**inputs).last_hidden_state @ head)[selected]

    v = random_like(model)
    exact = directional_derivative(model, inputs, v, compute_logits=compute_logits)
    other = directional_derivative(model, inputs, v, compute_logits=compute_logits, method="finite_difference")
    assert exact.shape == (2, 5) and exact.abs().min() > 0
    torch.testing.assert_close(exact, other, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"logits have shape \(3, 6, 16\); expected \(N, C\)"):
        directional_derivative(model, inputs, v, compute_logits=lambda m, i: m.bert(**i).last_hidden_state)


def test_directional_derivative_works_with_gradient_checkpointing():
    model = tiny_model().double()
    inputs = {"input_ids": torch.tensor(rows(3)["input_ids"])}
    v = random_like(model)
    expected = directional_derivative(model, inputs, v)
    model.gradient_checkpointing_enable()
    assert torch.equal(directional_derivative(model.train(), inputs, v), expected)


def test_derivative_ignores_dropout_and_restores_training_modes():
    model = tiny_model().double().train()  # The dropout is 0.1.
    model.bert.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    inputs = {"input_ids": torch.tensor(rows(3)["input_ids"])}
    v = random_like(model)
    for method in ("jvp", "finite_difference"):
        results = [directional_derivative(model, inputs, v, method=method) for _ in range(2)]
        assert torch.equal(*results) and not results[0].requires_grad
    with pytest.raises(RuntimeError, match="inside"), evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == modes


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether all values are bit-identical. `torch.equal` does not distinguish 0 from -0."""
    now = model.state_dict()
    return all(torch.equal(now[name].view(torch.uint8), value.view(torch.uint8)) for name, value in before.items())


def random_like(model: nn.Module) -> dict[str, torch.Tensor]:
    """Random values for every parameter."""
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_virtual_step_restores_parameters_bit_for_bit(dtype):
    model = tiny_model().to(dtype)
    parameters, before = dict(model.named_parameters()), snapshot(model)
    gradients = random_like(model)
    with virtual_step(parameters, gradients, 0.1):
        for name, value in parameters.items():
            torch.testing.assert_close(value.detach(), before[name] - 0.1 * gradients[name], rtol=0.01, atol=1e-3)
        assert not torch.equal(model.classifier.weight, before["classifier.weight"])
    assert unchanged(model, before)
    with pytest.raises(KeyboardInterrupt), virtual_step(parameters, gradients, 0.1):
        raise KeyboardInterrupt
    assert unchanged(model, before)
    assert all(value.grad is None for value in parameters.values())


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_derivative_restores_the_model_also_after_an_error(method):
    model = tiny_model()
    before, calls = snapshot(model), []
    inputs = {"input_ids": torch.tensor(rows(3)["input_ids"])}
    v = random_like(model)
    directional_derivative(model, inputs, v, method=method)
    assert unchanged(model, before)

    def broken(model, inputs):
        calls.append(model.training)
        raise RuntimeError("no logits")

    with pytest.raises(RuntimeError, match="no logits"):
        directional_derivative(model, inputs, v, method=method, compute_logits=broken)
    assert calls == [False] and model.training
    assert unchanged(model, before)
    assert all(value.requires_grad and value.grad is None for value in model.parameters())


def test_virtual_step_does_not_move_parameters_without_a_gradient():
    parameters = {"a": torch.ones(2), "b": torch.ones(2)}
    with virtual_step(parameters, {"b": torch.ones(2)}, 1.0):
        assert parameters["a"].tolist() == [1, 1] and parameters["b"].tolist() == [0, 0]


def test_virtual_step_has_an_effect_under_autocast():
    """Autocast caches low-precision copies of parameters, which are outdated after a change in place."""
    model = nn.Linear(2, 1, bias=False)
    parameters = {"weight": model.weight}
    ones = torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(ones)
        with virtual_step(parameters, {"weight": torch.ones(1, 2)}, 1.0):
            assert abs((before - model(ones)).item() - 2) < 0.05
        assert torch.equal(model(ones), before)


def test_backward_pass_after_the_virtual_step_raises_an_error():
    parameters = {"w": torch.ones(2, requires_grad=True)}
    with virtual_step(parameters, {"w": torch.ones(2)}, 0.5):
        loss = parameters["w"].square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_unused_parameter_has_a_gradient_of_zero():
    parameters = {"used": torch.ones(2, requires_grad=True), "unused": torch.ones(3, requires_grad=True)}
    gradients = loss_gradients(parameters["used"].sum(), parameters)
    assert gradients["used"].tolist() == [1, 1] and gradients["unused"].tolist() == [0, 0, 0]


class Opaque(torch.autograd.Function):
    """An operation with a backward pass and no forward derivative, as in a custom kernel."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_missing_forward_derivative_raises_an_error_that_suggests_finite_differences():
    model = nn.Linear(4, 3).double()
    inputs = {"input": torch.randn(2, 4, dtype=torch.float64)}
    v = {name: torch.ones_like(value) for name, value in model.named_parameters()}

    def opaque(model, inputs):
        return Opaque.apply(model(**inputs))

    with pytest.raises(NotImplementedError, match="use `method='finite_difference'`"):
        directional_derivative(model, inputs, v, compute_logits=opaque)
    found = directional_derivative(model, inputs, v, compute_logits=opaque, method="finite_difference", of="logits")
    expected = 2 * (inputs["input"].sum(1, keepdim=True) + 1).expand(-1, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_invalid_arguments_are_rejected():
    model, inputs = nn.Linear(4, 3), {"input": torch.randn(2, 4)}
    v = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match="'wieght' is not the name of one of the 2 parameters"):
        directional_derivative(model, inputs, {"wieght": v["weight"]})
    with pytest.raises(ValueError, match=r"'weight' has shape \(4,\), but the parameter has shape \(3, 4\)"):
        directional_derivative(model, inputs, {"weight": torch.ones(4)})
    with pytest.raises(ValueError, match=r"'bias' has shape \(1,\)"), virtual_step(v, {"bias": torch.ones(1)}, 1.0):
        pass
    with pytest.raises(ValueError, match="`method` is 'forward'"):
        directional_derivative(model, inputs, v, method="forward")
    with pytest.raises(ValueError, match="`of` is 'loss'"):
        directional_derivative(model, inputs, v, of="loss")
    with pytest.raises(ValueError, match="is torch.bfloat16, which is too narrow for a small difference"):
        directional_derivative(model.bfloat16(), inputs, v, method="finite_difference")


def test_bfloat16_derivative_is_exact_within_rounding():
    case = federation("bert")
    v = case.validation_gradients(case.ensemble("probabilities").detach())
    exact = directional_derivative(case.server, case.public, v)
    low_precision = directional_derivative(case.server.bfloat16(), case.public, v)
    assert low_precision.dtype == torch.float32
    assert (low_precision - exact).norm() < 0.05 * exact.norm()


def test_per_example_feedback_is_the_entry_of_the_pseudo_label():
    feedback = torch.arange(6.0).view(2, 3)
    assert per_example_feedback(feedback, torch.tensor([2, 0])).tolist() == [2, 3]


def test_pseudo_labels_follow_the_probabilities_and_the_generator():
    q = torch.tensor([[0.7, 0.3, 0.0]]).expand(20_000, 3)
    labels = sample_pseudo_labels(q, torch.Generator().manual_seed(0))
    assert labels.shape == (20_000,) and labels.dtype == torch.int64
    torch.testing.assert_close(labels.bincount(minlength=3) / 20_000, q[0], rtol=0, atol=0.015)
    assert torch.equal(labels, sample_pseudo_labels(q, torch.Generator().manual_seed(0)))
