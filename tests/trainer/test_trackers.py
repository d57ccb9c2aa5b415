"""A federation is one run of a tracker, with the rounds as steps, under the names of the page *Trackers*."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from federations import CLIENTS, build_federation
from tiny import rows
from transformers import TrainerCallback

from hf_federated import FederatedDataset


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trackers.md"
NUM_ROUNDS = 3


class Values(TrainerCallback):
    """The logged values by name and round."""

    def __init__(self) -> None:
        self.logged: dict[str, dict[int, float]] = {}

    def on_log(self, args, state, control, logs, **kwargs):
        for name, value in logs.items():
            if name not in ("epoch", "total_flos"):
                self.logged.setdefault(name, {})[state.global_step] = value


def train(folder, tracker: str, **federation) -> dict[str, dict[int, float]]:
    """Train with a tracker. Return the values that the trainer logged."""
    values = Values()
    trainer = build_federation(
        folder,
        num_rounds=NUM_ROUNDS,
        federation={"log_clients": True, **federation},
        trainer={"eval_dataset": rows(4, seed=9), "callbacks": [values]},
        eval_strategy="epoch",
        report_to=[tracker],
    )
    trainer.train()
    return values.logged


def tracker_name(name: str) -> str:
    """The name of a value in TensorBoard, W&B and trackio."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def by_round(values: dict[int, float]) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in sorted(values.items())]


def test_tensorboard_has_one_run_with_the_logged_values(tmp_path, monkeypatch):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs TensorBoard"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    logged = train(tmp_path / "run", "tensorboard")
    for name in ("loss", "grad_norm", "eval_loss", "federated/bytes_up"):
        assert sorted(logged[name]) == [1, 2, 3], name
    (folder,) = {path.parent for path in (tmp_path / "board").rglob("events.out.tfevents*")}
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    found = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for name, values in logged.items():
        assert found[tracker_name(name)] == by_round(values), name


@pytest.mark.slow
def test_mlflow_has_one_run_with_the_logged_values(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow (`pip install mlflow-skinny`)")
    store = (tmp_path / "mlruns").as_uri()
    # Later versions of MLflow ask for a confirmation of the file store.
    for name, value in (("MLFLOW_TRACKING_URI", store), ("MLFLOW_ALLOW_FILE_STORE", "true")):
        monkeypatch.setenv(name, value)
    mlflow.set_tracking_uri(store)
    logged = train(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "FINISHED"
    for name, values in logged.items():
        found = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        assert found == by_round(values), name


@pytest.mark.slow
def test_trackio_has_one_run_with_the_logged_values(tmp_path):
    """trackio reads the folder of its database when it is imported, so the run has its own process."""
    pytest.importorskip("trackio", reason="needs trackio (`pip install trackio`)")
    code = "import json, sys, test_trackers as t; print(json.dumps(t.train(sys.argv[1], 'trackio')))"
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests / "trainer"), str(tests), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    logged = json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"loss"')))
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        lines = connection.execute("select run_id, metrics from metrics order by id").fetchall()
    assert len({run for run, _ in lines}) == 1
    found: dict[str, dict[str, float]] = {}
    for metrics in [json.loads(metrics) for _, metrics in lines]:
        # trackio counts its own steps. The round is a value.
        for name, value in metrics.items():
            found.setdefault(name, {})[str(metrics["train/global_step"])] = value
    for name, values in logged.items():
        if not name.startswith("train_"):
            assert found[tracker_name(name)] == pytest.approx(values), name


@pytest.mark.slow
def test_wandb_has_one_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs W&B (`pip install wandb`)")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    train(tmp_path / "run", "wandb")
    import wandb

    wandb.finish()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_page_names_every_logged_value(tmp_path):
    """Each name of the page is logged, and each logged name is on the page."""
    clients = FederatedDataset.from_dict(CLIENTS)
    values = Values()
    trainer = build_federation(
        tmp_path,
        clients,
        num_rounds=NUM_ROUNDS,
        federation={"log_clients": True, "evaluate_clients": True, "report_anomalies": True},
        trainer={"eval_dataset": clients, "callbacks": [values]},
        eval_strategy="epoch",
    )
    trainer.train()
    logged = {re.sub(r"client/\w+/", "client/ID/", name) for name in values.logged}
    logged = {
        re.sub(r"(federated/)?eval_loss_(mean|worst|best|spread)", "federated/eval_METRIC_STATISTIC", name)
        for name in logged
    }
    logged = {re.sub(r"^eval_loss$", "eval_METRIC", name) for name in logged}
    table = PAGE.read_text(encoding="utf-8").partition("## What is logged")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    optional = {"federated/lora_inexactness", "federated/lora_inexactness_max", "num_tokens", "federated/num_clipped"}
    assert logged - named == set()
    assert named - logged <= optional
