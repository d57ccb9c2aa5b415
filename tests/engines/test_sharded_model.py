"""Clients that train a model which FSDP2 divides over two processes give the results of plain data parallelism.

The models have parameters whose rows are no multiple of two, parameters with an empty shard in the second process,
tied weights, and a frozen base with an adapter and `modules_to_save`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import Launch, last_error, logs, same_bits, weights
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForSequenceClassification
from workers import without_timings, worker

from hf_federated.aggregation.lora_inexactness import MAXIMUM, MEDIAN
from hf_federated.server.anomaly_report import load_anomalies
from hf_federated.trainer.checkpoint import read_server_state
from hf_federated.utils.errors import CheckpointError


Run = Callable[..., Path]
SGD = {"optim": "sgd", "learning_rate": 0.1}
SAVED = {"save_strategy": "steps"}
EVALUATED = {"args": {"eval_strategy": "steps"}, "federation": {"evaluate_clients": True}}
ADAM = {"aggregation_kwargs": {"server_optimizer": "adam", "server_lr": 0.01}}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"federation": {"aggregation_kwargs": {"proximal_weight": 1.0}}},
    "fedopt": {"federation": ADAM},
    "fednova": {"args": SGD},
    "scaffold": {"args": SGD},
    "fedexp": {"args": SGD},
    "fedper": {"federation": {"evaluate_clients": True}, "args": {"eval_strategy": "steps"}},
}
FEATURES: dict[str, dict[str, Any]] = {
    "carried optimizer": {"federation": {"client_optimizer_state": "carry"}},
    "client store on disk": {"federation": {"client_optimizer_state": "carry", "client_store": "disk"}},
    "exchange_dtype": {"federation": {"exchange_dtype": "bfloat16"}},
    "keep_local": {**EVALUATED, "federation": {"keep_local": "*classifier*", "evaluate_clients": True}},
    "evaluation": EVALUATED,
    "clipping": {"max_norm": 0.05},
    "bound": {"federation": {"max_update_ratio": 1.01}},
    "gradient clipping and accumulation": {"args": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}},
}


@pytest.fixture
def run(rank_worker, tmp_path) -> Run:
    """Call `run(name, model, sharded, ...)` to get the directory of a run of two processes."""

    def run_in(name: str, model: str, sharded: bool, codes: tuple[int, int] = (0, 0), **request: Any) -> Path:
        directory = tmp_path / name
        answer = rank_worker.ask({"directory": str(directory), "model": model, "sharded": sharded, **request})
        assert answer["codes"] == list(codes), logs(directory)
        return directory

    return run_in


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """The model that a run has saved, or its adapter."""
    (path,) = (directory / "model").glob("*model.safetensors")
    return load_file(path)


def states(directory: Path) -> dict[str, bytes]:
    """The states of server and clients in the last checkpoint."""
    folder = directory / "run" / "checkpoint-3" / "federated"
    # The manifest lists the digest of `trainer_state.json`, which contains timings.
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def notes(directory: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((directory / f"rank-{rank}.json").read_text(encoding="utf-8"))


def without_norms(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log without norms of gradients, and without the inexactness of LoRA, which needs whole factors."""
    return without_timings(log, "grad_norm", MEDIAN, MAXIMUM)


def sum_of_squares(state: dict[str, torch.Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in state.values())


def assert_equal_runs(plain: Path, sharded: Path) -> None:
    expected, found = saved(plain), saved(sharded)
    assert expected.keys() == found.keys()
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) <= 5e-7
    assert sum_of_squares(found) == pytest.approx(sum_of_squares(expected), rel=1e-7)
    for rank in range(2):
        assert notes(sharded, rank)["is_sharded"] and not notes(plain, rank)["is_sharded"]
        # A process counts the messages of a client as if it had the whole tensors.
        assert notes(sharded, rank)["ledger"] == notes(plain, rank)["ledger"]
    for entry, other in zip(without_norms(notes(plain)["log"]), without_norms(notes(sharded)["log"]), strict=True):
        assert other == pytest.approx(entry, rel=1e-5)


def compare(run: Run, model: str, request: dict[str, Any]) -> tuple[Path, Path]:
    plain, sharded = (run(name, model, name == "sharded", **request) for name in ("plain", "sharded"))
    assert_equal_runs(plain, sharded)
    return plain, sharded


def with_method(method: str) -> dict[str, Any]:
    request = METHODS[method]
    return {**request, "federation": {"aggregation": method, **request.get("federation", {})}}


# ---- The results of plain data parallelism


def test_clients_train_a_sharded_model_as_a_whole_one(run) -> None:
    compare(run, "full", {"federation": {"num_rounds": 1, "clients_per_round": 2}})


@pytest.mark.slow
@pytest.mark.parametrize("model", ["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_compute_value_by_value_give_equal_models(run, method, model) -> None:
    request = with_method(method)
    if model == "lora":
        # The norm for clipping is rounded in another order.
        request["args"] = {**request.get("args", {}), "max_grad_norm": 0.0}
    plain, sharded = compare(run, model, request)
    if model == "lora":
        assert sum_of_squares(saved(plain)) == sum_of_squares(saved(sharded))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_a_federation_give_equal_models(run, name) -> None:
    plain, sharded = compare(run, "full", FEATURES[name])
    metrics = [without_timings(list(notes(each)["client_metrics"].values())) for each in (plain, sharded)]
    for client, other in zip(*metrics, strict=True):
        assert other == pytest.approx(client, rel=1e-5)


@pytest.mark.slow
def test_optimizer_of_a_client_keeps_all_parameters_with_empty_shards(run) -> None:
    """All factors A of the second process are empty. The address of their values is 0 for each of them."""
    _, sharded = compare(run, "lora of rank 1", {"federation": {"client_optimizer_state": "carry"}})
    assert all(notes(sharded, rank)["trains_all"] for rank in range(2))


@pytest.mark.slow
def test_update_with_nan_in_the_shard_of_one_process_is_rejected_in_all_processes(run) -> None:
    request = {"federation": {"min_clients": 2, "num_rounds": 1}, "poisoned_client": "b"}
    plain, sharded = compare(run, "full", request)
    assert [notes(each)["log"][0]["federated/num_failed"] for each in (plain, sharded)] == [1, 1]


@pytest.mark.slow
def test_tied_weights_are_exchanged_and_saved_once(run) -> None:
    _, sharded = compare(run, "tied", {})
    assert "lm_head.weight" not in saved(sharded)


@pytest.mark.slow
def test_anomaly_report_has_the_norms_of_whole_updates(run) -> None:
    request = {"federation": {"report_anomalies": True, "num_rounds": 1}}
    plain, sharded = (run(name, "full", name == "sharded", **request) for name in ("plain", "sharded"))
    expected, found = (load_anomalies(str(each / "run"))[0] for each in (plain, sharded))
    assert found["global_norm"] == pytest.approx(expected["global_norm"], rel=1e-5)
    for client_id, values in expected["clients"].items():
        assert found["clients"][client_id]["norm"] == pytest.approx(values["norm"], rel=1e-5)
        # The sketch is random: its standard deviation is .044.
        assert found["clients"][client_id]["cosine"] == pytest.approx(values["cosine"], abs=0.2)


# ---- Memory


@pytest.mark.slow
def test_each_process_holds_half_of_all_values(run) -> None:
    request = {"federation": {"aggregation": "fedopt", **ADAM}}
    plain, sharded = (run(name, "large", name == "sharded", **request) for name in ("plain", "sharded"))
    for rank in range(2):
        whole, half = notes(plain, rank), notes(sharded, rank)
        assert half["sizes"]["values"] <= 0.51 * whole["total"]
        for name, size in whole["sizes"].items():
            assert 0 < half["sizes"][name] <= (1 if name == "values" else 0.6) * size, name
        total = sum(size for name, size in whole["sizes"].items() if name != "values")
        assert sum(size for name, size in half["sizes"].items() if name != "values") <= 0.6 * total


# ---- Files


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedopt", "scaffold"])
def test_resume_after_kill_gives_identical_shards(run, method) -> None:
    request = with_method(method)
    request["federation"] |= {"num_rounds": 3, "client_optimizer_state": "carry"}
    request["args"] = {**request.get("args", {}), **SAVED}
    expected = run("whole", "full", True, **request)
    killed = run("killed", "full", True, codes=(-9, -9), **request, kill_round=2)
    assert not (killed / "rank-0.json").exists()
    run("killed", "full", True, **request, resume=True)
    assert same_bits(saved(expected), saved(killed))
    files = states(expected)
    assert files == states(killed)
    # The states of the server and of each client, in both processes.
    assert len(files) == 2 * (1 + len("abc"))


@pytest.mark.slow
def test_saved_model_and_checkpoint_load_as_whole_models(run) -> None:
    directory = run("sharded", "full", True, args=SAVED)
    for folder in (directory / "model", directory / "run" / "checkpoint-2"):
        loaded = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
        assert same_bits(loaded, saved(directory))
    assert loaded.keys() == tiny_model(num_labels=3, type_vocab_size=1).state_dict().keys()


@pytest.mark.slow
def test_shards_of_another_number_of_processes_are_refused(run) -> None:
    directory = run("sharded", "full", True, args=SAVED)
    with pytest.raises(CheckpointError, match="has the states of 2 processes, but this launch needs those of 1"):
        read_server_state(directory / "run" / "checkpoint-2")
    run("sharded", "full", False, codes=(1, 1), args=SAVED, resume=True)
    assert "Resume with the number of processes and the FSDP setting" in last_error(directory, 0)


# ---- Clients on other machines


@pytest.fixture(scope="module")
def network() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call `network(directory, scenario, ...)` to get the exit codes of the server and of all processes of clients."""
    with worker("spread_client_worker.py") as ask:
        fields = {"num_parties": 3, "num_ranks": 2, "sharded": True}
        yield lambda directory, scenario, **options: ask(
            {"directory": str(directory), "scenario": scenario, **fields, **options}
        )


def finished_in_one_launch(launch: Launch, directory: Path, scenario: str, method: dict[str, Any]) -> Path:
    answer = launch(directory, scenario, 2, sharded=True, federation=method)
    assert answer["codes"] == [0, 0], logs(directory)
    return directory


JOINED = "two data clients"


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["fedavg", "scaffold"])
def test_clients_that_join_with_shards_give_the_bytes_of_one_launch(launch, network, tmp_path, aggregation) -> None:
    method = {"aggregation": aggregation, "aggregation_kwargs": {}}
    expected = finished_in_one_launch(launch, tmp_path / "launch", JOINED, method)
    found = tmp_path / "network"
    answer = network(found, JOINED, federation=method)
    assert answer["codes"] == [0] * 5, logs(found)
    assert same_bits(load_file(expected / "final" / "model.safetensors"), weights(found))
    assert notes(expected)["ledger"] == notes(found)["ledger"]
    # The second process of each client keeps its shards.
    assert len(list(found.glob("client-*/**/shard-1"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("before_reply", [False, True])
def test_client_with_shards_continues_after_one_of_its_processes_was_killed(
    launch, network, tmp_path, rank, before_reply
) -> None:
    method = {"aggregation": "scaffold", "aggregation_kwargs": {}}
    expected = finished_in_one_launch(launch, tmp_path / "launch", JOINED, method)
    found = tmp_path / "network"
    kill = {"party": 1, "rank": rank, "round": 1, "before_reply": before_reply}
    answer = network(found, JOINED, federation=method, kill=kill)
    assert answer["codes"] == [0] * 5, logs(found)
    assert same_bits(load_file(expected / "final" / "model.safetensors"), weights(found))


# ---- Refused launches


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"declares_gpus": False}, "FSDP in a launch of type MULTI_CPU does not work .*accelerate shards models on"),
        ({"model": "buffer"}, "'classifier.scale' is not sharded by FSDP2, .*Leave it out of the exchanged"),
        ({"federation": {"aggregation": "median"}}, "aggregation='median' does not work with FSDP: .*whole updates"),
    ],
)
def test_launches_that_would_not_work_are_refused(run, tmp_path, request_fields, words) -> None:
    run("refused", codes=(1, 1), **{"model": "full", "sharded": True, **request_fields})
    assert re.search(words, last_error(tmp_path / "refused", 0))
