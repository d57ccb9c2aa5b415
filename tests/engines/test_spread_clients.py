"""A client over a network that is a launch of two processes gives the bytes of `parallelism="data"` in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import logs, notes, same_bits, weights
from workers import without_timings, worker


SCENARIO = "two data clients"
LOCAL_HEADS = "two data clients with local heads"
# A server and two clients, each with two processes.
NUM_PARTIES, NUM_RANKS = 3, 2


@pytest.fixture(scope="module")
def network() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call `network(directory, scenario, ...)` to get the exit codes of the server and of all processes of clients."""
    with worker("spread_client_worker.py") as ask:
        yield lambda directory, scenario, **options: ask(
            {
                "directory": str(directory),
                "scenario": scenario,
                "num_parties": NUM_PARTIES,
                "num_ranks": NUM_RANKS,
                **options,
            }
        )


def assert_same_run(expected: Path, found: Path, *excluded: str) -> None:
    assert same_bits(weights(expected), weights(found)), logs(found)
    reference, result = notes(expected), notes(found)
    assert result["ledger"] == reference["ledger"]
    # The processes of one launch share the evaluation of the server too, which changes the order of its sums.
    names = [*excluded, *(name for entry in reference["log"] for name in entry if name.startswith("eval_"))]
    assert without_timings(result["log"], *names) == without_timings(reference["log"], *names)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [SCENARIO, "two data distillation clients", LOCAL_HEADS])
def test_clients_of_two_processes_give_the_bytes_of_one_launch(network, finished, tmp_path, scenario):
    answer = network(tmp_path, scenario)
    assert answer["codes"] == [0] * (1 + 2 * NUM_RANKS), logs(tmp_path)
    assert_same_run(finished(scenario, NUM_RANKS), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in a step", "before the next request", "idle"])
@pytest.mark.parametrize("rank", [0, 1])
def test_client_ends_if_one_of_its_processes_is_killed_and_continues_when_it_is_started_again(
    network, finished, tmp_path, rank, moment
):
    kill = {"party": 1, "rank": rank, "round": 1, "before_reply": moment == "before the next request"}
    answer = network(tmp_path, SCENARIO, kill=kill | {"idle": moment == "idle"})
    killed_codes = [-9 if each == rank else 1 for each in range(NUM_RANKS)]
    assert answer["killed_codes"] == killed_codes and answer["seconds_after_kill"] < 15, logs(tmp_path)
    assert "A process of the launch ended without a report" in (tmp_path / "rank-1.log").read_text()
    assert answer["codes"] == [0] * (1 + 2 * NUM_RANKS), logs(tmp_path)
    assert_same_run(finished(SCENARIO, NUM_RANKS), tmp_path)


@pytest.mark.slow
def test_all_processes_of_a_client_return_to_the_state_of_the_checkpoint_of_a_killed_server(
    network, finished, tmp_path
):
    answer = network(tmp_path, SCENARIO, kill={"party": 0, "round": 1})
    assert answer["killed_codes"] == [-9] and answer["codes"] == [0] * (1 + 2 * NUM_RANKS), logs(tmp_path)
    # `Trainer` averages `train_loss` over the rounds since the resume.
    assert_same_run(finished(SCENARIO, NUM_RANKS), tmp_path, "train_loss")
