"""FedID's baselines as in its published code compute its formulas."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_federated.distillation import build_distillation


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from recipes.fedid import published

    yield published
    for name in [name for name in sys.modules if name.partition(".")[0] == "recipes"]:
        del sys.modules[name]


class Cohort:
    """Two clients with 30 and 10 examples."""

    metrics = {"a": {"num_examples": 30.0}, "b": {"num_examples": 10.0}}
    clients = ("a", "b")


@pytest.fixture
def predictions():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 3, generator=generator, dtype=torch.float64) for name in "ab"}


def test_dsfl_learns_the_argmax_of_the_mean_of_logits(published, predictions):
    method = published.PublishedDSFL()
    labels = (0.75 * predictions["a"] + 0.25 * predictions["b"]).argmax(-1)
    targets = method.ensemble(predictions, Cohort())
    logits = torch.randn(6, 3, dtype=torch.float64)
    assert method.server_loss(logits, targets.double()) == pytest.approx(F.cross_entropy(logits, labels).item())
    assert method.broadcast(targets, None) is targets


def test_mhat_learns_the_argmax_of_each_client(published, predictions):
    method = published.PublishedMHAT()
    logits = torch.randn(6, 3, dtype=torch.float64)
    losses = [F.cross_entropy(logits, predictions[name].argmax(-1)) for name in "ab"]
    expected = 0.75 * losses[0] + 0.25 * losses[1]
    targets = method.ensemble(predictions, Cohort()).double()
    assert method.server_loss(logits, targets).item() == pytest.approx(expected.item())

    class Server:
        def predict(self):
            return logits

    assert torch.equal(method.broadcast(None, Server()).argmax(-1), logits.argmax(-1))


def test_fedkd_learns_the_mean_of_logits_by_squared_error(published, predictions):
    method = published.PublishedFedKD()
    logits = torch.randn(6, 3, dtype=torch.float64)
    mean = 0.75 * predictions["a"] + 0.25 * predictions["b"]
    targets = method.ensemble(predictions, Cohort()).double()
    assert method.server_loss(logits, targets).item() == pytest.approx(F.mse_loss(logits, mean).item(), rel=1e-6)
    assert method.server_epochs == 3


def test_recipes_name_the_baselines(published):
    method = build_distillation("recipes.fedid.published:PublishedMHAT", {"client_lr": 0.1})
    assert method.client_lr == 0.1 and method.name == "published-mhat"
