"""What happens to a federation over several processes when one of them fails: all end, with the first error."""

from __future__ import annotations

import signal
from pathlib import Path

from launches import Launch, logs, notes, same_bits, weights

from hf_federated.checkpoint import list_checkpoints


SOON = 20


def failed_in_every_process(launch: Launch, directory: Path, trouble: str, scenario: str = "fedprox") -> list[str]:
    """What each process printed."""
    answer = launch(directory, scenario, 2, trouble=trouble)
    assert answer["codes"] == [1, 1], logs(directory)
    assert answer["seconds"] < SOON
    return [(directory / f"rank-{rank}.log").read_text() for rank in range(2)]


def test_a_failing_client_ends_all_processes_with_its_name(launch, tmp_path: Path) -> None:
    for log in failed_in_every_process(launch, tmp_path, "client"):
        assert "RoundFailedError" in log.splitlines()[-1]
        assert "'client 3'" in log and "ValueError: these rows are bad" in log


def test_a_failing_client_is_left_out_as_on_one_process(launch, tmp_path: Path) -> None:
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


def test_an_error_of_one_process_ends_all_with_it(launch, tmp_path: Path) -> None:
    for rank, log in enumerate(failed_in_every_process(launch, tmp_path, "callback")):
        expected = "ValueError: the callback gave up"
        assert log.splitlines()[-1] == (
            expected if rank == 1 else f"hf_federated.processes.PeerFailedError: Process 1 failed: {expected}"
        )


def test_an_error_under_data_parallelism_names_the_client(launch, tmp_path: Path) -> None:
    for log in failed_in_every_process(launch, tmp_path, "client", scenario="data many"):
        assert "Client 'client 3', round 1: ValueError: these rows are bad" in log.splitlines()[-1]


def test_a_killed_process_ends_all_and_the_run_resumes(launch, finished, tmp_path: Path) -> None:
    answer = launch(tmp_path, "carry", 2, trouble="kill")
    assert answer["codes"] == [1, -signal.SIGKILL], logs(tmp_path)
    assert answer["seconds"] < SOON
    assert "PeerFailedError" in (tmp_path / "rank-0.log").read_text()
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    answer = launch(tmp_path, "carry", 2, resume=True)
    assert answer["codes"] == [0, 0], logs(tmp_path)
    assert same_bits(weights(finished("carry", 2)), weights(tmp_path))
    assert notes(finished("carry", 2))["ledger"] == notes(tmp_path)["ledger"]
