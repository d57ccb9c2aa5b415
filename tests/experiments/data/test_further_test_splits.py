"""Additional test splits, and the test examples of each client, in runs, records and reports."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import yaml
from datasets import load_dataset

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.data.tokenized import load_tokenized_data
from hf_federated.experiments.execution import build_run, run_federated
from hf_federated.experiments.model_loading import load_tokenizer
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.train_recipe import closing_table


@pytest.fixture
def grid_path(recipe_path, texts_dir, model_dir):
    """A benchmark with two client models and an additional test split."""
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
    recipe["federation"] = {"num_rounds": 1, "evaluate_clients": True, "distillation": None}
    recipe["benchmark"] = {
        "seeds": [0],
        "runs": {"one model": {"method": "centralized"}, "DS-FL": {"federation.distillation": "dsfl"}},
    }
    recipe_path.write_text(yaml.safe_dump(recipe))
    return recipe_path


def test_records_and_reports_contain_additional_splits_and_clients(grid_path, tmp_path, capsys):
    assert main(["benchmark", str(grid_path), "--output-dir", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    lines = (tmp_path / "out" / "recipe" / "runs.jsonl").read_text().splitlines()
    records = {record["run"]: record for record in map(json.loads, lines)}
    for record in records.values():
        assert list(record["clients"]) == ["0", "1", "2"]
        assert all(metrics.keys() == record["metrics"].keys() for metrics in record["clients"].values())
        # The split `shifted` has the texts of `test` with different labels, and the same examples are sampled.
        (further,) = record["further_tests"].values()
        assert further.keys() == record["metrics"].keys() and further["loss"] != record["metrics"]["loss"]
        assert further["accuracy"] + record["metrics"]["accuracy"] <= 1
        assert record["further_rows"].keys() == {"shifted"}
    # The metric of one model over all examples is the mean over the clients, weighted by their examples.
    central = records["one model"]
    mean = np.average([metrics["accuracy"] for metrics in central["clients"].values()], weights=[4, 4, 4])
    assert mean == pytest.approx(central["metrics"]["accuracy"])
    # The evaluation of additional splits is not logged as the evaluation of a round.
    (entry,) = records["DS-FL"]["history"]
    assert entry["round"] == 1 and entry["loss"] == records["DS-FL"]["metrics"]["loss"]
    assert "on additional test splits" in printed and "On the test examples of each client" in printed
    # Client "1" of a random partition is a different client under the next seed, so it has no column.
    values = sorted(metrics["accuracy"] for metrics in records["DS-FL"]["clients"].values())
    row = next(
        line for line in printed.split("On the test examples of each client")[1].splitlines() if "DS-FL" in line
    )
    assert [float(cell.split()[0]) for cell in row.split("|")[2:5]] == pytest.approx(values, abs=1e-4)


def test_clients_are_evaluated_with_their_own_models(grid_path):
    run = build_run(load_recipe(grid_path, ["federation.distillation=dsfl"]))
    result = run_federated(run)
    further = run.trainer.evaluate(run.data.further_tests["shifted"])["eval_loss"]
    assert result["further_tests"]["shifted"]["loss"] == pytest.approx(further, rel=1e-6)
    opened = {client_id: run.trainer.engine.worker.models.open(client_id) for client_id in run.trainer.clients}
    for client_id, model in opened.items():
        rows = run.data.test_clients[client_id]
        expected = model.trainer.evaluate(rows)["eval_loss"]
        assert result["clients"][client_id]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["centralized", "local"])
@pytest.mark.parametrize("aggregation", ["mutual_kd", "fedavg"])
def test_baselines_run_without_client_models(grid_path, method, aggregation, tmp_path):
    settings = [f"federation.aggregation={aggregation}", "federation.evaluate_clients=false"]
    result = measure_run(
        {k: v for k, v in read_values(str(grid_path), settings).items() if k != "benchmark"}, method, tmp_path / "run"
    )
    assert result["further_tests"]["shifted"]["loss"] != result["metrics"]["loss"]


def test_changed_files_in_a_folder_with_a_card_are_read_again(texts_dir, grid_path, tmp_path):
    num_examples = []
    for name in ("a", "b"):
        folder = tmp_path / name / "same"
        shutil.copytree(texts_dir, folder)
        rows = load_dataset("parquet", data_files=str(folder / "shifted.parquet"), split="train")
        for size in (4, 3):
            selected = rows.select(range(size + 2 * (name == "b")))
            selected.to_parquet(folder / "shifted.parquet")
            raw = load_raw_data(load_recipe(grid_path, [f"data.path={folder}", "data.max_test_rows=null"]))
            num_examples.append(len(raw.further_tests["shifted"]))
    assert num_examples == [4, 3, 6, 5]


def test_additional_splits_are_rejected_for_tasks_whose_metrics_need_raw_examples(grid_path, model_dir):
    recipe = load_recipe(grid_path, ["task={name: seq2seq}", "client_models=[]", "public=null"])
    with pytest.raises(RecipeError, match="further_test_splits is not supported for seq2seq"):
        load_tokenized_data(recipe, load_tokenizer(recipe.model))


def test_closing_table_lists_additional_splits():
    result = {"metrics": {"accuracy": 0.5}, "further_tests": {"shifted": {"accuracy": 0.25}}, "num_epochs": 1.0}
    federated = {**result, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    results = {"metric": "accuracy", "lower_is_better": False, "num_test_clients": None, "num_test_rows": 4}
    lines = closing_table({**results, "baselines": {}, "federated": federated})
    assert "federated on the split shifted: 0.250" in lines


def test_split_model_is_evaluated_on_additional_splits(recipe_path, texts_dir, llama_dir, tmp_path):
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
    # A language model does not use the labels, and `shifted` has the texts of `test`.
    assert result["further_tests"] == {"shifted": pytest.approx(result["metrics"])} and result["clients"] == {}


def test_additional_splits_are_sampled_but_not_partitioned(grid_path):
    raw = load_raw_data(load_recipe(grid_path, ["data.max_test_rows=5"]), by_client=True)
    assert len(raw.further_tests["shifted"]) == len(raw.test) == 5
    assert len(raw.train) == len(raw.test_clients) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.further_test_splits=[test]", "'test' is train_split, test_split or a duplicate"),
        ("data.further_test_splits=[shifted, shifted]", "'shifted' is train_split, test_split or a duplicate"),
        ("data.further_test_splits=[none]", 'Unknown split "none"'),
        ("data.further_test_splits=shifted", "further_test_splits.*list"),
    ],
)
def test_invalid_additional_splits_are_rejected(grid_path, setting, message):
    with pytest.raises(RecipeError, match=message):
        load_raw_data(load_recipe(grid_path, [setting]))
