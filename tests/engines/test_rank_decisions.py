"""A decision of a callback in one process applies to all processes. Processes out of step raise an error."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from launches import last_error, logs, notes, same_bits, weights
from workers import without_timings

from hf_federated.trainer.checkpoint import list_checkpoints


@pytest.mark.parametrize(
    "decision, num_rounds, checkpoints",
    [
        ("client stops", 1, [1]),
        ("client saves", 3, [1]),
        ("one process stops", 2, [1, 2]),
        pytest.param("one process saves", 3, [2], marks=pytest.mark.slow),
        ("one process evaluates", 3, [1, 2, 3]),
    ],
)
@pytest.mark.sampled(2)
def test_decision_of_one_process_applies_to_all_processes(
    launch, tmp_path: Path, decision: str, num_rounds: int, checkpoints: list[int]
) -> None:
    directories = [tmp_path / str(world_size) for world_size in (1, 3)]
    for directory, world_size in zip(directories, (1, 3), strict=True):
        answer = launch(directory, "fedavg", world_size, trouble=decision)
        assert answer["codes"] == [0] * world_size, logs(directory)
        names = [path.name for path in list_checkpoints(directory / "run")]
        assert names == [f"checkpoint-{number}" for number in checkpoints]
    single, several = directories
    assert len(notes(single)["cohorts"]) == num_rounds
    for rank in range(3):
        assert same_bits(weights(single), weights(several, rank))
        assert without_timings(notes(single)["log"]) == without_timings(notes(several, rank)["log"])


def test_main_process_logs_one_line_for_each_of_its_clients(launch, tmp_path: Path) -> None:
    answer = launch(tmp_path, "fedavg", 2, log_level="info")
    assert answer["codes"] == [0, 0], logs(tmp_path)
    log = (tmp_path / "rank-0.log").read_text()
    trained = notes(tmp_path)["trained"]
    num_own = Counter(round for round, _ in trained)
    position: Counter[int] = Counter()
    expected = []
    for round, client_id in trained:
        position[round] += 1
        expected.append(f"round {round + 1}/3, client {client_id} ({position[round]}/{num_own[round]})")
    assert re.findall(r"round \d+/\d+, client [^:]*", log) == expected
    assert 0 < len(expected) < sum(map(len, notes(tmp_path)["cohorts"]))
    assert log.count("***** Running federated training *****") == 1 and "***** Running training" not in log
    assert "client" not in (tmp_path / "rank-1.log").read_text()


def test_processes_out_of_step_are_named_with_their_positions(launch, tmp_path: Path) -> None:
    answer = launch(tmp_path, "fedavg", 2, trouble="main evaluates")
    assert answer["codes"] == [1, 1], logs(tmp_path)
    positions = "process 0 at 'predictions of an evaluation'; process 1 at 'lock of the output directory'"
    for rank in range(2):
        assert positions in last_error(tmp_path, rank)
