"""`RankEngine`: the same federation over one process and over several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launches import logs, notes, same_bits, weights
from workers import without_timings

from hf_federated.engines.ranks import assign
from hf_federated.trainer.checkpoint import read_server_state


SCENARIOS = [
    "fedavg",
    "fedopt",
    "fedprox",
    "scaffold",
    "balanced",
    "carry",
    "buffers",
    "lora",
    "noise",
    "masked",
    "fedid",
    "adafd",
    "adafd llm",
    "fedaux",
    "feddrs",
]

# Those that run over three processes, too, in every run of the tests; the others do among the slow ones.
OVER_THREE = {"fedavg", "fedid"}
SLOW = [pytest.mark.slow]
RUNS = [(name, 2) for name in SCENARIOS]
OTHER_METHODS = ["cronus", "dsfl", "feddf", "feded", "fedkd", "fedmd", "mhat", "mutual_kd"]
RUNS += [pytest.param(name, 2, marks=[] if name in ("dsfl", "mutual_kd") else SLOW) for name in OTHER_METHODS]
RUNS += [("fedid mpl_sampled", 2), pytest.param("fedid per_example", 2, marks=SLOW)]
RUNS += [pytest.param(name, 3, marks=[] if name in OVER_THREE else SLOW) for name in SCENARIOS]
RESUMED = {("carry", (2, 1)), ("scaffold", (1, 2)), ("lora", (1, 2)), ("masked", (2, 1)), ("fedid", (3, 2))}
RESUMED |= {("fedaux", (2, 1))}


# ---- The same results over any number of processes


@pytest.mark.parametrize(("scenario", "world_size"), RUNS)
def test_clients_over_processes_train_the_same_model(finished, scenario: str, world_size: int) -> None:
    alone, together = finished(scenario, 1), finished(scenario, world_size)
    a = notes(alone)
    for rank in range(world_size):
        assert same_bits(weights(alone), weights(together, rank))
        b = notes(together, rank)
        assert a["cohorts"] == b["cohorts"]
        assert a["ledger"] == b["ledger"]
        assert a["total_flos"] == b["total_flos"]
        assert without_timings(a["log"]) == without_timings(b["log"])
        for notes_a, notes_b in zip(a["client_metrics"].items(), b["client_metrics"].items(), strict=True):
            assert notes_a[0] == notes_b[0] and without_timings([notes_a[1]]) == without_timings([notes_b[1]])


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("fedid", 3),
        ("fedid mpl_sampled", 2),
        ("adafd", 2),
        *(
            pytest.param(*run, marks=SLOW)
            for run in [("fedid", 2), ("fedid per_example", 2), ("adafd", 3), ("fedmd", 3), ("mhat", 2)]
        ),
    ],
)
def test_clients_own_models_over_processes_are_the_same(finished, scenario: str, world_size: int) -> None:
    alone, together = finished(scenario, 1), finished(scenario, world_size)
    expected = notes(alone)["digests"]
    by_rank = [notes(together, rank)["digests"] for rank in range(world_size)]
    # The server's optimizer is the same in all of them, and each client's model is in one.
    assert [found["server"] for found in by_rank] == [expected["server"]] * world_size
    assert sorted(name for found in by_rank for name in found) == sorted([*expected, *["server"] * (world_size - 1)])
    assert all(expected.items() >= found.items() for found in by_rank)
    assert kept_files(alone) == kept_files(together)


def kept_files(directory: Path) -> dict[str, bytes]:
    """What server and clients keep, in the last checkpoint."""
    kept = directory / "run" / "checkpoint-3" / "federated"
    return {path.name: path.read_bytes() for path in kept.rglob("*") if path.is_file()}


def test_what_clients_sent_last_lies_in_the_checkpoint_of_any_number_of_processes(finished) -> None:
    alone, together = kept_files(finished("feddrs", 1)), kept_files(finished("feddrs", 3))
    assert len(alone) > 2 and alone == together


def test_data_parallel_clients_have_the_same_models_in_all_processes(finished) -> None:
    directory = finished("fedid data", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    assert notes(directory, 0)["digests"] == notes(directory, 1)["digests"]
    assert notes(directory, 0)["ledger"] == notes(directory, 1)["ledger"]
    # Each step of local training saw the batches of both.
    assert notes(directory)["digests"] != notes(finished("fedid", 1))["digests"]


def test_data_parallel_processes_draw_the_same_rows_of_a_client(finished) -> None:
    directory = finished("data balanced", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    assert notes(directory, 0)["ledger"] == notes(directory, 1)["ledger"]
    assert without_timings(notes(directory, 0)["log"]) == without_timings(notes(directory, 1)["log"])


def test_a_trainer_that_prepares_its_rows_over_processes(finished) -> None:
    pytest.importorskip("trl")
    alone, together = finished("sft", 1), finished("sft", 2)
    assert [notes(together, rank)["trained"] for rank in range(2)] == [
        [[round, client_id] for round in range(2)] for client_id in ("north", "south")
    ]
    assert all(same_bits(weights(alone), weights(together, rank)) for rank in range(2))
    assert without_timings(notes(alone)["log"]) == without_timings(notes(together, 1)["log"])


@pytest.mark.parametrize(
    "scenario",
    [
        "unseeded fedavg",
        "unseeded lora",
        *(pytest.param(f"unseeded {own}", marks=SLOW) for own in ("fedopt", "fedaux")),
    ],
)
def test_every_process_starts_from_the_whole_model_of_the_main_process(finished, scenario: str) -> None:
    alone, together = finished(scenario, 1), finished(scenario, 3)
    assert all(same_bits(weights(alone), weights(together, rank)) for rank in range(3))
    assert without_timings(notes(alone)["log"]) == without_timings(notes(together, 2)["log"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_client_trains_in_one_process(finished, world_size: int) -> None:
    directory = finished("fedavg", world_size)
    by_rank = [notes(directory, rank)["trained"] for rank in range(world_size)]
    assert all(by_rank)
    assert sorted(sum(by_rank, [])) == sorted(notes(finished("fedavg", 1))["trained"])


def test_a_process_without_a_client_is_fine(finished) -> None:
    alone, together = finished("one client", 1), finished("one client", 3)
    assert [len(notes(together, rank)["trained"]) for rank in range(3)] == [3, 0, 0]
    # Nothing was averaged, so nothing was rounded.
    assert all(same_bits(weights(alone), weights(together, rank)) for rank in range(3))


def test_one_payload_a_process_and_round(finished) -> None:
    directory = finished("fedprox", 2)
    payload = sum(value.nbytes for value in weights(directory).values() if value.is_floating_point())
    # Sums are in float64.
    assert [notes(directory, rank)["bytes_reduced"] for rank in range(2)] == [3 * 2 * payload] * 2


def test_a_client_stays_where_its_state_is(finished) -> None:
    for scenario in ("carry", "scaffold"):
        directory = finished(scenario, 3)
        homes = [{client_id for _, client_id in notes(directory, rank)["trained"]} for rank in range(3)]
        assert sum(map(len, homes)) == len(set.union(*homes)) == 5


@pytest.mark.parametrize(
    ("scenario", "before", "after"),
    [
        pytest.param(name, *ways, marks=[] if (name, ways) in RESUMED else SLOW)
        for name in ("carry", "scaffold", "lora", "masked", "fedid", "fedaux")
        for ways in ((2, 1), (1, 2), (3, 2))
    ],
)
def test_a_checkpoint_resumes_on_another_number_of_processes(
    launch, finished, tmp_path: Path, scenario: str, before: int, after: int
) -> None:
    # As if the run had been stopped after its first round.
    shutil.copytree(finished(scenario, before) / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-1")
    answer = launch(tmp_path, scenario, after, resume=True)
    assert answer["codes"] == [0] * after, logs(tmp_path)
    never_stopped = finished(scenario, 1)
    assert same_bits(weights(never_stopped), weights(tmp_path))
    assert notes(never_stopped)["ledger"] == notes(tmp_path)["ledger"]
    assert notes(never_stopped)["total_flos"] == notes(tmp_path)["total_flos"]
    logs_of_both = [without_timings(notes(path)["log"], "train_loss") for path in (never_stopped, tmp_path)]
    assert logs_of_both[0] == logs_of_both[1]


def test_checkpoints_hold_the_same_files_on_any_number_of_processes(finished) -> None:
    def files(directory: Path) -> list[str]:
        return sorted(str(path.relative_to(directory)) for path in (directory / "run").rglob("*") if path.is_file())

    for scenario in ("fedavg", "carry"):
        assert files(finished(scenario, 1)) == files(finished(scenario, 2)) == files(finished(scenario, 3))
    state = read_server_state(finished("fedavg", 2) / "run" / "checkpoint-3")
    assert state["ledger"] == notes(finished("fedavg", 2))["ledger"]


def test_data_parallel_training_of_one_client_is_the_plain_trainer_under_the_same_launch(finished) -> None:
    plain, federated = finished("plain", 2), finished("data", 2)
    for rank in range(2):
        assert same_bits(weights(plain, rank), weights(federated, rank))
    assert notes(plain)["total_flos"] == notes(federated)["total_flos"]
    # Each step saw the batches of both.
    assert not same_bits(weights(plain), weights(finished("plain", 1)))


def test_data_parallel_training_of_many_clients(finished) -> None:
    directory = finished("data many", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    assert notes(directory, 0)["ledger"] == notes(directory, 1)["ledger"]
    assert notes(directory, 0)["trained"] == notes(directory, 1)["trained"]
    # Each step saw the batches of both.
    assert not same_bits(weights(directory), weights(finished("data many", 1)))


def test_clients_with_less_than_a_batch_for_every_process_are_refused(launch, finished, tmp_path: Path) -> None:
    assert notes(finished("drop last", 1))["cohorts"] == [["enough", "small"]] * 3
    answer = launch(tmp_path, "drop last", 2)
    assert answer["codes"] == [1, 1]
    for rank in range(2):
        last = (tmp_path / f"rank-{rank}.log").read_text().splitlines()[-1]
        assert (
            "1 clients have fewer examples than a batch of 8 (4 in each of 2 processes), for example ['small']" in last
        )


# ---- Who trains whom


def test_assignment_is_balanced_and_keeps_clients_at_home() -> None:
    costs = {str(i): float(cost) for i, cost in enumerate([7, 7, 6, 6, 5, 5, 4, 4, 4])}
    ranks = assign(costs, 3, {})
    loads = [sum(cost for client_id, cost in costs.items() if ranks[client_id] == rank) for rank in range(3)]
    assert list(ranks) == list(costs)
    # The best there is has 16; longest first is never above 4/3 of it.
    assert max(loads) <= 4 / 3 * 16
    assert assign(costs, 3, {"0": 2, "8": 2})["0"] == 2
    assert assign({"a": 1.0}, 3, {}) == {"a": 0}
    assert assign({}, 2, {}) == {}
    equal = assign({f"{i:02}": 1.0 for i in range(32)}, 2, {})
    assert sum(equal.values()) == 16
