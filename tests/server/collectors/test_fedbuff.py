"""FedBuff: asynchronous aggregation of a buffer of updates."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest
import torch
from federations import build_federation
from threaded_clients import honest, run_with_threads
from tiny import rows, same_weights

from hf_federated import FederatedCallback, FederatedDataset, FederatedTrainer
from hf_federated.engines import LocalEngine, RankEngine
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.server.collectors import BufferedCollector


CLIENTS = {f"client {number}": rows(4 + 4 * (number % 3), seed=number) for number in range(6)}


class RecordingEngine(LocalEngine):
    """Keeps all messages of training."""

    def __init__(self, serialize: bool = False) -> None:
        super().__init__(serialize)
        self.requests: list[Fit] = []
        self.updates: list[ClientUpdate] = []

    def _deliver(self, message):
        reply = super()._deliver(message)
        self.requests.append(message)
        self.updates.append(reply)
        return reply


class States(FederatedCallback):
    """Keeps the global state of each round, also after the last round."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []
        self.cohorts: list[tuple[str, ...]] = []
        self.accepted: list[list[str]] = []
        self.engine: Any = None
        self.num_open: list[int] = []

    def on_round_begin(self, args, state, control, round, **kwargs):
        self.states.append(round.state)
        self.cohorts.append(round.cohort)

    def on_round_end(self, args, state, control, round, **kwargs):
        self.accepted.append(sorted(round.metrics))
        if self.engine is not None:
            self.num_open.append(len(self.engine.open_requests))
        if round.number == state.max_steps - 1:
            self.states.append(round.state)


def train(directory: Any, collector: BufferedCollector, num_rounds: int = 4, **kwargs: Any) -> FederatedTrainer:
    """Train with four clients at a time."""
    resume = kwargs.pop("resume", None)
    trainer = build_federation(
        directory,
        CLIENTS,
        num_rounds=num_rounds,
        federation={"clients_per_round": 4, "collector": collector, **kwargs.pop("federation", {})},
        trainer=kwargs.pop("trainer", {}),
        save_strategy="steps",
        save_steps=1,
        **kwargs,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("serialize", [False, True])
def test_round_equals_the_formula_of_the_paper(tmp_path, serialize) -> None:
    engine, states = RecordingEngine(serialize), States()
    trainer = train(tmp_path, BufferedCollector(1), num_rounds=8, trainer={"engine": engine, "callbacks": [states]})
    assert [update.client_id for update in engine.updates] == trainer.collector.recorded_order
    staleness = []
    for number in range(8):
        current = {name: value.double() for name, value in states.states[number].items()}
        changes, total = {name: torch.zeros_like(value) for name, value in current.items()}, 0
        for update in engine.updates[number : number + 1]:
            staleness.append(number - update.round)
            sent = states.states[update.round]
            total += update.num_examples
            for name, value in update.state.items():
                scale = update.num_examples / math.sqrt(1 + number - update.round)
                changes[name] += scale * (value.double() - sent[name].double())
        for name, value in states.states[number + 1].items():
            torch.testing.assert_close(value.double(), current[name] + changes[name] / total, rtol=0, atol=1e-7)
    assert max(staleness) >= 2, "no update of the test is stale"


def test_clients_start_until_all_slots_train(tmp_path) -> None:
    engine, states = RecordingEngine(), States()
    states.engine = engine
    train(tmp_path, BufferedCollector(3), trainer={"engine": engine, "callbacks": [states]})
    assert states.num_open == [1] * 4  # four clients train, and three of them have replied
    assert not engine.open_requests
    assert {request.client_id for request in engine.requests} <= {name for cohort in states.cohorts for name in cohort}
    assert [len(accepted) for accepted in states.accepted] == [3] * 4


def test_buffer_of_the_whole_cohort_equals_the_synchronous_collector(tmp_path) -> None:
    buffered = train(tmp_path / "buffered", BufferedCollector(4))
    synchronous = train(tmp_path / "synchronous", "synchronous")
    assert same_weights(buffered.model, synchronous.model)
    assert buffered.ledger.to_dict() == synchronous.ledger.to_dict()


def test_run_equals_the_replay_of_its_recorded_order(tmp_path) -> None:
    first = train(tmp_path / "first", BufferedCollector(2))
    replayed = train(tmp_path / "replayed", BufferedCollector(2, order=first.collector.recorded_order))
    other = train(tmp_path / "other", BufferedCollector(2), seed=7)
    assert same_weights(first.model, replayed.model)
    assert first.collector.recorded_order != other.collector.recorded_order


@pytest.mark.parametrize("checkpoint", [1, 3])
def test_resume_with_open_requests_gives_identical_weights(tmp_path, checkpoint) -> None:
    options = {"client_optimizer_state": "carry"}
    whole = train(tmp_path / "whole", BufferedCollector(2), federation=options)
    resumed = train(
        tmp_path / "resumed",
        BufferedCollector(2),
        federation=options,
        resume=str(tmp_path / "whole" / f"checkpoint-{checkpoint}"),
    )
    assert same_weights(whole.model, resumed.model)
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()
    assert whole.collector.recorded_order == resumed.collector.recorded_order


def test_requests_beyond_the_largest_staleness_are_withdrawn(tmp_path) -> None:
    engine = RecordingEngine()
    trainer = train(tmp_path, BufferedCollector(2, max_staleness=1), num_rounds=6, trainer={"engine": engine})
    rounds = [number // 2 for number in range(len(engine.updates))]
    staleness = [number - update.round for number, update in zip(rounds, engine.updates, strict=True)]
    assert max(staleness) == 1
    assert len(trainer.collector.recorded_order) == 12
    saved = trainer.collector.state_dict()
    assert saved["finish"].keys() == saved["numbers"].keys()


def test_failing_client_frees_its_slot(tmp_path) -> None:
    class Failing(RecordingEngine):
        def _deliver(self, message):
            if message.client_id == "client 3":
                message = Fit(message.round, message.client_id, message.seed, {}, nonce=message.nonce)
                self.worker._train_datasets = {**CLIENTS, "client 3": None}
            return super()._deliver(message)

    states = States()
    trainer = train(tmp_path, BufferedCollector(2), trainer={"engine": Failing(), "callbacks": [states]})
    assert "client 3" in trainer.collector.recorded_order
    assert all("client 3" not in accepted and len(accepted) == 2 for accepted in states.accepted)


def test_ranks_are_refused_when_the_trainer_is_built(tmp_path) -> None:
    with pytest.raises(ValueError, match="'fedbuff' does not work with RankEngine: the requests stay open"):
        train(tmp_path, BufferedCollector(2), trainer={"engine": RankEngine()})


@pytest.mark.parametrize("federation", [{"aggregation": "local_only"}, {"distillation": "dsfl"}])
def test_methods_that_need_all_updates_are_refused(tmp_path, federation) -> None:
    trainer = {"public_dataset": rows(4, seed=9)} if "distillation" in federation else {}
    with pytest.raises(ValueError, match="needs all updates in their round. Set collector='synchronous'"):
        train(tmp_path, BufferedCollector(2), federation=federation, trainer=trainer)


def test_evaluation_of_clients_that_train_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="evaluate_clients=True does not work .* would ask clients that still train"):
        train(
            tmp_path,
            BufferedCollector(2),
            federation={"evaluate_clients": True},
            trainer={"eval_dataset": FederatedDataset.from_dict(CLIENTS)},
        )


@pytest.mark.parametrize(
    ("federation", "error"),
    [
        ({"round_deadline": 5.0}, "round_deadline=5.0 does not work with collector='fedbuff'"),
        ({"min_clients": 0.75}, "buffer_size=2 is below min_clients=3, so every round would fail"),
    ],
)
def test_settings_of_a_round_that_waits_for_its_cohort_are_refused(tmp_path, federation, error) -> None:
    with pytest.raises(ValueError, match=error):
        train(tmp_path, BufferedCollector(2), federation=federation)


def test_order_of_another_run_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"`order` names client \['west'\], which has no open request"):
        train(tmp_path, BufferedCollector(2, order=["west"]))


@pytest.mark.parametrize(("name", "value"), [("buffer_size", 0), ("max_staleness", -1)])
def test_arguments_out_of_range_raise_an_error(name, value) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is {value}"):
        BufferedCollector(**{name: value})


def slow_client(offset: float, seconds: float) -> Any:
    """A client on another machine that replies after some time with a state that differs by `offset`."""

    def reply(request: Any) -> Any:
        update = honest(request)
        time.sleep(seconds)
        return dataclasses.replace(update, state={name: value + offset for name, value in request.state.items()})

    return reply


def test_networked_run_equals_the_replay_of_its_recorded_order(tmp_path) -> None:
    """The replay has clients of other speeds, whose replies arrive in another order."""
    first, second = (
        {name: slow_client(0.01 * 2**number, seconds) for number, (name, seconds) in enumerate(speeds.items())}
        for speeds in ({"a": 0.0, "b": 0.3, "c": 0.6}, {"a": 0.6, "b": 0.3, "c": 0.0})
    )
    recorded, rejected = run_with_threads(tmp_path / "recorded", first, {}, collector=BufferedCollector(1))
    order = recorded.collector.recorded_order
    replayed, _ = run_with_threads(tmp_path / "replayed", second, {}, collector=BufferedCollector(1, order=order))
    assert rejected == [{}, {}] and len(order) == 2
    assert same_weights(recorded.model, replayed.model)
    free, _ = run_with_threads(tmp_path / "free", second, {}, collector=BufferedCollector(1))
    assert free.collector.recorded_order != order
