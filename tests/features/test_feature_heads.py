"""Heads on features are transformers models that averaging and distillation train."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from distillation_setup import METHODS, SHARED_MODEL
from tiny import arguments
from transformers import AutoModelForSequenceClassification

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer
from hf_federated.features import FeatureClassifier, FeatureClassifierConfig


LABELS = {"id2label": {0: "x", 1: "y", 2: "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}


def head(hidden_sizes=(), seed=0):
    torch.manual_seed(seed)
    return FeatureClassifier(FeatureClassifierConfig(feature_size=4, hidden_sizes=list(hidden_sizes), **LABELS))


def examples(num_rows, seed=0, with_labels=True):
    features = np.random.default_rng(seed).standard_normal((num_rows, 4)).astype(np.float32)
    labels = {"labels": (features[:, :3].argmax(1)).tolist()} if with_labels else {}
    return Dataset.from_dict({"features": features, **labels})


def test_logistic_head_is_a_linear_map_with_cross_entropy():
    model, features, labels = head(), torch.randn(5, 4), torch.tensor([0, 1, 2, -100, 1])
    output = model(features=features, labels=labels)
    logits = features @ model.classifier.weight.T + model.classifier.bias
    expected = -torch.stack([logits[row].log_softmax(0)[labels[row]] for row in (0, 1, 2, 4)]).mean()
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("hidden_sizes", [(), (5,), (6, 5)])
def test_saved_head_is_loaded_by_the_auto_class(hidden_sizes, tmp_path):
    model = head(hidden_sizes)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == LABELS["id2label"] and loaded.config.hidden_sizes == list(hidden_sizes)
    features = torch.randn(3, 4)
    assert torch.equal(loaded(features=features).logits, model.eval()(features=features).logits)


def test_sizes_and_dropout_are_checked():
    with pytest.raises(ValueError, match="`hidden_sizes` is 0; it must be at least 1"):
        FeatureClassifierConfig(hidden_sizes=[0])
    with pytest.raises(ValueError, match="`feature_size` is 0"):
        FeatureClassifierConfig(feature_size=0)
    with pytest.raises(ValueError, match="`dropout` is 1.5; it must be at least 0 and below 1"):
        FeatureClassifierConfig(dropout=1.5)


def train(tmp_path, federation, models=None, **kwargs):
    given = {"clients": models} if models else {}
    trainer = FederatedTrainer(
        model=head((5,)),
        args=arguments(tmp_path, learning_rate=0.05, per_device_train_batch_size=4),
        train_dataset={name: examples(16, seed) for seed, name in enumerate("abc")},
        eval_dataset=examples(32, 9),
        federation=FederatedConfig(**{"num_rounds": 2, **federation}),
        **given,
        **kwargs,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, before, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedopt", "scaffold", "median", "fedexp"])
def test_averaging_trains_a_head_in_the_lean_loop(aggregation, tmp_path):
    trainer, before, after = train(tmp_path, {"aggregation": aggregation})
    assert after < before
    assert '"local_loops": {"lean": 6}' in (tmp_path / "_rounds.jsonl").read_text()


def test_secure_sums_of_a_head_equal_the_plain_average(tmp_path):
    plain, _, _ = train(tmp_path / "plain", {})
    kwargs = {"max_weight": 16}
    masked, _, _ = train(tmp_path / "masked", {"secure_aggregation": "secagg", "secure_aggregation_kwargs": kwargs})
    for first, second in zip(plain.model.parameters(), masked.model.parameters(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [pair for pair in METHODS if pair[0] != "feddrs"],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
@pytest.mark.sampled(8)
def test_distillation_trains_heads_on_public_features(method, kwargs, tmp_path):
    own = {} if method in SHARED_MODEL else {"a": ClientSpec(model=head((3,), 1)), "b": ClientSpec(model=head((), 2))}
    federation = {"distillation": method, "distillation_kwargs": {"server_epochs": 2, **kwargs}, "local_epochs": 2}
    if method in ("fedid", "feded"):  # no epochs of the server
        federation["distillation_kwargs"] = kwargs
    if method in ("fedkd", "fedaux"):  # one exchange
        federation["num_rounds"] = 1
    _, before, after = train(
        tmp_path,
        federation,
        own,
        public_dataset=examples(24, 7, with_labels=False),
        server_dataset=examples(8, 8),
    )
    assert np.isfinite(after) and after != before
    assert '"trainer"' not in (tmp_path / "_rounds.jsonl").read_text()


def test_methods_that_create_texts_refuse_features(tmp_path):
    with pytest.raises(ValueError, match="no `inputs_embeds`"):
        train(tmp_path, {"distillation": "feddrs"})
