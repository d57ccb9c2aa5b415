"""Tests of perplexity against the mean token loss of a model."""

from __future__ import annotations

import math

import evaluate
import numpy as np
import pytest
import torch

from hf_federated.tasks.metrics import Accuracy, Perplexity


def test_all_tokens_have_the_same_weight():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(12, 7, generator=generator), torch.randint(7, (12,), generator=generator)
    expected = math.exp(torch.nn.functional.cross_entropy(logits, labels).item())
    rows = [slice(0, 9), slice(9, 10), slice(10, 12)]
    nll = [torch.nn.functional.cross_entropy(logits[row], labels[row], reduction="sum").item() for row in rows]
    lengths = [9, 1, 2]
    assert Perplexity().compute(nll=nll, num_tokens=lengths)["perplexity"] == pytest.approx(expected, rel=1e-5)
    exp_of_mean_losses = math.exp(np.mean([total / length for total, length in zip(nll, lengths, strict=True)]))
    assert abs(exp_of_mean_losses - expected) > 1e-2


def test_perplexity_does_not_depend_on_batches():
    nll, num_tokens = [3.0, 8.0, 0.0, 5.5], [2, 5, 0, 1]
    metric = Perplexity()
    metric.add_batch(nll=nll[:1], num_tokens=num_tokens[:1])
    metric.add_batch(nll=nll[1:], num_tokens=num_tokens[1:])
    assert metric.compute() == {"perplexity": pytest.approx(math.exp(16.5 / 8))}


def test_perplexity_combines_with_metrics_of_other_inputs():
    both = evaluate.combine([Accuracy(), Perplexity()])
    both.add_batch(predictions=[1, 0], references=[1, 1], nll=[math.log(9)], num_tokens=[2])
    assert both.compute() == {"accuracy": 0.5, "perplexity": pytest.approx(3.0)}


def test_overflow_gives_infinite_perplexity():
    assert Perplexity().compute(nll=[1e6], num_tokens=[1]) == {"perplexity": math.inf}


def test_invalid_token_counts_raise():
    with pytest.raises(ValueError, match="Row 1 has num_tokens=-1"):
        Perplexity().compute(nll=[1.0, 1.0], num_tokens=[3, -1])
    with pytest.raises(ValueError, match="No row has a token"):
        Perplexity().compute(nll=[0.0], num_tokens=[0])
    with pytest.raises(ValueError, match="no inputs"):
        Perplexity().compute(nll=[], num_tokens=[])
