"""Runs of a benchmark store a prediction for each test example, from the pass that computes their metrics."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import yaml
from datasets import Dataset
from transformers import TrainerCallback

from hf_federated.cli.main import main
from hf_federated.data.source import row_hashes
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.benchmark.prediction_files import copy_predictions
from hf_federated.experiments.calibration import calibrated_loss
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.execution import build_run, run_federated
from hf_federated.experiments.predictions import ExamplePredictions, read_predictions
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.tasks.label_logits import LabelLogits


@pytest.fixture
def values(recipe_path, texts_dir):
    """Text classification with one test split and one further split."""
    return read_values(
        recipe_path,
        [
            f"data={{path: {texts_dir}, test_split: test, further_test_splits: [shifted]}}",
            "partition={name: iid, num_clients: 3}",
            "local_clients=2",
        ],
    )


@pytest.mark.parametrize("method", ["federated", "centralized", "local"])
def test_predictions_agree_with_the_metrics_of_the_run(values, method, tmp_path):
    result = measure_run(values, method, tmp_path)
    assert result["predictions"] == str(tmp_path / "predictions.npz")
    stored = read_predictions(tmp_path)
    for split, metrics in {"": result["metrics"], "shifted": result["further_tests"]["shifted"]}.items():
        assert stored[split].correct.mean() == pytest.approx(metrics["accuracy"], abs=1e-6)
        assert -stored[split].log_probability.mean() == pytest.approx(metrics["loss"], rel=1e-4)
    assert "calibrated_loss" not in result["metrics"]  # there are no validation examples


@pytest.mark.parametrize("setting", ["sorted by length", "by client", "client models"])
def test_each_prediction_belongs_to_its_row(values, setting, recipe_path, model_dir, tmp_path):
    """A trainer evaluates rows in another order than the raw rows, which depends on the recipe."""
    if setting == "by client":
        values["data"].pop("further_test_splits")
        values["federation"]["evaluate_clients"] = True
    if setting == "client models":
        values["client_models"] = [{"name_or_path": str(model_dir)}]
        values["public"] = {"share": 0.3}
        values["federation"] |= {"distillation": "fedmd", "clients_per_round": 3}
    run = build_run(parse_recipe(values), str(tmp_path))
    scorer = run.scorer("federated")
    run_federated(run, scorer)
    by_row = scorer.predictions[""].by_row()
    rows, trainer = run.data.raw.test, run.trainer
    assert len(by_row) == len(rows) == 12
    encoded = run.data.task.prepare(rows, trainer.processing_class)
    for position, hashed in enumerate(row_hashes(rows).tolist()):
        alone = trainer.predict(encoded.select([position]))  # without padding
        logits = alone.predictions[0].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        correct, log_probability = by_row[f"{hashed:016x}-0"]
        assert correct == (logits.argmax() == alone.label_ids[0])
        assert log_probability == pytest.approx(expected[alone.label_ids[0]], abs=1e-4)


class CountBatches(TrainerCallback):
    def __init__(self):
        self.num_batches = 0

    def on_prediction_step(self, args, state, control, **kwargs):
        self.num_batches += 1


def test_test_examples_are_predicted_once(values, tmp_path):
    counts = []
    for scored in (False, True):
        run, counter = build_run(parse_recipe(values), str(tmp_path / str(scored))), CountBatches()
        run.trainer.add_callback(counter)
        run_federated(run, run.scorer("federated") if scored else None)
        counts.append(counter.num_batches)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("field", ["validation_split", "validation_examples"])
def test_calibrated_loss_uses_the_temperature_of_the_validation_examples(values, field, tmp_path):
    values["data"].pop("further_test_splits")
    values["data"][field] = {"validation_split": "shifted", "validation_examples": 0.25}[field]
    run = build_run(parse_recipe(values), str(tmp_path))
    metrics = run_federated(run, run.scorer("federated"))["metrics"]
    values["data"]["evaluate_on"] = "validation"
    scores = []
    for examples in (load_raw_data(parse_recipe(values)).test, run.data.raw.test):
        predicted = run.trainer.predict(run.data.task.prepare(examples, run.trainer.processing_class))
        scores += [predicted.predictions, np.array(examples["label"])]
    loss, temperature = calibrated_loss(*scores)
    assert metrics["calibrated_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["temperature"] == pytest.approx(temperature, rel=1e-3)
    assert set(metrics) >= {"accuracy", "loss"}


@pytest.mark.parametrize("method", ["centralized", "local"])
def test_baselines_have_a_calibrated_loss(values, method, tmp_path):
    values["data"]["validation_examples"] = 0.25
    metrics = measure_run(values, method, tmp_path)["metrics"]
    assert 0 < metrics["calibrated_loss"] < math.inf and 0.01 <= metrics["temperature"] <= 100


def test_a_run_on_validation_examples_has_no_calibrated_loss(values, tmp_path):
    """Its examples would choose the temperature for themselves. It stores predictions for them."""
    values["data"] |= {"validation_examples": 0.25, "evaluate_on": "validation"}
    result = measure_run(values, "federated", tmp_path)
    assert "calibrated_loss" not in result["metrics"] and "loss" in result["metrics"]
    assert len(read_predictions(tmp_path)[""].rows) == 15  # a quarter of 60 examples


def test_a_missing_validation_split_is_an_error_before_training(values, tmp_path):
    values["data"] |= {"validation_split": "missing"}
    with pytest.raises(RecipeError, match="missing"):
        measure_run(values, "federated", tmp_path)


def test_a_model_with_one_class_has_the_log_probability_zero():
    """The softmax of one logit is 1, at each temperature."""
    logits, labels = np.array([[3.0], [-1.0]]), np.zeros(2, dtype=np.int64)
    assert calibrated_loss(logits, labels, logits, labels)[0] == 0
    predictions = ExamplePredictions.from_models(
        Dataset.from_dict({"text": ["a", "b"]}), [LabelLogits(logits, labels)]
    )
    assert predictions.correct.tolist() == [1, 1] and predictions.log_probability.tolist() == [0, 0]


def test_a_task_without_one_label_for_each_example_stores_no_predictions(values, tmp_path):
    values["task"] = {"name": "sequence-tagging", "max_length": 16}
    values["data"].pop("further_test_splits")
    result = measure_run(values, "federated", tmp_path)
    assert result["predictions"] is None and not list(tmp_path.rglob("*.npz"))


def test_word_scores_of_causal_models_are_stored(recipe_path, llama_dir, phrases_dir, tmp_path):
    values = read_values(
        recipe_path,
        [
            f"model.name_or_path={llama_dir}",
            f"data={{path: {phrases_dir}, test_split: validation, validation_examples: 0.2}}",
            "task={name: cloze-classification, template: '{sentence} is', max_length: 24}",
            "task.label_names=[negative, positive]",
            "task.words=[dull, bright]",
            "partition={name: iid, num_clients: 2}",
        ],
    )
    result = measure_run(values, "federated", tmp_path)
    stored = read_predictions(tmp_path)[""]
    assert stored.correct.mean() == pytest.approx(result["metrics"]["accuracy"], abs=1e-6)
    assert -stored.log_probability.mean() == pytest.approx(result["metrics"]["log_loss"], rel=1e-5)
    assert 0 < result["metrics"]["calibrated_loss"] < math.inf
    assert len(stored.by_row()) == len(stored.rows) == 20  # equal phrases have separate predictions


def test_records_name_their_predictions_and_another_benchmark_copies_them(values, tmp_path):
    folder, other = tmp_path / "grid", tmp_path / "other"
    for name, run in (("first", "FedAvg"), ("second", "mean")):
        grid = {**values, "benchmark": {"seeds": [3], "runs": {run: {}}}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(grid))
    command = ["benchmark", str(tmp_path / "first.yaml"), "--output-dir", str(folder)]
    assert main(command) == 0
    (record,) = map(json.loads, (folder / "first" / "runs.jsonl").read_text().splitlines())
    assert record["predictions"] == f"runs/FedAvg/seed-3/{record['full_digest'][:12]}/predictions.npz"
    moved = tmp_path / "moved"
    os.rename(folder / "first", moved)  # records travel
    examples = read_predictions(moved / record["predictions"])[""].by_row()
    assert len(examples) == 12
    command = ["benchmark", str(tmp_path / "second.yaml"), "--output-dir", str(other), "--reuse", str(moved)]
    assert main(command) == 0
    (reused,) = map(json.loads, (other / "second" / "runs.jsonl").read_text().splitlines())
    assert reused["predictions"].startswith("runs/mean/seed-3/")
    assert read_predictions(other / "second" / reused["predictions"])[""].by_row() == examples
    old = {name: value for name, value in record.items() if name != "predictions"}
    assert copy_predictions(old, moved, other, "runs/old") is None  # a record of an older program
