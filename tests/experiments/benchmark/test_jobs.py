"""Several runs at a time, each in a separate process, give the records of runs one after the other."""

from __future__ import annotations

import json
import threading

import pytest
import yaml

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.grid import BenchmarkSection, plan_runs
from hf_federated.experiments.benchmark.jobs import RunProcessError, execute_in_process, execute_runs
from hf_federated.experiments.recipe.yaml_file import read_values


@pytest.fixture
def recipe(recipe_path, texts_dir, tmp_path):
    values = read_values(
        recipe_path, [f"data={{path: {texts_dir}, test_split: test}}", "partition={name: iid, num_clients: 3}"]
    )
    runs = {"FedAvg": {}, "broken": {"model.name_or_path": str(tmp_path / "none")}}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({**values, "benchmark": {"seeds": [0], "runs": runs}}))
    return path


def test_records_are_those_of_runs_one_after_the_other(recipe, tmp_path, capsys):
    records = {}
    for jobs in ("1", "2"):
        assert main(["benchmark", str(recipe), "--output-dir", str(tmp_path / jobs), "--jobs", jobs]) == 1
        assert "broken, seed 0: failed: model.name_or_path" in capsys.readouterr().out
        lines = (tmp_path / jobs / "grid" / "runs.jsonl").read_text().splitlines()
        records[jobs] = {record["run"]: record for record in map(json.loads, lines)}
        assert not list((tmp_path / jobs).rglob("result.json"))
    assert records["1"].keys() == records["2"].keys() == {"FedAvg"}
    for run, record in records["1"].items():
        differing = {name for name in record if record[name] != records["2"][run][name]}
        assert differing <= {"seconds"}, run
        assert (tmp_path / "2" / "grid" / record["predictions"]).is_file()


def test_number_of_jobs_is_checked(recipe, capsys):
    assert main(["benchmark", str(recipe), "--jobs", "0"]) == 2
    assert "--jobs is 0; it must be at least 1" in capsys.readouterr().err


RUNS = plan_runs({}, BenchmarkSection({name: {} for name in "abcd"}, seeds=[0]))


def test_jobs_run_at_the_same_time_and_errors_end_only_their_run():
    barrier = threading.Barrier(2, timeout=20)

    def execute(run):
        barrier.wait()
        if run.name == "b":
            raise FloatingPointError("nan")
        return {"run": run.name}

    outcomes = {run.name: outcome for run, outcome, seconds in execute_runs(RUNS, execute, jobs=2) if seconds >= 0}
    assert outcomes.keys() == set("abcd") and isinstance(outcomes["b"], FloatingPointError)
    assert outcomes["d"] == {"run": "d"}


def test_one_job_runs_in_order_and_only_when_the_result_is_needed():
    executed = []
    outcomes = execute_runs(RUNS, lambda run: executed.append(run.name) or {})
    next(outcomes)
    assert executed == ["a"]
    assert [run.name for run, *_ in outcomes] == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(9)", "exit code 9"),
        ("raise FloatingPointError('the loss is nan')", "the loss is nan"),
        ("raise MemoryError('full')", "MemoryError: full"),
    ],
)
def test_errors_of_a_process_keep_their_class_or_show_the_traceback(code, message, tmp_path, monkeypatch):
    # A module in place of `measured_run`, whose import takes seconds.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        f"def measure_run(*arguments):\n    {code}\n"
        "module = types.ModuleType('measured_run')\n"
        "module.measure_run = measure_run\n"
        "sys.modules['hf_federated.experiments.benchmark.measured_run'] = module\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = FloatingPointError if "Floating" in code else RunProcessError
    with pytest.raises(expected, match=message):
        execute_in_process(RUNS[0], tmp_path / "run", jobs=2)
