"""SuperGLUE in recipes and commands: partitioning by task, plots, and training with both formulations."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import Dataset
from superglue_raw import benchmark

from hf_federated import FederatedDataset, FederatedDatasetDict, PerClassDirichletPartitioner
from hf_federated.cli.main import main
from hf_federated.data import label_counts, plot_label_shares
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.train_recipe import train_recipe
from hf_federated.tasks.superglue import LABELS


def examples_of_all_tasks(per_task: int = 50) -> Dataset:
    """A dataset with only the column `task`."""
    return Dataset.from_dict({"task": [task for task in LABELS for _ in range(per_task)]})


def tasks_of(alpha: float, num_clients: int, seed: int = 0) -> dict[str, list[str]]:
    partitioner = PerClassDirichletPartitioner(num_clients, label_column="task", alpha=alpha, seed=seed)
    clients = FederatedDataset.from_dataset(examples_of_all_tasks(), partitioner)
    return {client_id: rows["task"][:] for client_id, rows in clients.items()}


@pytest.mark.parametrize("seed", range(6))
def test_each_client_has_one_task_as_alpha_approaches_zero(seed):
    clients = tasks_of(1e-12, 8, seed)
    assert sorted(set(rows).pop() for rows in clients.values()) == sorted(LABELS)
    assert all(len(set(rows)) == 1 and len(rows) == 50 for rows in clients.values())


@pytest.mark.parametrize("seed", range(3))
def test_larger_alpha_gives_clients_more_tasks(seed):
    def mean_tasks(alpha: float) -> float:
        clients = tasks_of(alpha, 20, seed)
        assert len(clients) == 20 and sum(map(len, clients.values())) == 400
        return float(np.mean([len(set(rows)) for rows in clients.values()]))

    assert 1 <= mean_tasks(0.05) < mean_tasks(0.5) < mean_tasks(50) == 8


def test_partitions_with_several_alphas_are_plotted_in_one_figure(tmp_path):
    counts = {}
    for name, alpha, num_clients in (("α → 0", 1e-12, 8), ("α = 0.05", 0.05, 20), ("α = 0.5", 0.5, 20)):
        partitioner = PerClassDirichletPartitioner(num_clients, label_column="task", alpha=alpha)
        counts[name] = label_counts(FederatedDataset.from_dataset(examples_of_all_tasks(), partitioner), "task")
    # All examples of a client belong to one task.
    assert counts["α → 0"].shares.max(axis=1).tolist() == [1.0] * 8
    plot_label_shares(counts, tmp_path / "figure3.png")
    assert (tmp_path / "figure3.png").read_bytes().startswith(b"\x89PNG")


def test_commands_partition_by_task_and_plot_the_partition(superglue_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = f"partition {superglue_dir} --partitioner per-class-dirichlet --label-column task --alpha 1e-12"
    assert main([*command.split(), "--num-clients", "8", "--output", "clients"]) == 0
    capsys.readouterr()
    assert main("inspect clients --label-column task --output plots".split()) == 0
    assert "boolq" in capsys.readouterr().out
    assert (tmp_path / "plots" / "labels.png").read_bytes().startswith(b"\x89PNG")
    clients = FederatedDatasetDict.load_from_disk("clients")
    for split in ("train", "validation"):
        assert [len(set(rows["task"])) for rows in clients[split].values()] == [1] * 8


@pytest.mark.parametrize("task", ["superglue-classification", "superglue-seq2seq"])
def test_recipe_trains_on_all_tasks(recipe_path, superglue_dir, model_dir, tmp_path, task):
    decoder = [f"model.decoder_name_or_path={model_dir}"] if task == "superglue-seq2seq" else []
    recipe = load_recipe(
        recipe_path,
        [
            f"data.path={superglue_dir}",
            "data.test_split=validation",
            "data.test_clients=null",
            "partition={name: per-class-dirichlet, label_column: task, num_clients: 8, alpha: 1.0e-12}",
            f"task={{name: {task}}}",
            "federation={num_rounds: 1, clients_per_round: 0.8, balance: min, max_rows_per_round: 250}",
            "plots=true",
            *decoder,
        ],
    )
    results = train_recipe(recipe)
    metrics = results["federated"]["metrics"]
    assert results["metric"] == "superglue_score"
    scores = [metrics[f"{name}_score"] for name in LABELS]
    assert metrics["superglue_score"] == pytest.approx(np.mean(scores))
    assert {"multirc_f1a", "multirc_exact_match", "record_token_f1", "cb_f1_macro", "accuracy"} < set(metrics)
    saved = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (saved["num_train_clients"], saved["num_train_rows"]) == (8, len(benchmark()))
    assert (tmp_path / "run" / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_public_examples_lose_their_labels(recipe_path, superglue_dir):
    recipe = load_recipe(
        recipe_path,
        [
            f"data.path={superglue_dir}",
            "data.test_split=validation",
            "data.test_clients=null",
            "partition={name: iid, num_clients: 2}",
            "task={name: superglue-classification}",
            "public={share: 0.3}",
        ],
    )
    raw = load_raw_data(recipe)
    assert raw.public is not None and "target" not in raw.public.column_names
    assert "target" in raw.train.column_names
