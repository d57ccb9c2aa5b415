"""`hf-federated benchmark --reuse` reuses runs with the same settings from the folders of other recipes."""

from __future__ import annotations

import pytest
from test_benchmark_command import RECIPE, Command, write_recipe

from hf_federated.experiments.benchmark.run_log import read_records
from hf_federated.experiments.errors import CommandError


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path / "out")


@pytest.fixture
def second_recipe(command, tmp_path):
    """A recipe with one run that a finished benchmark has under a different name."""
    assert command(write_recipe(tmp_path)) == 0
    runs = {"server_lr 1": {}, "server_lr 0.2": {"federation.server_lr": 0.2}}
    return write_recipe(tmp_path, "rates.yaml", runs=runs, claims=["server_lr 1 > server_lr 0.2"], paper={})


def test_run_with_the_same_settings_is_reused_and_its_origin_recorded(command, second_recipe, tmp_path):
    source = tmp_path / "out" / "targets"
    assert command(second_recipe, "--reuse", str(source)) == 0
    assert command.executed == ["server_lr 0.2, seed 0", "server_lr 0.2, seed 1"]
    records = {(record["run"], record["seed"]): record for record in read_records(tmp_path / "out" / "rates")}
    original = {(record["run"], record["seed"]): record for record in read_records(source)}
    for seed in (0, 1):
        reused, source_record = records["server_lr 1", seed], original["FedAvg", seed]
        assert reused["taken_from"] == "targets.yaml: FedAvg" and reused["recipe"] == "rates.yaml"
        assert all(
            reused[name] == source_record[name] for name in ("metrics", "history", "seconds", "digest", "versions")
        )
        assert "taken_from" not in records["server_lr 0.2", seed]
    printed = "\n".join(command.lines)
    assert "Runs reused from other recipes with the same settings: server_lr 1 (targets.yaml: FedAvg)." in printed
    # A reused run counts as finished. If a third recipe reuses it, the record still names the first recipe.
    assert command(second_recipe) == 0 and command.executed == []
    third = write_recipe(tmp_path, "third.yaml", runs={"again": {}}, claims=[], paper={})
    assert command(third, "--reuse", str(tmp_path / "out" / "rates")) == 0 and command.executed == []
    assert {record["taken_from"] for record in read_records(tmp_path / "out" / "third")} == {"targets.yaml: FedAvg"}


def test_runs_are_executed_without_the_option_or_with_different_settings(command, second_recipe, tmp_path):
    assert command(second_recipe) == 0 and len(command.executed) == 4
    other = tmp_path / "other"
    recipe = write_recipe(other, "rates.yaml", runs={"FedAvg": {}}, claims=[], paper={}, seeds=[0, 7])
    source = str(tmp_path / "out" / "targets")
    changed = Command(other / "out")
    assert changed(recipe, "--reuse", source, "--set", "training.learning_rate=0.2") == 0
    assert changed.executed == ["FedAvg, seed 0", "FedAvg, seed 7"]
    unchanged = Command(other / "again")
    assert unchanged(recipe, "--reuse", source) == 0 and unchanged.executed == ["FedAvg, seed 7"]


def test_recipes_of_one_command_reuse_runs_of_each_other(command, tmp_path):
    recipes = [write_recipe(tmp_path, f"{name}.yaml", runs={name: {}}, claims=[], paper={}) for name in ("a", "b")]
    assert command(*recipes, "--reuse", str(tmp_path / "out" / "a")) == 0
    assert command.executed == ["a, seed 0", "a, seed 1"]


def test_reuse_folder_without_runs_is_rejected_before_any_run(command, tmp_path):
    with pytest.raises(CommandError, match="--reuse .*nowhere: the folder contains no runs.jsonl"):
        command(write_recipe(tmp_path), "--reuse", str(tmp_path / "nowhere"))
    assert command.executed == [] and RECIPE["benchmark"]["seeds"] == [0, 1]
