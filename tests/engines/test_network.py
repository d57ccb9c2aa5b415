"""A federation over a network gives the bytes of one process, also if parties are killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import SCENARIOS
from launches import logs, notes, same_bits, weights
from network_faults import REPORT_FILE
from rank_troubles import SIZES
from workers import without_timings, worker


NUM_PARTIES = 1 + len(SIZES)
# Scenarios that run in the fast tests. They use every hook of an algorithm, and tensors that clients keep.
FAST = ("aggregation every_aggregation_hook", "distillation every_distillation_hook")
MARKED = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]


@pytest.fixture(scope="module")
def network() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call `network(directory, scenario, ...)` to get the exit codes of the server and of the clients."""
    with worker("network_worker.py") as ask:
        yield lambda directory, scenario, **options: ask(
            {"directory": str(directory), "scenario": scenario, "num_parties": NUM_PARTIES, **options}
        )


@pytest.fixture(scope="module")
def reference(launch, tmp_path_factory) -> Callable[[str], Path]:
    """The directory of a run in one process."""
    directories: dict[str, Path] = {}

    def directory(scenario: str) -> Path:
        if scenario not in directories:
            directories[scenario] = tmp_path_factory.mktemp("local")
            assert launch(directories[scenario], scenario, 1, engine="local")["codes"] == [0]
        return directories[scenario]

    return directory


def assert_same_run(expected: Path, found: Path, *excluded: str) -> None:
    assert same_bits(weights(expected), weights(found)), logs(found)
    reference, result = notes(expected), notes(found)
    assert result["ledger"] == reference["ledger"]
    assert without_timings(result["log"], *excluded) == without_timings(reference["log"], *excluded)


@pytest.mark.parametrize("scenario", MARKED)
def test_network_gives_the_bytes_of_one_process(network, reference, tmp_path, scenario):
    answer = network(tmp_path, scenario)
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    assert_same_run(reference(scenario), tmp_path)


def test_cut_connections_do_not_change_a_byte(network, reference, tmp_path):
    """Further faults of the network are in the slow tests of `test_network_faults.py`."""
    answer = network(tmp_path, FAST[0], faults={"kind": "cut", "every": 150_000, "seconds": 0.1, "times": 3})
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    assert json.loads((tmp_path / REPORT_FILE).read_text())["faults"] == 3
    assert_same_run(reference(FAST[0]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "num_parties"), [("sft", 3), ("grpo", 4)])
def test_server_with_a_trainer_of_trl_gives_the_bytes_of_one_process(
    network, reference, tmp_path, scenario, num_parties
):
    answer = network(tmp_path, scenario, num_parties=num_parties)
    assert answer["codes"] == [0] * num_parties, logs(tmp_path)
    assert_same_run(reference(scenario), tmp_path, "step_time")


def test_clients_evaluate_on_their_own_examples(network, reference, tmp_path):
    answer = network(tmp_path, "evaluated clients")
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    expected = reference("evaluated clients")
    assert_same_run(expected, tmp_path)
    found, metrics = (
        {name: without_timings([values])[0] for name, values in notes(path)["client_metrics"].items()}
        for path in (tmp_path, expected)
    )
    assert found == metrics and len(found) == len(SIZES)


@pytest.mark.slow
def test_run_goes_on_without_a_client_that_stays_away(network, tmp_path):
    kill = {"party": 4, "round": 1, "stays_away": True}
    federation = {"clients_per_round": 1.0, "min_clients": 3}
    answer = network(tmp_path, "fedprox", kill=kill, federation=federation, rejoin_timeout=1)
    assert answer["codes"] == [0, 0, 0, 0, -9, 0], logs(tmp_path)
    rejected = notes(tmp_path)["rejected"]
    assert [list(names) for names in rejected] == [[], ["client 3"], ["client 3"]]
    assert all("the client was absent for 1 s" in names["client 3"] for names in rejected[1:])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["run/checkpoint-1", "run/checkpoint-2"])
def test_resumed_run_leaves_out_the_clients_that_were_late(network, tmp_path, checkpoint):
    """With the reply that comes in time after the resume, clients would refuse the state of the next round."""
    options = {
        "slow": {"party": 3, "round": 1, "seconds": 6.5},
        "federation": {"clients_per_round": 1.0, "min_clients": 3, "round_deadline": 5.0},
    }
    expected, found = tmp_path / "expected", tmp_path / "found"
    for directory, kill in [(expected, None), (found, {"party": 0, "round": 2, "resume_from": checkpoint})]:
        directory.mkdir()
        answer = network(directory, "scaffold", kill=kill, **options)
        assert answer["codes"] == [0] * NUM_PARTIES, logs(directory)
    assert [list(names) for names in notes(expected)["rejected"]] == [[], ["client 2"], []]
    assert same_bits(weights(expected), weights(found)), logs(found)
    assert "refused a request" not in logs(found)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["run/checkpoint-1", "run/checkpoint-2"])
def test_resumed_asynchronous_run_uses_the_replies_in_their_first_order(network, tmp_path, checkpoint):
    """In another order, the states of the later rounds would differ, and the clients would refuse them."""
    answer = network(
        tmp_path,
        "fedprox",
        kill={"party": 0, "round": 2, "resume_from": checkpoint},
        buffer_size=2,
        federation={"clients_per_round": 4, "min_clients": 1},
    )
    assert answer["is_killed"] and answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    assert "refused a request" not in logs(tmp_path)
    outcomes = [
        json.loads(line) for line in (tmp_path / "run" / "network" / "outcomes.jsonl").read_text().splitlines()
    ]
    assert len(outcomes) >= 4 and all(outcome["failure"] is None for outcome in outcomes)


KILLS = {
    "server": {"party": 0, "round": 1},
    "client in a step": {"party": 4, "round": 1},
    "client before its reply": {"party": 4, "round": 1, "before_reply": True},
}


FAST_KILLS = [(FAST[0], "server")]  # `test_network_kills.py` kills a client
MARKED_KILLS = [
    pytest.param(scenario, kill, marks=[] if (scenario, kill) in FAST_KILLS else pytest.mark.slow)
    for scenario in SCENARIOS
    for kill in KILLS
    # The secrets of a session are in memory only, so this client is lost in the round: see `test_secure_network.py`.
    if not (scenario.startswith("secure_aggregation") and kill == "client before its reply")
]


@pytest.mark.parametrize(("scenario", "kill"), MARKED_KILLS)
def test_killed_party_that_returns_does_not_change_a_byte(network, reference, tmp_path, scenario, kill):
    """The server resumes from its checkpoint; a client continues with the message that it had not answered."""
    expected = reference(scenario)
    if notes(expected)["log"][-1]["step"] == 1:
        pytest.skip("the run has one round")
    answer = network(tmp_path, scenario, kill=KILLS[kill])
    assert answer["codes"] == [0] * NUM_PARTIES, logs(tmp_path)
    # `Trainer` averages `train_loss` over the rounds since the resume.
    assert_same_run(expected, tmp_path, "train_loss")
