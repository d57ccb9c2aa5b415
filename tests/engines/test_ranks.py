"""`RankEngine`: a federation gives the same results over one process and over several processes.

The scenarios here combine algorithms with features of a federation. `test_conformance.py` runs every algorithm.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from launches import logs, notes, same_bits, weights
from rank_worker import RUN_DIR
from workers import without_timings

from hf_federated import Ledger
from hf_federated.engines.ranks import assign
from hf_federated.reporting.run_view import read_run
from hf_federated.trainer.checkpoint import read_server_state


SCENARIOS = [
    "fedavg",
    "fedopt",
    "fedprox",
    "scaffold",
    "balanced",
    "carry",
    "streams",
    "buffers",
    "lora",
    "local buffers",
    "noise",
    "steps of the server",
    "masked",
    "fedid",
    "adafd",
    "adafd llm",
    "fedaux",
    "feddrs",
]

# Scenarios that always run over two and three processes. The conformance suite runs every algorithm over two
# processes, so the other scenarios are slow tests.
OVER_TWO = {"fedavg", "noise", "steps of the server", "carry", "lora", "local buffers", "fedid"}
OVER_THREE = {"fedavg"}
SLOW = [pytest.mark.slow]
RUNS = [pytest.param(name, 2, marks=[] if name in OVER_TWO else SLOW) for name in SCENARIOS]
RUNS += [pytest.param(name, 2, marks=SLOW) for name in ("fedid mpl_sampled", "fedid per_example")]
RUNS += [pytest.param(name, 3, marks=[] if name in OVER_THREE else SLOW) for name in SCENARIOS]
RESUMED = {
    ("carry", (2, 1)),
    ("masked", (2, 1)),
    ("fedid", (3, 2)),
}


# ---- Equal results over any number of processes


@pytest.mark.parametrize(("scenario", "world_size"), RUNS)
@pytest.mark.sampled(3)
def test_model_and_logs_are_identical_over_any_number_of_processes(finished, scenario: str, world_size: int) -> None:
    single, several = finished(scenario, 1), finished(scenario, world_size)
    expected = notes(single)
    for rank in range(world_size):
        assert same_bits(weights(single), weights(several, rank))
        actual = notes(several, rank)
        assert expected["cohorts"] == actual["cohorts"]
        assert expected["ledger"] == actual["ledger"]
        assert expected["total_flos"] == actual["total_flos"]
        assert without_timings(expected["log"]) == without_timings(actual["log"])
        for client_a, client_b in zip(
            expected["client_metrics"].items(), actual["client_metrics"].items(), strict=True
        ):
            assert client_a[0] == client_b[0] and without_timings([client_a[1]]) == without_timings([client_b[1]])
    assert shown(single) == shown(several)


def shown(directory: Path) -> list[tuple[Any, ...]]:
    """What a reader of the log of a run sees, without times."""
    run = read_run(directory / RUN_DIR)
    rounds = [(each.number, each.logs, each.num_done, each.bytes_down, each.bytes_up) for each in run.rounds]
    clients = [(name, each.state, each.loss, each.num_rounds, each.bytes_up) for name, each in run.clients.items()]
    assert run.state == "complete" and rounds
    return rounds + clients


@pytest.mark.slow
def test_clients_have_the_same_gradient_scalers_over_any_number_of_processes(finished) -> None:
    single, several = finished("float16", 1), finished("float16", 2)
    assert all(same_bits(weights(single), weights(several, rank)) for rank in range(2))
    assert state_files(single) == state_files(several)


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("fedid", 3),
        ("fedid mpl_sampled", 2),
        *(
            pytest.param(*run, marks=SLOW)
            for run in [("adafd", 2), ("fedid", 2), ("fedid per_example", 2), ("adafd", 3), ("fedmd", 3), ("mhat", 2)]
        ),
    ],
)
@pytest.mark.sampled(1)
def test_private_client_models_are_identical_over_any_number_of_processes(
    finished, scenario: str, world_size: int
) -> None:
    single, several = finished(scenario, 1), finished(scenario, world_size)
    expected = notes(single)["digests"]
    by_rank = [notes(several, rank)["digests"] for rank in range(world_size)]
    # All processes have the same server state, and exactly one process has the model of each client.
    assert [found["server"] for found in by_rank] == [expected["server"]] * world_size
    assert sorted(name for found in by_rank for name in found) == sorted([*expected, *["server"] * (world_size - 1)])
    assert all(expected.items() >= found.items() for found in by_rank)
    assert state_files(single) == state_files(several)


def state_files(directory: Path) -> dict[str, bytes]:
    """Read the files of the server state and the client states in the last checkpoint."""
    folder = directory / "run" / "checkpoint-3" / "federated"
    # The manifest lists the digest of `trainer_state.json`, which contains timings.
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
def test_checkpoint_contains_the_same_teachers_over_any_number_of_processes(finished) -> None:
    single, several = state_files(finished("feddrs", 1)), state_files(finished("feddrs", 3))
    assert len(single) > 2 and single == several


@pytest.mark.slow
def test_data_parallel_processes_have_the_same_client_models(finished) -> None:
    directory = finished("fedid data", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    assert notes(directory, 0)["digests"] == notes(directory, 1)["digests"]
    assert notes(directory, 0)["ledger"] == notes(directory, 1)["ledger"]
    # Each local step uses the batches of both processes.
    assert notes(directory)["digests"] != notes(finished("fedid", 1))["digests"]


def test_data_parallel_processes_draw_the_same_examples_of_a_client(finished) -> None:
    directory = finished("data balanced", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    assert notes(directory, 0)["ledger"] == notes(directory, 1)["ledger"]
    assert without_timings(notes(directory, 0)["log"]) == without_timings(notes(directory, 1)["log"])


def test_data_parallel_processes_keep_the_same_local_tensors(finished) -> None:
    directory = finished("two data clients with local heads", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    metrics, other = (notes(directory, rank)["client_metrics"].values() for rank in range(2))
    assert without_timings(list(metrics)) == without_timings(list(other))
    # The clients train and evaluate with heads that are not averaged.
    assert without_timings(list(metrics)) != without_timings(
        list(notes(finished("two data clients", 2))["client_metrics"].values())
    )


def test_trl_trainer_gives_identical_results_over_two_processes(finished) -> None:
    pytest.importorskip("trl")
    single, several = finished("sft", 1), finished("sft", 2)
    assert [notes(several, rank)["trained"] for rank in range(2)] == [
        [[round, client_id] for round in range(2)] for client_id in ("north", "south")
    ]
    assert all(same_bits(weights(single), weights(several, rank)) for rank in range(2))
    assert without_timings(notes(single)["log"]) == without_timings(notes(several, 1)["log"])


@pytest.mark.slow
def test_grpo_gives_identical_results_over_two_processes(finished) -> None:
    pytest.importorskip("trl")
    single, several = finished("grpo", 1), finished("grpo", 2)
    # Each process trains whole clients.
    assert {client_id for rank in range(2) for _, client_id in notes(several, rank)["trained"]} == {
        *("east", "north", "south")
    }
    assert all(same_bits(weights(single), weights(several, rank)) for rank in range(2))
    expected, actual = (
        [{**entry, "step_time": None} for entry in without_timings(notes(directory)["log"])]
        for directory in (single, several)
    )
    assert expected == actual and [entry["num_tokens"] for entry in expected if "num_tokens" in entry]


@pytest.mark.parametrize(
    "scenario",
    [
        "unseeded lora",
        pytest.param("local lora", marks=SLOW),
        *(pytest.param(f"unseeded {method}", marks=SLOW) for method in ("fedavg", "fedopt", "fedaux")),
    ],
)
def test_every_process_starts_from_the_model_of_the_main_process(finished, scenario: str) -> None:
    single, several = finished(scenario, 1), finished(scenario, 3)
    assert all(same_bits(weights(single), weights(several, rank)) for rank in range(3))
    assert without_timings(notes(single)["log"]) == without_timings(notes(several, 2)["log"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_client_trains_in_exactly_one_process(finished, world_size: int) -> None:
    directory = finished("fedavg", world_size)
    by_rank = [notes(directory, rank)["trained"] for rank in range(world_size)]
    assert all(by_rank)
    assert sorted(sum(by_rank, [])) == sorted(notes(finished("fedavg", 1))["trained"])


def test_processes_without_clients_are_supported(finished) -> None:
    single, several = finished("one client", 1), finished("one client", 3)
    assert [len(notes(several, rank)["trained"]) for rank in range(3)] == [3, 0, 0]
    # One client needs no averaging, so there are no rounding errors.
    assert all(same_bits(weights(single), weights(several, rank)) for rank in range(3))


def test_each_process_reduces_one_payload_per_round(finished) -> None:
    directory = finished("fedprox", 2)
    payload = sum(value.nbytes for value in weights(directory).values() if value.is_floating_point())
    # Sums are in float64.
    assert [notes(directory, rank)["bytes_reduced"] for rank in range(2)] == [3 * 2 * payload] * 2


def test_client_with_a_state_stays_in_its_process(finished) -> None:
    for scenario in ("carry", "scaffold"):
        directory = finished(scenario, 3)
        clients_by_rank = [{client_id for _, client_id in notes(directory, rank)["trained"]} for rank in range(3)]
        assert sum(map(len, clients_by_rank)) == len(set.union(*clients_by_rank)) == 5


@pytest.mark.parametrize(
    ("scenario", "before", "after"),
    [
        pytest.param(name, *world_sizes, marks=[] if (name, world_sizes) in RESUMED else SLOW)
        for name in ("carry", "scaffold", "lora", "masked", "fedid", "fedaux", "steps of the server")
        for world_sizes in ((2, 1), (1, 2), (3, 2))
    ],
)
def test_checkpoint_resumes_on_another_number_of_processes(
    launch, finished, tmp_path: Path, scenario: str, before: int, after: int
) -> None:
    # This is the state of a run that was stopped after its first round.
    shutil.copytree(finished(scenario, before) / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-1")
    answer = launch(tmp_path, scenario, after, resume=True)
    assert answer["codes"] == [0] * after, logs(tmp_path)
    uninterrupted = finished(scenario, 1)
    assert same_bits(weights(uninterrupted), weights(tmp_path))
    assert notes(uninterrupted)["ledger"] == notes(tmp_path)["ledger"]
    assert notes(uninterrupted)["total_flos"] == notes(tmp_path)["total_flos"]
    logged = [without_timings(notes(path)["log"], "train_loss") for path in (uninterrupted, tmp_path)]
    assert logged[0] == logged[1]


def test_checkpoints_contain_the_same_files_over_any_number_of_processes(finished) -> None:
    def files(directory: Path) -> list[str]:
        return sorted(str(path.relative_to(directory)) for path in (directory / "run").rglob("*") if path.is_file())

    for scenario in ("fedavg", "carry"):
        assert files(finished(scenario, 1)) == files(finished(scenario, 2)) == files(finished(scenario, 3))
    state = read_server_state(finished("fedavg", 2) / "run" / "checkpoint-3")
    assert Ledger.from_state_dict(state["ledger"]).to_dict() == notes(finished("fedavg", 2))["ledger"]


@pytest.mark.parametrize("dtype", ["", pytest.param(" float16", marks=SLOW)])
def test_data_parallel_training_of_one_client_equals_the_plain_trainer_of_the_same_launch(finished, dtype) -> None:
    plain, federated = finished(f"plain{dtype}", 2), finished(f"data{dtype}", 2)
    for rank in range(2):
        assert same_bits(weights(plain, rank), weights(federated, rank))
    assert notes(plain)["total_flos"] == notes(federated)["total_flos"]
    # Each step uses the batches of both processes.
    assert not same_bits(weights(plain), weights(finished(f"plain{dtype}", 1)))


def test_data_parallel_training_of_several_clients_is_identical_in_all_processes(finished) -> None:
    directory = finished("data many", 2)
    assert same_bits(weights(directory, 0), weights(directory, 1))
    assert notes(directory, 0)["ledger"] == notes(directory, 1)["ledger"]
    assert notes(directory, 0)["trained"] == notes(directory, 1)["trained"]
    # Each step uses the batches of both processes.
    assert not same_bits(weights(directory), weights(finished("data many", 1)))


def test_drop_last_is_refused_for_clients_with_less_than_a_batch_for_every_process(
    launch, finished, tmp_path: Path
) -> None:
    assert notes(finished("drop last", 1))["cohorts"] == [["enough", "small"]] * 3
    answer = launch(tmp_path, "drop last", 2)
    assert answer["codes"] == [1, 1]
    for rank in range(2):
        last = (tmp_path / f"rank-{rank}.log").read_text().splitlines()[-1]
        assert (
            "1 clients have fewer examples than a batch of 8 (4 in each of 2 processes), for example ['small']" in last
        )


# ---- Assignment of clients to ranks


def test_assignment_is_balanced_and_keeps_fixed_clients() -> None:
    costs = {str(i): float(cost) for i, cost in enumerate([7, 7, 6, 6, 5, 5, 4, 4, 4])}
    ranks = assign(costs, 3, {})
    loads = [sum(cost for client_id, cost in costs.items() if ranks[client_id] == rank) for rank in range(3)]
    assert list(ranks) == list(costs)
    # The optimum is 16. Longest processing time first stays within 4/3 of the optimum.
    assert max(loads) <= 4 / 3 * 16
    assert assign(costs, 3, {"0": 2, "8": 2})["0"] == 2
    assert assign({"a": 1.0}, 3, {}) == {"a": 0}
    assert assign({}, 2, {}) == {}
    equal = assign({f"{i:02}": 1.0 for i in range(32)}, 2, {})
    assert sum(equal.values()) == 16
