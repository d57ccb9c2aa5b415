"""A record belongs to a run with the same settings, examples and weights, wherever the data and the models are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from safetensors.torch import load_file, save_file

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.identity import full_digest, settings_digest
from hf_federated.experiments.benchmark.run_inputs import hash_inputs
from hf_federated.experiments.recipe.yaml_file import merge_mappings, read_values


RECIPE = {
    "model": {"name_or_path": "m", "decoder_name_or_path": "d", "revision": "main"},
    "client_models": [{"name_or_path": "c", "kwargs": {"num_hidden_layers": 2}}],
    "data": {"path": "p", "test_path": "t", "name": "plain"},
    "public": {"path": "u"},
    "partition": {"name": "feature-cluster", "embedder": "e", "alpha": 0.1},
    "federation": {"distillation": "adafd", "distillation_kwargs": {"weighting": "llm", "generate": "g"}},
    "training": {"learning_rate": 0.1},
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name_or_path": "/models/m", "decoder_name_or_path": "/models/d"}},
        {"model": {"revision": None}},
        {"client_models": [{"name_or_path": "/models/c", "kwargs": {"num_hidden_layers": 2}}]},
        {"data": {"path": "/data/p", "test_path": "/data/t", "name": None}},
        {"public": {"path": "/data/u"}},
        {"partition": {"embedder": "/models/e"}},
        {"federation": {"distillation_kwargs": {"generate": "/models/g"}}},
    ],
)
def test_settings_do_not_include_locations(change):
    changed = merge_mappings(RECIPE, change)
    assert settings_digest("federated", changed) == settings_digest("federated", RECIPE)
    assert full_digest("federated", changed) != full_digest("federated", RECIPE)


@pytest.mark.parametrize(
    "change",
    [
        {"client_models": [{"name_or_path": "c", "kwargs": {"num_hidden_layers": 3}}]},
        {"client_models": [{"name_or_path": "c"}, {"name_or_path": "c"}]},
        {"data": {"test_path": None}},
        {"data": {"max_train_rows": 5}},
        {"model": {"name_or_path": "tfidf-svd"}},
        {"partition": {"alpha": 0.2}},
        {"federation": {"distillation_kwargs": {"generate": None, "score": "g"}}},
        {"training": {"seed": 1}},
    ],
)
def test_settings_include_all_other_fields(change):
    assert settings_digest("federated", merge_mappings(RECIPE, change)) != settings_digest("federated", RECIPE)
    assert settings_digest("local", RECIPE) != settings_digest("federated", RECIPE)


@pytest.fixture
def grid(recipe_path, texts_dir, model_dir, tmp_path):
    """A recipe with one finished run, and a copy of its data and of its model in other folders."""
    values = read_values(
        recipe_path, [f"data={{path: {texts_dir}, test_split: test}}", "partition={name: iid, num_clients: 3}"]
    )
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({**values, "benchmark": {"seeds": [0], "runs": {"FedAvg": {}}}}))
    assert run(path) == 1
    shutil.copytree(texts_dir, tmp_path / "data")
    shutil.copytree(values["model"]["name_or_path"], tmp_path / "model")
    return path


def run(path: Path, *options: str) -> int:
    """Execute the benchmark, and return the number of records."""
    output = path.parent / "results"
    assert main(["benchmark", str(path), "--output-dir", str(output), *options]) == 0
    return len((output / "grid" / "runs.jsonl").read_text().splitlines())


def moved(path: Path, *options: str) -> int:
    """Execute the benchmark with the copies, and return the number of records."""
    folder = path.parent
    copies = (f"--set=data.path={folder / 'data'}", f"--set=model.name_or_path={folder / 'model'}")
    return run(path, *copies, *options)


def change_first_text(data: Path) -> None:
    (file,) = [path for path in data.rglob("*") if path.is_file() and "train" in path.name]
    rows = Dataset.from_parquet(str(file)) if file.suffix == ".parquet" else Dataset.from_json(str(file))
    text = [row + " again" if index == 0 else row for index, row in enumerate(rows["text"])]
    changed = rows.remove_columns("text").add_column("text", text)
    changed.to_parquet(str(file)) if file.suffix == ".parquet" else changed.to_json(str(file))


def test_record_counts_for_copies_of_its_data_and_model(grid, capsys):
    assert moved(grid, "--dry-run") == 1
    assert "finished  FedAvg, seed 0" in capsys.readouterr().out
    assert moved(grid) == 1


@pytest.mark.parametrize(
    "change",
    [
        "benchmark.runs.FedAvg.method=centralized",
        "benchmark.runs.FedAvg.method=local",
        "federation.evaluate_clients=true",
        "data.validation_examples=0.1",
        "public={share: 0.25}",
    ],
)
def test_record_of_other_settings_counts_for_copies_too(grid, change):
    assert run(grid, f"--set={change}") == 2
    assert moved(grid, f"--set={change}") == 2


def test_other_examples_are_another_run(grid, tmp_path, capsys):
    change_first_text(tmp_path / "data")
    assert moved(grid, "--dry-run") == 1
    assert "pending   FedAvg, seed 0" in capsys.readouterr().out
    assert moved(grid) == 2


def test_examples_that_changed_at_the_same_path_are_another_run(grid, texts_dir, tmp_path, capsys):
    """A report must not mix runs on two versions of a file."""
    in_copy = (f"--set=data.path={tmp_path / 'data'}", "--seeds", "1")
    assert run(grid, *in_copy) == 2
    change_first_text(tmp_path / "data")
    assert run(grid, *in_copy, "--report") == 2
    assert run(grid, *in_copy, "--dry-run") == 2
    assert "pending   FedAvg, seed 1" in capsys.readouterr().out
    assert run(grid, *in_copy) == 3
    shutil.copytree(texts_dir, tmp_path / "data", dirs_exist_ok=True)
    assert run(grid, *in_copy) == 3  # the first record of the seed counts again


def test_examples_are_hashed_only_if_a_file_was_written(grid, texts_dir, monkeypatch, capsys):
    hashed = []

    def count(values):
        hashed.append(values["data"]["path"])
        return hash_inputs(values)

    monkeypatch.setattr("hf_federated.experiments.benchmark.run_inputs.hash_inputs", count)
    assert run(grid) == 1
    assert hashed == []
    os.utime(max(file for file in texts_dir.rglob("*") if file.is_file()), (0, 0))
    capsys.readouterr()
    assert run(grid) == 1
    assert hashed == [str(texts_dir)]
    assert "1 already finished" in capsys.readouterr().out


def test_other_weights_are_another_run(grid, tmp_path):
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    name = max(weights)
    weights[name] = weights[name] + 1
    save_file(weights, file, metadata={"format": "pt"})
    assert moved(grid) == 2
    records = list(map(json.loads, (tmp_path / "results" / "grid" / "runs.jsonl").read_text().splitlines()))
    assert records[0]["digest"] == records[1]["digest"]
    assert records[0]["weights"].keys() == records[1]["weights"].keys() == {"model.name_or_path"}
    assert records[0]["weights"] != records[1]["weights"]
    assert moved(grid) == 2 and run(grid) == 2  # each record counts for its own locations


def test_record_without_hashes_of_weights_counts_only_for_its_own_locations(grid, tmp_path):
    file = tmp_path / "results" / "grid" / "runs.jsonl"
    record = json.loads(file.read_text())
    old = {name: value for name, value in record.items() if name not in ("weights", "full_digest")}
    file.write_text(json.dumps({**old, "digest": record["full_digest"]}) + "\n")
    assert run(grid) == 1  # a record of version 0.1
    file.write_text(json.dumps(old) + "\n")
    assert run(grid, "--report") == 1
    assert moved(grid) == 2


def test_reused_run_has_read_the_same_inputs(grid, tmp_path, capsys):
    other = tmp_path / "other"
    command = ["benchmark", str(grid), "--output-dir", str(other), "--reuse", str(tmp_path / "results" / "grid")]
    (tmp_path / "model" / "model.safetensors").write_bytes(b"0")  # no weights, so the run itself fails
    assert main([*command, "--set", f"model.name_or_path={tmp_path / 'model'}"]) == 1
    assert "reused from" not in capsys.readouterr().out
    assert main([*command, "--set", f"data.path={tmp_path / 'data'}"]) == 0
    assert "reused from grid.yaml: FedAvg" in capsys.readouterr().out


def test_report_needs_neither_data_nor_model(grid, tmp_path):
    report = tmp_path / "results" / "grid" / "report.md"
    before = report.read_bytes()
    report.unlink()
    assert run(grid, "--report", "--set=data.path=/nowhere", "--set=model.name_or_path=/nowhere") == 1
    assert report.read_bytes() == before
