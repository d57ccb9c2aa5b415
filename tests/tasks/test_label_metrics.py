"""Tests of accuracy, F1 and Matthews correlation against scikit-learn and against the formulas."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import evaluate
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from hf_federated.tasks.metrics import F1, Accuracy, MatthewsCorrelation


def draw(seed: int, num_labels: int = 4, num_rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of which more than half are correct, and references."""
    generator = np.random.default_rng(seed)
    references = generator.integers(num_labels, size=num_rows)
    guesses = generator.integers(num_labels, size=num_rows)
    return np.where(generator.random(num_rows) < 0.5, references, guesses), references


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_scikit_learn(seed):
    predictions, references = draw(seed)
    scores = evaluate.combine([Accuracy(), F1(), MatthewsCorrelation()]).compute(
        predictions=predictions, references=references
    )
    assert scores == {
        "accuracy": pytest.approx(accuracy_score(references, predictions)),
        "f1_macro": pytest.approx(f1_score(references, predictions, average="macro")),
        "f1_weighted": pytest.approx(f1_score(references, predictions, average="weighted")),
        "matthews_correlation": pytest.approx(matthews_corrcoef(references, predictions)),
    }


def test_f1_is_mean_over_classes():
    # TP, FN and FP: 2, 1 and 1 for class 0 (F1 4/6), 1, 1 and 1 for class 1 (F1 2/4).
    scores = F1().compute(predictions=[0, 0, 1, 1, 0], references=[0, 0, 0, 1, 1])
    assert scores["f1_macro"] == pytest.approx((4 / 6 + 2 / 4) / 2)
    assert scores["f1_weighted"] == pytest.approx((3 * 4 / 6 + 2 * 2 / 4) / 5)


def test_absent_class_counts_only_if_in_labels():
    rows = {"predictions": [0, 1, 1], "references": [0, 1, 0]}
    two_classes = F1().compute(**rows)
    three_classes = F1(labels=[0, 1, 2]).compute(**rows)
    assert three_classes["f1_macro"] == pytest.approx(two_classes["f1_macro"] * 2 / 3)
    assert three_classes["f1_weighted"] == pytest.approx(two_classes["f1_weighted"])


def test_single_class_gives_finite_scores_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = evaluate.combine([Accuracy(), F1(labels=range(3)), MatthewsCorrelation()]).compute(
            predictions=[1, 1], references=[1, 1]
        )
    assert scores == {
        "accuracy": 1.0,
        "f1_macro": pytest.approx(1 / 3),
        "f1_weighted": 1.0,
        "matthews_correlation": 0.0,
    }


def test_matthews_correlation_equals_published_formula():
    predictions, references = draw(seed=5, num_labels=3)
    num_rows, right = len(references), int((predictions == references).sum())
    predicted, true = np.bincount(predictions, minlength=3), np.bincount(references, minlength=3)
    expected = (right * num_rows - predicted @ true) / math.sqrt(
        (num_rows**2 - predicted @ predicted) * (num_rows**2 - true @ true)
    )
    assert MatthewsCorrelation().compute(predictions=predictions, references=references) == {
        "matthews_correlation": pytest.approx(expected)
    }


@pytest.mark.parametrize("metric_class", [Accuracy, F1, MatthewsCorrelation])
def test_scores_do_not_depend_on_batches(metric_class):
    predictions, references = draw(seed=1)
    metric = metric_class()
    for begin in range(0, len(references), 60):
        rows = slice(begin, begin + 60)
        metric.add_batch(predictions=predictions[rows], references=references[rows])
    at_once = metric_class().compute(predictions=predictions, references=references)
    assert metric.compute() == at_once
    assert metric.compute(predictions=predictions, references=references) == at_once  # previous inputs are cleared


@pytest.mark.parametrize("metric_class", [Accuracy, F1, MatthewsCorrelation])
def test_compute_without_inputs_raises(metric_class):
    with pytest.raises(ValueError, match="no inputs"):
        metric_class().compute()
    with pytest.raises(ValueError, match="no inputs"):
        metric_class().compute(predictions=[], references=[])


def test_f1_with_empty_labels_raises():
    with pytest.raises(ValueError, match="`labels` is empty"):
        F1(labels=[])


def test_files_are_written_only_with_cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "home"))
    rows = {"predictions": [0, 1], "references": [0, 0]}
    assert Accuracy().compute(**rows) == {"accuracy": 0.5}
    assert not list(tmp_path.iterdir())
    assert Accuracy(cache_dir=str(tmp_path / "cache")).compute(**rows) == {"accuracy": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_optional_packages_are_not_imported_with_module():
    code = (
        "import sys, transformers, evaluate\nbefore = set(sys.modules)\nimport hf_federated.tasks.metrics\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "hf_federated" in loaded
    assert loaded.isdisjoint({"sklearn", "seqeval", "rouge_score", "nltk"})


def test_missing_package_error_names_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"F1 needs scikit-learn.*hf-federated\[metrics\]"):
        F1()
