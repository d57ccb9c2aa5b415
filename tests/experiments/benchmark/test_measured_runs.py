"""`hf-federated benchmark` with real training runs of a tiny recipe."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from transformers import TrainerCallback

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.execution import build_run, run_federated
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.yaml_file import read_values


@pytest.fixture
def grid_path(recipe_path, texts_dir):
    recipe = yaml.safe_load(recipe_path.read_text())
    recipe["data"] = {"path": str(texts_dir), "test_split": "test"}
    recipe["partition"] = {"name": "label-dirichlet", "num_clients": 4, "alpha": 1.0}
    recipe["federation"] = {"num_rounds": 2, "clients_per_round": 2}
    recipe["local_clients"] = 2
    recipe["benchmark"] = {
        "seeds": [0, 1],
        "runs": {
            "centralized": {"method": "centralized"},
            "local-only": {"method": "local"},
            "FedAvg": {},
            "FedOpt": {"federation.aggregation": "fedopt"},
        },
        "paper": {"FedAvg": 0.5142},
        "claims": ["FedOpt > FedAvg"],
    }
    recipe_path.write_text(yaml.safe_dump(recipe))
    return recipe_path


def records(folder):
    return [json.loads(line) for line in (folder / "recipe" / "runs.jsonl").read_text().splitlines()]


def test_grid_is_executed_and_reported_and_finished_runs_are_not_repeated(grid_path, tmp_path, capsys):
    command = ["benchmark", str(grid_path), "--output-dir", str(tmp_path / "out")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "FedOpt > FedAvg" in printed and "0.514" in printed and "not comparable" in printed
    assert "{'" not in printed  # logs of rounds are not printed
    logged = records(tmp_path / "out")
    assert [(record["run"], record["seed"]) for record in logged] == [
        (run, seed) for seed in (0, 1) for run in ("FedAvg", "FedOpt", "centralized", "local-only")
    ]
    for record in logged:
        federated = record["method"] == "federated"
        assert 0 <= record["value"] == record["metrics"]["accuracy"] <= 1
        assert [entry["round"] for entry in record["history"]] == ([1, 2] if federated else [])
        assert (record["num_rounds"], bool(record["bytes_up"])) == ((2, True) if federated else (None, False))
        assert record["num_clients"] == {"centralized": 1, "local": 2, "federated": 4}[record["method"]]
        if federated:
            assert record["history"][-1]["accuracy"] == record["value"]
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert (tmp_path / "out" / "recipe" / "learning_curves.png").is_file()
    assert main(command) == 0
    assert "8 already finished" in capsys.readouterr().out and records(tmp_path / "out") == logged


def test_seed_determines_partition_and_training(grid_path, tmp_path):
    def losses(seed):
        values = read_values(grid_path, [f"training.seed={seed}", f"partition.seed={seed}"])
        return [entry["loss"] for entry in measure_run(values, "federated", tmp_path / f"{seed}")["history"]]

    assert losses(0) == losses(0) != losses(1)


class InterruptAfterTwoRounds(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_interrupted_run_resumes_from_its_checkpoint_and_removes_it(grid_path, tmp_path):
    values = read_values(grid_path, ["federation.num_rounds=3", "training.save_strategy=steps"])
    uninterrupted = measure_run(values, "federated", tmp_path / "whole")
    run = build_run(parse_recipe(values), str(tmp_path / "cut"))
    run.trainer.add_callback(InterruptAfterTwoRounds())
    with pytest.raises(KeyboardInterrupt):
        run_federated(run)
    (checkpoint,) = (tmp_path / "cut").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-1"
    # The first run had the seconds until its checkpoint, and the seconds after the checkpoint are repeated.
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    seconds_before = state["stateful_callbacks"]["Stopwatch"]["args"]["seconds"]
    resumed = measure_run(values, "federated", tmp_path / "cut")
    for name in ("history", "metrics", "bytes_up", "test_rows"):
        assert resumed[name] == uninterrupted[name]
    assert resumed["seconds"] > resumed["train_seconds"] > seconds_before > 0
    assert not list(tmp_path.rglob("checkpoint-*"))


METHODS = '''
from pathlib import Path

from hf_federated import Aggregation


class Own(Aggregation):
    """A user interrupts the second run of this average."""

    def aggregate(self, accumulator, state):
        if Path("interrupt").exists():
            raise KeyboardInterrupt
        return super().aggregate(accumulator, state)
'''


def test_interrupted_benchmark_of_an_own_class_continues(grid_path, tmp_path, capsys, monkeypatch):
    recipe = yaml.safe_load(grid_path.read_text())
    own = {"federation.aggregation": "own_methods:Own"}
    recipe["benchmark"] = {"seeds": [0], "runs": {"FedAvg": {}, "own": own}, "claims": ["own > FedAvg"]}
    grid_path.write_text(yaml.safe_dump(recipe))
    (tmp_path / "own_methods.py").write_text(METHODS)
    (tmp_path / "interrupt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["benchmark", str(grid_path), "--output-dir", str(tmp_path / "out")]
    assert main(command) == 130
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-federated: interrupted. Finished runs are kept. Repeat the command to continue")
    assert [record["run"] for record in records(tmp_path / "out")] == ["FedAvg"]
    (tmp_path / "interrupt").unlink()
    assert main(command) == 0
    assert "1 already finished" in capsys.readouterr().out
    average, own_record = records(tmp_path / "out")
    assert own_record["run"] == "own" and own_record["metrics"] == average["metrics"]  # the class is an average
    # Distillation names a class that is no distillation, so no run is executed.
    wrong = [*command, "--set", "federation.distillation=own_methods:Own"]
    assert main(wrong) == 2
    assert "`distillation` is 'own_methods:Own', which is the class Own" in capsys.readouterr().err


def test_rejected_updates_and_different_test_examples_are_reported(grid_path, tmp_path, capsys):
    recipe = yaml.safe_load(grid_path.read_text())
    recipe["benchmark"] = {
        "seeds": [0],
        "runs": {
            "wild": {
                "training": {"learning_rate": 1e20, "max_grad_norm": 0},
                "federation.clients_per_round": 4,
                "federation.max_update_ratio": None,
            },
            "fewer": {"data.max_test_rows": 5},
            "broken": {"data.path": "nowhere/to/be/found"},
        },
    }
    recipe["partition"] = {"name": "quantity-dirichlet", "num_clients": 4, "beta": 0.3}
    recipe["federation"]["num_rounds"] = 1
    grid_path.write_text(yaml.safe_dump(recipe))
    assert main(["benchmark", str(grid_path), "--output-dir", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "broken, seed 0: data.path: the file or folder nowhere/to/be/found does not exist" in printed
    assert "Under seed 0 the runs were tested on different examples" in printed
    failed = next(record["num_failed"] for record in records(tmp_path / "out") if record["run"] == "wild")
    assert 0 < failed < 4 and f"Runs with failed or rejected updates: wild, seed 0 ({failed})." in printed


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("federation.aggregation=fedsum", ["run 'FedAvg'", "fedsum", "fedavg"]),
        ("federation.aggregation_kwargs={momentum: 1}", ["momentum"]),
        ("federation.clients_per_round=0", ["clients_per_round", "at least 1"]),
        ("training.learning_rate=high", ["learning_rate", "'high'"]),
    ],
)
def test_invalid_recipe_is_rejected_before_the_first_run(grid_path, tmp_path, capsys, override, words):
    assert main(["benchmark", str(grid_path), "--output-dir", str(tmp_path / "out"), "--set", override]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


def test_help_lists_the_fields_of_the_benchmark_section(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["benchmark", "--help", "benchmark"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for field in ("runs: mapping (required)", "seeds: list of int (default [0, 1, 2])", "claims: list of str"):
        assert f"    benchmark.{field}" in printed
