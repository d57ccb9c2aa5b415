"""`hf-federated benchmark --reuse` takes runs of the same settings from other recipes' folders."""

from __future__ import annotations

import pytest
from test_benchmark_command import RECIPE, Command, write_recipe

from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.run_log import read_records


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path / "out")


@pytest.fixture
def made(command, tmp_path):
    """A grid that was made, and another one that has a run in common with it, under another name."""
    assert command(write_recipe(tmp_path)) == 0
    runs = {"server_lr 1": {}, "server_lr 0.2": {"federation.server_lr": 0.2}}
    return write_recipe(tmp_path, "rates.yaml", runs=runs, claims=["server_lr 1 > server_lr 0.2"], paper={})


def test_a_run_of_the_same_settings_is_taken_and_named(command, made, tmp_path):
    source = tmp_path / "out" / "targets"
    assert command(made, "--reuse", str(source)) == 0
    assert command.made == ["server_lr 0.2, seed 0", "server_lr 0.2, seed 1"]
    records = {(record["run"], record["seed"]): record for record in read_records(tmp_path / "out" / "rates")}
    original = {(record["run"], record["seed"]): record for record in read_records(source)}
    for seed in (0, 1):
        taken, own = records["server_lr 1", seed], original["FedAvg", seed]
        assert taken["taken_from"] == "targets.yaml: FedAvg" and taken["recipe"] == "rates.yaml"
        assert all(taken[name] == own[name] for name in ("metrics", "history", "seconds", "digest", "versions"))
        assert "taken_from" not in records["server_lr 0.2", seed]
    printed = "\n".join(command.lines)
    assert "Runs of other recipes, which have the same settings: server_lr 1 (targets.yaml: FedAvg)." in printed
    # It is done now, as if it had been made; and whoever takes it from here learns where it is from.
    assert command(made) == 0 and command.made == []
    third = write_recipe(tmp_path, "third.yaml", runs={"again": {}}, claims=[], paper={})
    assert command(third, "--reuse", str(tmp_path / "out" / "rates")) == 0 and command.made == []
    assert {record["taken_from"] for record in read_records(tmp_path / "out" / "third")} == {"targets.yaml: FedAvg"}


def test_without_the_option_and_under_other_settings_every_run_is_made(command, made, tmp_path):
    assert command(made) == 0 and len(command.made) == 4
    other = tmp_path / "other"
    recipe = write_recipe(other, "rates.yaml", runs={"FedAvg": {}}, claims=[], paper={}, seeds=[0, 7])
    source = str(tmp_path / "out" / "targets")
    changed = Command(other / "out")
    assert changed(recipe, "--reuse", source, "--set", "training.learning_rate=0.2") == 0
    assert changed.made == ["FedAvg, seed 0", "FedAvg, seed 7"]
    unchanged = Command(other / "again")
    assert unchanged(recipe, "--reuse", source) == 0 and unchanged.made == ["FedAvg, seed 7"]


def test_recipes_of_one_command_take_from_one_another(command, tmp_path):
    recipes = [write_recipe(tmp_path, f"{name}.yaml", runs={name: {}}, claims=[], paper={}) for name in ("a", "b")]
    assert command(*recipes, "--reuse", str(tmp_path / "out" / "a")) == 0
    assert command.made == ["a, seed 0", "a, seed 1"]


def test_a_folder_without_runs_is_refused_before_any_run(command, tmp_path):
    with pytest.raises(CommandError, match="--reuse .*nowhere: there is no runs.jsonl"):
        command(write_recipe(tmp_path), "--reuse", str(tmp_path / "nowhere"))
    assert command.made == [] and RECIPE["benchmark"]["seeds"] == [0, 1]
