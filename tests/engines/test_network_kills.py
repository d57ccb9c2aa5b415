"""A party that is killed at any time and started again does not change a byte of a federation over a network."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launches import logs, notes, same_bits, weights
from rank_troubles import SIZES
from workers import without_timings, worker

from hf_federated.clients.store import client_file_name
from hf_federated.trainer.checkpoint import clients_directory


NUM_PARTIES = 1 + len(SIZES)
NUM_KILLS = 100
# This kill of a client is part of every run of the tests.
FAST_KILLS = (59,)
SEED = 33
AGGREGATIONS = ("fedavg", "fedopt", "fedprox", "scaffold", "fednova", "mutual_kd")
DISTILLATIONS = ("feddf", "dsfl", "mhat", "fedmd", "fedid", "adafd", "feddrs", "fedaux")
SCENARIOS = [f"aggregation {name}" for name in AGGREGATIONS] + [f"distillation {name}" for name in DISTILLATIONS]
LAST_CHECKPOINT = Path("run", "checkpoint-3")


class Reference(NamedTuple):
    """
    An undisturbed run.

    Args:
        directory (`Path`): Directory of a run in one process.
        seconds (`float`): Duration of a run over a network.
    """

    directory: Path
    seconds: float


@pytest.fixture(scope="module")
def network() -> Iterator[Callable[..., dict[str, Any]]]:
    with worker("network_worker.py") as ask:
        yield lambda directory, scenario, **options: ask(
            {"directory": str(directory), "scenario": scenario, "num_parties": NUM_PARTIES, **options}
        )


@pytest.fixture(scope="module")
def reference(launch, network, tmp_path_factory) -> Callable[[str], Reference]:
    """Run a scenario in one process and over a network, and check that both runs are equal."""
    references: dict[str, Reference] = {}

    def run(scenario: str) -> Reference:
        if scenario not in references:
            local, remote = (tmp_path_factory.mktemp(name) for name in ("local", "network"))
            assert launch(local, scenario, 1, engine="local")["codes"] == [0]
            answer = network(remote, scenario)
            assert answer["codes"] == [0] * NUM_PARTIES, logs(remote)
            assert_same_run(local, remote)
            references[scenario] = Reference(local, answer["seconds"])
        return references[scenario]

    return run


def states_of_one_process(directory: Path) -> dict[str, bytes]:
    """The states of the clients in the last checkpoint, and other files of their folder, by path."""
    folder = clients_directory(directory / LAST_CHECKPOINT)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states_of_clients(directory: Path) -> dict[str, bytes]:
    """The same files of a run over a network, with the states that are on the disks of the clients."""
    states = {}
    for name, content in states_of_one_process(directory).items():
        if "/" in name:
            states[name] = content  # The file belongs to the server.
            continue
        note = json.loads(content)
        assert name == client_file_name(note["client"])
        folder = hashlib.sha256(note["state"].encode()).hexdigest()[:32]
        (found,) = directory.glob(f"client-*/client_states/*/{folder}")
        if (found / name).exists():  # The client of an algorithm without client states has no file.
            states[name] = (found / name).read_bytes()
    return states


def assert_same_run(local: Path, remote: Path) -> None:
    assert same_bits(weights(local), weights(remote)), logs(remote)
    expected, found = notes(local), notes(remote)
    assert found["ledger"] == expected["ledger"]
    # `Trainer` averages `train_loss` over the rounds since the resume.
    assert without_timings(found["log"], "train_loss") == without_timings(expected["log"], "train_loss")
    assert states_of_clients(remote) == states_of_one_process(local)


@pytest.mark.parametrize(
    "number",
    [number if number in FAST_KILLS else pytest.param(number, marks=pytest.mark.slow) for number in range(NUM_KILLS)],
)
def test_kill_at_a_random_time_does_not_change_a_byte(network, reference, tmp_path, number):
    choices = random.Random(f"{SEED} {number}")
    scenario = SCENARIOS[number % len(SCENARIOS)]
    expected = reference(scenario)
    party = choices.choice([0, 0, 0, *range(1, NUM_PARTIES)])
    answer: dict[str, Any] = {"is_killed": False}
    seconds = expected.seconds
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        after = choices.uniform(0, seconds)
        answer = network(directory, scenario, kill={"party": party, "after": after})
        if answer["is_killed"]:
            break
        seconds = min(seconds, answer["seconds"])  # The machine may have been busier before.
    assert answer["is_killed"], "every run ended before its kill"
    print(f"kill {number}: {scenario}, party {party} after {after:.2f} s: {answer['seconds']:.1f} s {answer['codes']}")
    returns_too_late = party > 0 and answer["codes"][party] != 0
    if returns_too_late:
        # The run ended while the client was away, so the client finds no server. Its state is complete.
        assert (directory / f"rank-{party}.log").read_text().count("joined the federation") <= 1
    codes = [code for number, code in enumerate(answer["codes"]) if not (returns_too_late and number == party)]
    assert codes == [0] * len(codes), logs(directory)
    assert_same_run(expected.directory, directory)
