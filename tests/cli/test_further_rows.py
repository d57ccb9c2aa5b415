"""Splits that a trained model is tested on too, and clients' own test rows, in runs, records and reports."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from hf_federated.cli.main import main
from hf_federated.cli.recipe import load_recipe
from hf_federated.cli.rows import load_rows
from hf_federated.cli.runs import build_run, run_federated
from hf_federated.cli.schema import RecipeError
from hf_federated.cli.train import closing_table


@pytest.fixture
def grid_path(recipe_path, texts_dir, model_dir):
    """A grid over clients of two models, with a further split to test on."""
    recipe = yaml.safe_load(recipe_path.read_text())
    recipe["data"] = {
        "path": str(texts_dir),
        "test_split": "test",
        "further_test_splits": ["shifted"],
        "max_test_rows": 9,
    }
    recipe["partition"] = {"name": "iid", "num_clients": 3}
    recipe["public"] = {"share": 0.25}
    small = {"name_or_path": str(model_dir), "kwargs": {"num_hidden_layers": 1}}
    recipe["client_models"] = [small, {"name_or_path": str(model_dir)}]
    recipe["federation"] = {"num_rounds": 1, "evaluate_clients": True, "distillation": "dsfl"}
    recipe["benchmark"] = {"seeds": [0], "runs": {"one model": {"method": "centralized"}, "DS-FL": {}}}
    recipe_path.write_text(yaml.safe_dump(recipe))
    return recipe_path


def test_records_and_reports_have_further_splits_and_clients(grid_path, tmp_path, capsys):
    assert main(["benchmark", str(grid_path), "--output-dir", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    lines = (tmp_path / "out" / "recipe" / "runs.jsonl").read_text().splitlines()
    records = {record["run"]: record for record in map(json.loads, lines)}
    for record in records.values():
        assert list(record["clients"]) == ["0", "1", "2"]
        assert all(own.keys() == record["metrics"].keys() for own in record["clients"].values())
        # The further split has the same rows as `test`, of which the same were drawn.
        assert record["further_tests"] == {"shifted": pytest.approx(record["metrics"])}
    # One model is as good over all rows as over the clients' shares of them.
    central = records["one model"]
    mean = np.average([own["accuracy"] for own in central["clients"].values()], weights=[4, 4, 4])
    assert mean == pytest.approx(central["metrics"]["accuracy"])
    # Evaluating further rows is no evaluation of a round.
    assert [entry["round"] for entry in records["DS-FL"]["history"]] == [1]
    assert "on further rows, by split" in printed and "own test rows" in printed
    value = records["DS-FL"]["clients"]["1"]["accuracy"]
    row = next(line for line in printed.split("own test rows")[1].splitlines() if "DS-FL" in line)
    assert f"{value:.4f}" in row.split("|")[3]


def test_clients_are_evaluated_with_models_of_their_own(grid_path):
    run = build_run(load_recipe(grid_path, []))
    result = run_federated(run)
    opened = {client_id: run.trainer.engine.worker.models.open(client_id) for client_id in run.trainer.clients}
    for client_id, model in opened.items():
        rows = run.inputs.test_clients[client_id]
        expected = model.trainer.evaluate(rows)["eval_loss"]
        assert result["clients"][client_id]["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_closing_table_of_a_run_names_further_splits():
    one = {"metrics": {"accuracy": 0.5}, "further_tests": {"shifted": {"accuracy": 0.25}}, "num_epochs": 1.0}
    federated = {**one, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    results = {"metric": "accuracy", "lower_is_better": False, "num_test_clients": None, "num_test_rows": 4}
    lines = closing_table({**results, "baselines": {}, "federated": federated})
    assert "federated on the split shifted: 0.250" in lines


def test_a_split_model_is_tested_on_further_rows_too(recipe_path, texts_dir, llama_dir, tmp_path):
    recipe = {
        "model": {"name_or_path": str(llama_dir), "lora": {"r": 2}},
        "data": {"path": str(texts_dir), "test_split": "test", "further_test_splits": ["shifted"]},
        "task": {"name": "language-modeling", "max_length": 8},
        "partition": {"name": "iid", "num_clients": 2},
        "training": {"output_dir": str(tmp_path / "run"), "num_train_epochs": 1, "use_cpu": True, "report_to": "none"},
        "split": {},
    }
    recipe_path.write_text(yaml.safe_dump(recipe))
    result = run_federated(build_run(load_recipe(recipe_path, [])))
    assert result["further_tests"] == {"shifted": pytest.approx(result["metrics"])} and result["clients"] == {}


def test_further_rows_belong_to_no_client_and_are_drawn(grid_path):
    raw = load_rows(load_recipe(grid_path, ["data.max_test_rows=5"]), by_client=True)
    assert len(raw.further_tests["shifted"]) == len(raw.test) == 5
    assert len(raw.train) == len(raw.test_clients) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.further_test_splits=[test]", "'test' is the training split, test_split, or there twice"),
        ("data.further_test_splits=[shifted, shifted]", "there twice"),
        ("data.further_test_splits=[none]", "none"),
        ("data.further_test_splits=shifted", "further_test_splits"),
    ],
)
def test_what_is_wrong_with_further_splits_is_named(grid_path, setting, message):
    with pytest.raises(RecipeError, match=message):
        load_rows(load_recipe(grid_path, [setting]))
