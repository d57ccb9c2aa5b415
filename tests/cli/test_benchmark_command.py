"""`hf-federated benchmark` executes each planned run once, resumes after a crash or a failure, and reports results.

The runs are a cheap federation: the model is one number, each client descends towards its own target, and the server
moves towards the mean of the clients.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from hf_federated.cli.benchmark import add_arguments
from hf_federated.cli.dataclass_options import build_from_options
from hf_federated.experiments.benchmark.benchmark import BenchmarkOptions, run_benchmark
from hf_federated.experiments.benchmark.run_log import RunLog, read_records
from hf_federated.experiments.errors import CommandError


ROOT = Path(__file__).parents[2]
RECIPE = {
    "training": {"learning_rate": 0.1},
    "federation": {"num_rounds": 5, "server_lr": 1.0},
    "benchmark": {
        "title": "Targets",
        "seeds": [0, 1],
        "runs": {
            "central": {"method": "centralized"},
            "FedAvg": {},
            "half": {"federation.server_lr": 0.5},
        },
        "paper": {"FedAvg": 0.5},
        "claims": ["FedAvg > half", "central > FedAvg"],
    },
}


def execute(run, folder):
    """Run gradient descent. The metric is 1 / (1 + distance from the mean of all targets)."""
    rate, federation = run.values["training"]["learning_rate"], run.values["federation"]
    if not 0 < rate < 1:
        raise FloatingPointError(f"learning_rate {rate}\n  diverges")
    targets = np.random.default_rng(run.values["training"]["seed"]).normal(3, 1, size=8)
    at, history = 0.0, []
    for number in range(1, federation["num_rounds"] + 1):
        target = targets.mean() if run.method == "centralized" else targets
        server_lr = 1.0 if run.method == "centralized" else federation["server_lr"]
        at += server_lr * float(np.mean(rate * (target - at)))
        history.append({"round": number, "score": 1 / (1 + abs(at - targets.mean()))})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.txt").write_text(str(at), encoding="utf-8")
    federated = run.method == "federated"
    return {
        "metric": "score",
        "metrics": {"score": history[-1]["score"], "at": at},
        "history": history,
        "scale": "small",
        "num_rounds": federation["num_rounds"] if federated else None,
        "num_epochs": federation["num_rounds"],
        "num_clients": 8,
        "bytes_up": 64 if federated else None,
        "bytes_down": 64 if federated else None,
    }


def read(path, overrides):
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    for override in overrides:
        key, _, value = override.partition("=")
        section, name = key.split(".")
        values[section][name] = yaml.safe_load(value)
    return values


def check(values):
    if "learning_rate" not in values["training"]:
        raise CommandError("training.learning_rate is missing.")


def write_recipe(folder: Path, name: str = "targets.yaml", **benchmark_fields) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe = {**RECIPE, "benchmark": {**RECIPE["benchmark"], **benchmark_fields}}
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return str(path)


class Command:
    """Runs the command with `execute`, and collects the printed lines and the executed runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executed: list[str] = []

    def __call__(self, *argv: str, execute=execute) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        self.lines: list[str] = []
        self.executed = []

        def recorded(run, folder):
            self.executed.append(str(run))
            return execute(run, folder)

        arguments = parser.parse_args([*argv, "--output-dir", str(self.folder)])
        options = build_from_options(BenchmarkOptions, arguments)
        return run_benchmark(options, read, check, recorded, echo=self.lines.append)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def command(tmp_path) -> Command:
    return Command(tmp_path / "out")


ALL = [f"{name}, seed {seed}" for seed in (0, 1) for name in ("central", "FedAvg", "half")]


def test_grid_is_executed_and_reported_and_finished_runs_are_not_repeated(command, tmp_path):
    recipe = write_recipe(tmp_path)
    assert command(recipe) == 0
    assert command.executed == ALL
    folder = command.folder / "targets"
    records = read_records(folder)
    assert [f"{record['run']}, seed {record['seed']}" for record in records] == ALL
    assert command.lines[0] == f"Targets (targets.yaml): 6 runs, 0 already finished in {folder}."
    assert command.lines[2].startswith(f"[2/6] FedAvg, seed 0: score {records[1]['value']:.3f} (0 s)")
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert report.split("\n![")[0] in command.output and "| FedAvg > half " in report and "scale small" in report
    assert (folder / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("model.txt")) == sorted(
        f"runs/{name}/seed-{seed}/model.txt" for seed in (0, 1) for name in ("central", "FedAvg", "half")
    )
    assert command(recipe) == 0 and command.executed == []
    assert "6 runs, 6 already finished" in command.output and report.split("\n![")[0] in command.output


def test_record_contains_settings_and_results_of_the_run(command, tmp_path):
    command(write_recipe(tmp_path), "--only", "half", "--seeds", "1")
    (record,) = read_records(command.folder / "targets")
    targets = np.random.default_rng(1).normal(3, 1, size=8)
    at = targets.mean() * (1 - 0.95**5)  # each round reduces the distance by the factor 1 - 0.5 * 0.1
    assert record["metrics"]["at"] == pytest.approx(at)
    assert record["value"] == record["metrics"]["score"] == pytest.approx(1 / (1 + targets.mean() - at))
    assert [entry["round"] for entry in record["history"]] == [1, 2, 3, 4, 5]
    assert record["history"][-1]["score"] == record["value"]
    settings = {name: record[name] for name in ("benchmark", "recipe", "run", "seed", "method", "scale", "metric")}
    assert settings == {
        "benchmark": "Targets",
        "recipe": "targets.yaml",
        "run": "half",
        "seed": 1,
        "method": "federated",
        "scale": "small",
        "metric": "score",
    }
    assert (record["num_rounds"], record["num_epochs"], record["num_clients"]) == (5, 5, 8)
    assert (record["bytes_up"], record["bytes_down"]) == (64, 64) and record["seconds"] >= 0
    assert set(record["versions"]) == {"hf_federated", "torch", "transformers"} and len(record["digest"]) == 64


def test_changed_runs_are_repeated_and_old_records_are_reported(command, tmp_path):
    recipe = write_recipe(tmp_path, runs={"a": {}, "b": {}}, paper={}, claims=[])
    command(recipe)
    write_recipe(tmp_path, runs={"a": {}, "b": {"federation.server_lr": 0.25}}, paper={"a": 0.1}, claims=["a > b"])
    command(recipe, "--report")
    assert (
        command.executed == []
        and "Not used, because the recipe changed after these runs: b, seed 0; b, seed 1." in command.output
    )
    command(recipe)
    assert command.executed == ["b, seed 0", "b, seed 1"]
    assert len(read_records(command.folder / "targets")) == 6
    command(recipe)
    assert command.executed == [] and "Not used" not in command.output


def test_only_and_seeds_select_runs(command, tmp_path):
    recipe = write_recipe(tmp_path)
    command(recipe, "--only", "half", "FedAvg", "--seeds", "7", "1")
    assert command.executed == ["FedAvg, seed 7", "half, seed 7", "FedAvg, seed 1", "half, seed 1"]
    assert "[4/4] half, seed 1" in command.output and "| central " in command.output
    command(recipe)
    assert command.executed == [run for run in ALL if run not in ("FedAvg, seed 1", "half, seed 1")]
    assert "[3/6] central, seed 0" in command.output
    with pytest.raises(CommandError, match="--only 'fedavg' is not a run. The runs are central, FedAvg, half"):
        command(recipe, "--only", "fedavg")
    with pytest.raises(CommandError, match="targets.yaml: benchmark.seeds: 3 is listed twice"):
        command(recipe, "--seeds", "3", "3")


def test_dry_run_lists_runs_and_writes_nothing(command, tmp_path):
    recipe = write_recipe(tmp_path)
    assert command(recipe, "--dry-run") == 0
    assert command.executed == [] and not command.folder.exists()
    assert command.lines[1:] == [f"  pending   {run} ({method(run)})" for run in ALL]
    command(recipe, "--seeds", "0")
    command(recipe, "--dry-run")
    assert command.lines[1:4] == [f"  finished  {run} ({method(run)})" for run in ALL[:3]]
    assert all(line.startswith("  pending") for line in command.lines[4:])


def method(run: str) -> str:
    return "centralized" if run.startswith("central") else "federated"


def test_report_without_finished_runs_prints_a_line(command, tmp_path):
    assert command(write_recipe(tmp_path), "--report") == 0
    assert command.executed == [] and "No finished runs of targets.yaml to report." in command.lines
    assert not command.folder.exists()


def test_failed_run_is_listed_and_other_runs_continue(command, tmp_path):
    runs = {"good": {}, "bad": {"training.learning_rate": 2}, "better": {"training.learning_rate": 0.5}}
    recipe = write_recipe(tmp_path, runs=runs, paper={}, claims=["better > good", "bad > good"])
    assert command(recipe) == 1
    assert command.executed == [f"{name}, seed {seed}" for seed in (0, 1) for name in runs]
    assert "[2/6] bad, seed 0: failed: learning_rate 2 diverges" in command.lines
    assert command.lines[-3].startswith("\n2 runs failed")
    assert command.lines[-2] == "  targets.yaml: bad, seed 0: learning_rate 2 diverges"
    assert "| bad > good    | " in command.output and "not measured" in command.output
    assert [record["run"] for record in read_records(command.folder / "targets")] == ["good", "better"] * 2
    assert command(recipe) == 1 and command.executed == ["bad, seed 0", "bad, seed 1"]


def test_unexpected_error_prints_a_traceback_and_other_runs_continue(command, tmp_path, capsys):
    def buggy(run, folder):
        return None + 1 if str(run) == ALL[2] else execute(run, folder)

    assert command(write_recipe(tmp_path), execute=buggy) == 1
    assert command.executed == ALL
    assert any(f"{ALL[2]}: TypeError: unsupported operand" in line for line in command.lines)
    assert "return None + 1" in capsys.readouterr().err


def test_interrupt_stops_the_benchmark_and_keeps_finished_runs(command, tmp_path):
    def interrupted(run, folder):
        if str(run) == ALL[2]:
            raise KeyboardInterrupt
        return execute(run, folder)

    recipe = write_recipe(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        command(recipe, execute=interrupted)
    assert command.executed == ALL[:3]
    assert command(recipe) == 0 and command.executed == ALL[2:]


def test_all_runs_of_all_recipes_are_checked_before_the_first_run(command, tmp_path):
    good, bad = write_recipe(tmp_path), write_recipe(tmp_path, "bad.yaml", runs={"a": {}, "b": {"training": None}})
    for argv in ([good, bad], [good, bad, "--dry-run"]):
        with pytest.raises(CommandError, match=r"bad.yaml: benchmark.paper: 'FedAvg' is not a run"):
            command(*argv)
    bad = write_recipe(tmp_path, "bad.yaml", runs={"a": {}, "b": {"training": 3}}, paper={}, claims=[])
    with pytest.raises(CommandError, match=r"bad.yaml: training is 3"):
        command(good, bad)
    runs = {"a": {}, "b": {"training": {}}}
    bad = write_recipe(tmp_path, "bad.yaml", runs=runs, paper={}, claims=[])
    text = Path(bad).read_text(encoding="utf-8").replace("learning_rate: 0.1", "weight_decay: 0.1")
    Path(bad).write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match=r"bad.yaml, run 'a': training.learning_rate is missing"):
        command(good, bad)
    assert command.executed == [] and not command.folder.exists()


def test_several_recipes_share_a_plot_but_not_a_folder(command, tmp_path):
    first, second = write_recipe(tmp_path), write_recipe(tmp_path, "second.yaml", title="Second")
    assert command(first, second) == 0 and command.executed == ALL + ALL
    assert command.output.index("# Targets") < command.output.index("# Second")
    plots = sorted(path.relative_to(command.folder).as_posix() for path in command.folder.rglob("*.png"))
    assert plots == ["learning_curves.png", "second/learning_curves.png", "targets/learning_curves.png"]
    third = write_recipe(tmp_path, "other/targets.yaml")
    with pytest.raises(CommandError, match="targets.yaml and .*other/targets.yaml would both write to"):
        command(first, third)


def test_records_contain_the_hash_of_the_script_that_prepared_the_examples(command, tmp_path):
    recipe = write_recipe(tmp_path, prepared_by="prepare.py")
    with pytest.raises(CommandError, match=r"targets.yaml: benchmark.prepared_by: .*prepare.py"):
        command(recipe)
    script = b"print('examples')\n"
    (tmp_path / "prepare.py").write_bytes(script)
    assert command(recipe) == 0
    expected = f"prepare.py sha256:{hashlib.sha256(script).hexdigest()}"
    assert {record["prepared_by"] for record in read_records(command.folder / "targets")} == {expected}
    assert f"Scripts that prepared the examples: `{expected}`." in command.output


def test_recipes_of_one_file_name_have_two_default_folders(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = write_recipe(tmp_path, "one/targets.yaml"), write_recipe(tmp_path, "two/targets.yaml", seeds=[7])
    options = BenchmarkOptions(recipes=[first, second])
    assert run_benchmark(options, read=read, check=check, execute=execute, echo=lambda line: None) == 0
    folders = [tmp_path / "outputs" / "benchmarks" / name / "targets" for name in ("one", "two")]
    assert [{record["seed"] for record in read_records(folder)} for folder in folders] == [{0, 1}, {7}]
    assert all((folder / "report.md").is_file() for folder in folders)
    assert (tmp_path / "outputs" / "benchmarks" / "learning_curves.png").is_file()


def test_folder_of_a_running_benchmark_is_rejected_before_the_first_run(command, tmp_path):
    first, second = write_recipe(tmp_path), write_recipe(tmp_path, "second.yaml")
    with RunLog(command.folder / "second"):
        with pytest.raises(CommandError, match="another benchmark is running in this folder: .*second"):
            command(first, second)
        assert command.executed == []
        assert command(first, second, "--report") == 0
    assert command(first, second) == 0


def test_changed_metric_needs_no_new_runs_and_unknown_metric_stops_after_the_first_run(command, tmp_path):
    recipe = write_recipe(tmp_path, metric="f1")
    with pytest.raises(
        CommandError, match="targets.yaml: benchmark.metric: 'central' has no metric 'f1'. .* score, at"
    ):
        command(recipe)
    assert command.executed == ALL[:1]
    with pytest.raises(CommandError, match="'central' has no metric 'f1'"):
        command(recipe)
    assert command.executed == []  # the record of the first run is sufficient
    write_recipe(tmp_path, metric="at")
    command(recipe)
    assert command.executed == ALL[1:] and command.lines[1].startswith("[2/6] FedAvg, seed 0: at 1.")
    targets = [np.random.default_rng(seed).normal(3, 1, size=8).mean() for seed in (0, 1)]
    reached = (1 - 0.9**5) * np.array(targets)
    assert f"| FedAvg  | {reached.mean():.4f} ± {reached.std(ddof=1):.4f} (2) |" in command.output
    write_recipe(tmp_path)
    command(recipe)
    assert command.executed == [] and "score (higher is better)" in command.output


def test_run_without_a_finite_value_is_finished(command, tmp_path):
    def diverging(run, folder):
        result = execute(run, folder)
        return {**result, "metrics": {"score": float("nan")}} if run.name == "half" else result

    recipe = write_recipe(tmp_path)
    assert command(recipe, execute=diverging) == 0
    assert "[3/6] half, seed 0: score not finite (0 s)" in command.lines
    record = read_records(command.folder / "targets")[2]
    assert record["value"] is None and record["metrics"] == {"score": None}
    command(recipe, "--report")
    assert (
        "Runs without a finite score, which are excluded from the means: half, seed 0; half, seed 1." in command.output
    )


def test_report_without_matplotlib_has_no_plot(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(write_recipe(tmp_path)) == 0
    assert "No learning_curves.png: a plot needs matplotlib. Install with: pip install 'hf-federated[plots]'" in (
        command.lines
    )
    assert "![" not in (command.folder / "targets" / "report.md").read_text(encoding="utf-8")


# The same command in a separate process, which is killed during its fourth run.
WORKER = """
import os, signal, sys
from pathlib import Path
from test_benchmark_command import Command, execute

def killed(run, folder):
    if str(run) == "central, seed 1":
        folder.mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(run, folder)

Command(Path(sys.argv[1]))(sys.argv[2], execute=killed)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_killed_benchmark_resumes_with_identical_results(command, tmp_path):
    recipe = write_recipe(tmp_path)
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.run([sys.executable, "-c", WORKER, str(command.folder), recipe], env=env, timeout=200)
    assert process.returncode == -9
    assert command(recipe) == 0
    assert command.executed == ALL[3:] and "6 runs, 3 already finished" in command.lines[0]
    uninterrupted = Command(tmp_path / "whole")
    uninterrupted(recipe)
    outcomes = [
        [{**record, "seconds": None} for record in read_records(folder / "targets")]
        for folder in (command.folder, uninterrupted.folder)
    ]
    assert json.dumps(outcomes[0]) == json.dumps(outcomes[1])


def test_incomplete_record_is_reported_with_its_missing_field(command, tmp_path):
    recipe = write_recipe(tmp_path)
    assert command(recipe) == 0
    log = command.folder / "targets" / "runs.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    del records[0]["metric"]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(CommandError, match="runs.jsonl: a record is incomplete: metric"):
        command(recipe, "--report")
