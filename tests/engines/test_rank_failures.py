"""If one process of a launch fails, all processes end with the first error."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, last_error, logs, notes, same_bits, weights

from hf_federated.trainer.checkpoint import list_checkpoints
from hf_federated.trainer.output_lock import LOCK_FILE
from hf_federated.utils.file_lock import FileLock


# Seconds within which all processes must end after a failure.
MAX_SECONDS = 20


def failed_in_every_process(
    launch: Launch, directory: Path, scenario: str = "fedprox", world_size: int = 2, **options: Any
) -> list[str]:
    """Run a scenario in which every process fails, and return the last error of each process."""
    answer = launch(directory, scenario, world_size, **options)
    assert answer["codes"] == [1] * world_size, logs(directory)
    assert answer["seconds"] < MAX_SECONDS
    return [last_error(directory, rank) for rank in range(world_size)]


def test_a_failing_client_ends_all_processes_with_its_name(launch, tmp_path: Path) -> None:
    for error in failed_in_every_process(launch, tmp_path, trouble="client"):
        assert "RoundFailedError" in error
        assert "'client 3'" in error and "ValueError: these rows are bad" in error


def test_processes_raise_the_error_of_one_process_if_too_few_clients_are_left(launch, tmp_path: Path) -> None:
    """All five clients fail. One process stops at the third failure, and two processes see up to five failures."""
    errors = [
        error
        for world_size in (1, 2)
        for error in failed_in_every_process(
            launch, tmp_path / str(world_size), world_size=world_size, trouble="all clients"
        )
    ]
    expected = (
        "RoundFailedError: Round 2: 3 of 5 clients failed. The remaining 2 are fewer than min_clients=3. The first "
        "failure: Client 'client 0', round 2: ValueError: these rows are bad"
    )
    assert len(errors) == 3 and all(error.endswith(expected) for error in errors)
    log = (tmp_path / "1" / "rank-0.log").read_text()
    assert log.count("Rejected: ") == 3


def test_tolerated_client_failure_gives_the_same_model_as_one_process(launch, tmp_path: Path) -> None:
    states = []
    for world_size in (1, 2):
        directory = tmp_path / str(world_size)
        answer = launch(directory, "fedprox", world_size, trouble="tolerated client")
        assert answer["codes"] == [0] * world_size, logs(directory)
        for rank in range(world_size):
            rejected = notes(directory, rank)["rejected"]
            assert [list(clients) for clients in rejected] == [[], ["client 3"], []]
        states.append(weights(directory))
    assert same_bits(*states)


@pytest.mark.parametrize(
    ("scenario", "failing"),
    [
        ("data many", 2),
        pytest.param("fedprox", 0, marks=pytest.mark.slow),
        pytest.param("fedprox", 2, marks=pytest.mark.slow),
        pytest.param("data many", 0, marks=pytest.mark.slow),
    ],
)
def test_error_in_one_process_ends_all_processes(launch, tmp_path: Path, scenario: str, failing: int) -> None:
    errors = failed_in_every_process(launch, tmp_path, scenario, 3, trouble="callback", rank=failing)
    first = "ValueError: the callback gave up"
    peer_error = f"hf_federated.distributed.process_group.PeerFailedError: Process {failing} failed: {first}"
    assert errors == [first if rank == failing else peer_error for rank in range(3)]


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_error_at_the_end_of_training_ends_all_processes(launch, tmp_path: Path, failing: int) -> None:
    for error in failed_in_every_process(launch, tmp_path, trouble="end", rank=failing):
        assert "ValueError: the callback gave up at the end" in error


@pytest.mark.parametrize(
    "setting, error",
    [
        (
            "clients per round",
            "ValueError: clients_per_round=99, but the federation has 5 clients. Set it to at most 5.",
        ),
        ("constructor", "TypeError: Trainer.__init__() got an unexpected keyword argument 'no_such_argument'"),
    ],
)
def test_error_in_the_constructor_of_one_process_ends_all_processes(
    launch, tmp_path: Path, setting: str, error: str
) -> None:
    errors = failed_in_every_process(launch, tmp_path, world_size=3, differ=setting)
    assert errors[2] == error
    for peer_error in errors[:2]:
        assert f"PeerFailedError: Process 2 failed: {error}" in peer_error


@pytest.mark.slow
def test_process_that_does_not_join_is_named(launch, tmp_path: Path) -> None:
    answer = launch(tmp_path, "fedprox", 3, trouble="absent")
    assert answer["codes"] == [1, 1, 0], logs(tmp_path)
    assert answer["seconds"] < MAX_SECONDS
    for rank in range(2):
        error = last_error(tmp_path, rank)
        assert "Process 2 of 3 did not build the trainer within 3 s (`ddp_timeout`" in error


def test_process_that_ended_early_is_named(launch, tmp_path: Path) -> None:
    answer = launch(tmp_path, "fedavg", 2, trouble="only main evaluates")
    assert answer["codes"] == [1, 0], logs(tmp_path)
    error = last_error(tmp_path, 0)
    assert "Process 1 reached the end of the script while process 0 waited" in error
    assert "at 'predictions of an evaluation'" in error


@pytest.mark.parametrize(
    ("scenario", "next_call"),
    [
        ("data many", "train"),
        pytest.param("fedprox", "build", marks=pytest.mark.slow),
        pytest.param("fedprox", "train", marks=pytest.mark.slow),
        pytest.param("data many", "build", marks=pytest.mark.slow),
    ],
)
def test_failed_launch_cannot_be_used_again(launch, tmp_path: Path, scenario: str, next_call: str) -> None:
    for error in failed_in_every_process(launch, tmp_path, scenario, trouble="callback", again=next_call):
        assert "LaunchFailedError: An earlier run of this launch failed" in error
        assert "ValueError: the callback gave up" in error


def test_train_returns_after_the_main_process_has_cleaned_up(launch, tmp_path: Path) -> None:
    answer = launch(tmp_path, "one client", 2, trouble="slow main")
    assert answer["codes"] == [0, 0], logs(tmp_path)
    assert ".incomplete" not in notes(tmp_path, 1)["files"]


def test_killed_process_is_not_reported_as_a_client_failure(launch, tmp_path: Path) -> None:
    answer = launch(tmp_path, "data many", 2, trouble="kill")
    assert answer["codes"] == [1, -signal.SIGKILL], logs(tmp_path)
    assert answer["seconds"] < MAX_SECONDS
    assert "PeerFailedError: A process of the launch ended without a report" in last_error(tmp_path, 0)
    assert "Error: Client" not in (tmp_path / "rank-0.log").read_text()


def test_client_error_with_data_parallelism_names_the_client(launch, tmp_path: Path) -> None:
    for error in failed_in_every_process(launch, tmp_path, "data many", trouble="client"):
        assert "Client 'client 3', round 2: ValueError: these rows are bad" in error


@pytest.mark.slow
def test_run_resumes_after_a_killed_process(launch, finished, tmp_path: Path) -> None:
    answer = launch(tmp_path, "carry", 2, trouble="kill")
    assert answer["codes"] == [1, -signal.SIGKILL], logs(tmp_path)
    assert answer["seconds"] < MAX_SECONDS
    assert "PeerFailedError" in (tmp_path / "rank-0.log").read_text()
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    answer = launch(tmp_path, "carry", 2, resume=True)
    assert answer["codes"] == [0, 0], logs(tmp_path)
    assert same_bits(weights(finished("carry", 2)), weights(tmp_path))
    assert notes(finished("carry", 2))["ledger"] == notes(tmp_path)["ledger"]


def test_every_process_reports_the_holder_of_the_output_directory(launch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = FileLock(tmp_path / "run" / LOCK_FILE)
    lock.acquire()
    for error in failed_in_every_process(launch, tmp_path):
        assert "OutputDirInUseError" in error and f"process {os.getpid()} on" in error
    lock.release()


def test_every_process_reports_a_damaged_file_of_the_checkpoint(launch, finished, tmp_path: Path) -> None:
    shutil.copytree(finished("carry", 2) / "run", tmp_path / "run")
    path = list_checkpoints(tmp_path / "run")[-1] / "trainer_state.json"
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    for error in failed_in_every_process(launch, tmp_path, "carry", resume=True):
        assert "CheckpointError" in error and "trainer_state.json' has other bytes than were saved" in error
