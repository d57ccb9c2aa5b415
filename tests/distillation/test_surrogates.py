"""Surrogate losses of clients: their gradients are exact, or exact on average over all draws of labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from server_and_clients import STEP_SIZE, Federation, exact_gradients, federation
from torch.nn import functional as F

from hf_federated.distillation import (
    chain_rule_feedback,
    chain_rule_surrogate,
    logit_feedback,
    loss_gradients,
    mean_squared_error,
    model_logits,
    mpl_sampled_surrogate,
    mpl_surrogate,
    per_example_feedback,
    per_example_surrogate,
    soft_cross_entropy,
    squared_error_feedback,
    virtual_step,
)


Surrogate = Callable[[torch.Tensor, float], torch.Tensor]


def client_gradients(case: Federation, averaged: str, surrogate: Surrogate) -> list[torch.Tensor]:
    """The gradients of each client's own surrogate, in the order of the clients."""
    found = []
    for client, predictions, weight in zip(case.clients, case.predictions(averaged), case.weights, strict=True):
        found += torch.autograd.grad(surrogate(predictions, weight), list(client.parameters()))
    return found


def draws(q: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
    """Every assignment of classes to rows, with its probability."""
    for labels in itertools.product(range(q.shape[1]), repeat=len(q)):
        index = torch.tensor(labels)
        yield index, q.gather(1, index.unsqueeze(1)).prod().item()


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], atol: float) -> None:
    assert max(value.abs().max() for value in expected) > 1000 * atol
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["mlp", "bert"])
@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_chain_rule_surrogate_gives_the_gradient_of_double_backward(kind, averaged):
    case = federation(kind)
    expected, _ = exact_gradients(case, averaged)
    ensemble = case.ensemble(averaged).detach()
    q = ensemble.softmax(-1) if averaged == "logits" else ensemble
    feedback = chain_rule_feedback(case.server, case.public, case.validation_gradients(q), STEP_SIZE)
    if averaged == "logits":
        feedback = logit_feedback(q, feedback)
    found = client_gradients(case, averaged, lambda y, w: chain_rule_surrogate(y, feedback, w))
    assert_close(found, expected, atol=1e-10)


def test_chain_rule_surrogate_with_squared_error_gives_the_gradient_of_double_backward():
    case = federation("bert")
    expected, _ = exact_gradients(case, "logits", "mean_squared_error")
    v = case.validation_gradients(case.ensemble("logits").detach(), mean_squared_error)
    feedback = squared_error_feedback(case.server, case.public, v, STEP_SIZE)
    found = client_gradients(case, "logits", lambda y, w: chain_rule_surrogate(y, feedback, w))
    assert_close(found, expected, atol=1e-10)


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_per_example_surrogate_is_the_chain_rule_on_average_over_pseudo_labels(averaged):
    case = federation(num_rows=2)
    expected, _ = exact_gradients(case, averaged)
    ensemble = case.ensemble(averaged).detach()
    q = ensemble.softmax(-1) if averaged == "logits" else ensemble
    feedback = chain_rule_feedback(case.server, case.public, case.validation_gradients(q), STEP_SIZE)
    average = [torch.zeros_like(value) for value in expected]
    for labels, probability in draws(q):
        r = per_example_feedback(feedback, labels)
        gradients = client_gradients(
            case, averaged, lambda y, w, s=labels, r=r: per_example_surrogate(y, ensemble, s, r, w, averaged)
        )
        average = [total + probability * value for total, value in zip(average, gradients, strict=True)]
    assert_close(average, expected, atol=1e-10)


def loss_after_step_on_labels(case: Federation, labels: torch.Tensor, step_size: float) -> torch.Tensor:
    parameters = dict(case.server.named_parameters())
    loss = F.cross_entropy(model_logits(case.server, case.public), labels)
    with virtual_step(parameters, loss_gradients(loss, parameters), step_size), torch.no_grad():
        return case.validation_loss(case.server)


def mpl_sampled_average(case: Federation, averaged: str, step_size: float) -> list[torch.Tensor]:
    """The expected gradient of the surrogate over all draws of pseudo-labels."""
    ensemble = case.ensemble(averaged).detach()
    q = ensemble.softmax(-1) if averaged == "logits" else ensemble
    old = case.validation_loss(case.server).item()
    average = [torch.zeros_like(weight) for client in case.clients for weight in client.parameters()]
    for labels, probability in draws(q):
        improvement = old - loss_after_step_on_labels(case, labels, step_size).item()
        gradients = client_gradients(
            case,
            averaged,
            lambda y, w, s=labels, i=improvement: mpl_sampled_surrogate(y, ensemble, s, i, w, averaged),
        )
        average = [total + probability * value for total, value in zip(average, gradients, strict=True)]
    return average


def two_clients() -> Federation:
    """A federation with two clients, two rows and two classes."""
    return federation(num_classes=2, num_rows=2, weights=(0.7, 0.3))


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_mpl_sampled_surrogate_gives_the_gradient_of_the_expected_loss_on_average(averaged):
    case = two_clients()
    ensemble = case.ensemble(averaged)
    q = ensemble.softmax(-1) if averaged == "logits" else ensemble
    expected_loss = torch.zeros((), dtype=torch.float64)
    for labels, _ in draws(q.detach()):
        # The probability of the draw has a graph to all clients. The loss of the draw is a constant.
        probability = q.gather(1, labels.unsqueeze(1)).prod()
        expected_loss = expected_loss + probability * loss_after_step_on_labels(case, labels, STEP_SIZE)
    weights = [weight for client in case.clients for weight in client.parameters()]
    expected = list(torch.autograd.grad(expected_loss, weights))
    assert_close(mpl_sampled_average(case, averaged, STEP_SIZE), expected, atol=1e-8)


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_mpl_sampled_surrogate_approaches_the_chain_rule_for_small_steps(averaged):
    case = two_clients()
    ensemble = case.ensemble(averaged).detach()
    q = ensemble.softmax(-1) if averaged == "logits" else ensemble
    distances = []
    for step_size in (1e-1, 1e-2, 1e-3):
        parameters = dict(case.server.named_parameters())
        gradients = loss_gradients(soft_cross_entropy(model_logits(case.server, case.public), q), parameters)
        with virtual_step(parameters, gradients, step_size):
            v = loss_gradients(case.validation_loss(case.server), parameters)
        feedback = chain_rule_feedback(case.server, case.public, v, step_size)
        if averaged == "logits":
            feedback = logit_feedback(q, feedback)
        exact = client_gradients(case, averaged, lambda y, w, g=feedback: chain_rule_surrogate(y, g, w))
        found = mpl_sampled_average(case, averaged, step_size)
        difference = torch.cat([(one - other).flatten() for one, other in zip(found, exact, strict=True)])
        distances.append((difference.norm() / torch.cat([value.flatten() for value in exact]).norm()).item())
    # The relative distance has the order of the step size.
    assert distances[1] < 0.2 * distances[0] and distances[2] < 0.2 * distances[1] and distances[2] < 0.01


@pytest.mark.parametrize("function", ["per_example", "mpl_sampled"])
def test_score_of_the_client_instead_of_the_ensemble_is_biased(function):
    """The surrogates need the ensemble: with `log y^k` instead, the average is another gradient."""
    case = two_clients()
    expected, _ = exact_gradients(case, "probabilities")
    q = case.ensemble("probabilities").detach()
    feedback = chain_rule_feedback(case.server, case.public, case.validation_gradients(q), STEP_SIZE)
    if function == "mpl_sampled":
        expected = mpl_sampled_average(case, "probabilities", STEP_SIZE)
    old = case.validation_loss(case.server).item()
    average = [torch.zeros_like(value) for value in expected]
    for labels, probability in draws(q):
        improvement = old - loss_after_step_on_labels(case, labels, STEP_SIZE).item()
        rewards = per_example_feedback(feedback, labels) if function == "per_example" else -improvement

        def own_score(y, w, s=labels, r=rewards):
            return (w * r * y.gather(1, s.unsqueeze(1)).squeeze(1).log()).sum()

        gradients = client_gradients(case, "probabilities", own_score)
        average = [total + probability * value for total, value in zip(average, gradients, strict=True)]
    distance = torch.cat([(one - other).flatten() for one, other in zip(average, expected, strict=True)]).norm()
    assert distance > 0.05 * torch.cat([value.flatten() for value in expected]).norm()


def test_mpl_surrogate_is_the_weighted_improvement_times_cross_entropy():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    value = mpl_surrogate(logits, logits.argmax(1), improvement=0.25, weight=0.4)
    cross_entropy = -(logits.softmax(1)[0, 0].log() + logits.softmax(1)[1, 1].log()) / 2
    torch.testing.assert_close(value, 0.4 * 0.25 * cross_entropy)


@pytest.mark.parametrize("improvement", [0.5, -0.5])
def test_descent_raises_the_probability_of_labels_that_improve_the_server(improvement):
    ensemble, labels = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([1])
    own = torch.zeros(1, 3, requires_grad=True)
    for value in (
        mpl_sampled_surrogate(own.softmax(1), ensemble, labels, improvement, 0.5),
        mpl_sampled_surrogate(own, ensemble.log(), labels, improvement, 0.5, "logits"),
        mpl_surrogate(own, labels, improvement, 0.5),
        per_example_surrogate(own.softmax(1), ensemble, labels, torch.tensor([-improvement]), 0.5),
    ):
        (gradient,) = torch.autograd.grad(value, own)
        assert (gradient[0, 1] < 0) == (improvement > 0)


def test_only_predictions_of_the_client_get_a_gradient():
    y, labels = torch.tensor([[0.5, 0.5]], requires_grad=True), torch.tensor([1])
    received = [torch.tensor([[0.3, 0.7]], requires_grad=True), torch.tensor([1.0], requires_grad=True)]
    surrogates = (
        chain_rule_surrogate(y, received[0], 0.5),
        per_example_surrogate(y, received[0], labels, received[1], 0.5),
        mpl_sampled_surrogate(y, received[0], labels, 0.1, 0.5),
    )
    for value in surrogates:
        value.backward()
    assert y.grad is not None and all(tensor.grad is None for tensor in received)


def test_likelihood_is_computed_from_the_received_ensemble():
    """Dropout can change the client's own predictions after the client sent them."""
    ensemble, labels = torch.tensor([[0.3, 0.7]]), torch.tensor([1])
    gradients = []
    for own in ([[0.5, 0.5]], [[0.9, 0.1]]):
        y = torch.tensor(own, requires_grad=True)
        value = per_example_surrogate(y, ensemble, labels, torch.tensor([2.0]), 0.5)
        assert value.item() == pytest.approx(2 * torch.tensor(0.7).log().item())
        gradients += torch.autograd.grad(value, y)
    assert torch.equal(*gradients) and gradients[0][0, 1].item() == pytest.approx(2 * 0.5 / 0.7)


def test_invalid_averaged_argument_is_rejected():
    y, labels = torch.ones(1, 2), torch.tensor([1])
    with pytest.raises(ValueError, match="`averaged` is 'scores'"):
        per_example_surrogate(y, y, labels, torch.ones(1), 0.5, "scores")
