"""An engine that is given to a trainer, the deadline of a round, and the server's device."""

from __future__ import annotations

import time

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model
from transformers import TrainerCallback

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer, RoundFailedError
from hf_federated.adapters import Exchange
from hf_federated.engines import LocalEngine, RankEngine
from hf_federated.messages import ClientUpdate


CLIENTS = {"a": rows(4), "b": rows(4, seed=1), "c": rows(4, seed=2)}


def train(tmp_path, engine=None, client_callbacks=(), callbacks=(), **federation):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=CLIENTS,
        federation=FederatedConfig(**{"num_rounds": 1, **federation}),
        engine=engine,
        callbacks=list(callbacks),
        client_callbacks=client_callbacks,
    )
    trainer.train()
    return trainer


def test_a_given_engine_runs_the_clients(tmp_path):
    delivered: list[str] = []

    class Counting(LocalEngine):
        def _deliver(self, message):
            delivered.append(message.client_id)
            return super()._deliver(message)

    engine = Counting()
    trainer = train(tmp_path, engine)
    assert trainer.engine is engine and delivered == ["a", "b", "c"]


def test_one_process_gets_a_local_engine_by_default(tmp_path):
    assert type(train(tmp_path).engine) is LocalEngine


def test_an_engine_can_run_a_second_training(tmp_path):
    engine = LocalEngine()
    first = train(tmp_path / "first", engine)
    second = train(tmp_path / "second", engine)
    assert same_weights(first.model, second.model)
    assert second.ledger.to_dict() == engine.ledger.to_dict() and len(second.ledger.rounds()) == 1


def test_local_engine_is_refused_in_a_launch_of_several_processes():
    with pytest.raises(ValueError, match="runs in one process, but the launch has 2 processes"):
        LocalEngine().check_launch(2)
    RankEngine().check_launch(2)


class Sleep(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        time.sleep(0.3)


class Rejected(FederatedCallback):
    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def on_aggregate(self, args, state, control, round, **kwargs):
        self.reasons = dict(round.rejected)


@pytest.mark.parametrize(("min_clients", "accepted"), [(1, ["a"]), (2, ["a", "b"])])
def test_round_ends_at_its_deadline_once_min_clients_have_replied(tmp_path, min_clients, accepted):
    rejected = Rejected()
    trainer = train(
        tmp_path, client_callbacks=[Sleep()], callbacks=[rejected], round_deadline=0.2, min_clients=min_clients
    )
    late = [client_id for client_id in CLIENTS if client_id not in accepted]
    assert list(rejected.reasons) == late
    assert all(f"Client {name!r}, round 1: no reply within 0.2 seconds" in rejected.reasons[name] for name in late)
    log = next(entry for entry in trainer.state.log_history if "federated/num_clients" in entry)
    assert (log["federated/num_clients"], log["federated/num_failed"]) == (len(accepted), len(late))


def test_round_without_a_deadline_waits_for_all_clients(tmp_path):
    rejected = Rejected()
    train(tmp_path, client_callbacks=[Sleep()], callbacks=[rejected])
    assert rejected.reasons == {}


def test_round_fails_if_all_clients_fail_after_its_deadline(tmp_path):
    class FailsAfterSleep(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            time.sleep(0.1)
            raise RuntimeError("out of memory")

    with pytest.raises(RoundFailedError, match="3 of 3 clients failed. .*min_clients=1.*out of mem"):
        train(tmp_path, client_callbacks=[FailsAfterSleep()], round_deadline=0.05)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_deadline_must_be_positive(value):
    with pytest.raises(ValueError, match="`round_deadline` is"):
        FederatedConfig(round_deadline=value)


# ---- Device of the server's state


def test_server_on_the_cpu_trains_the_same_model(tmp_path):
    on_model = train(tmp_path / "model", aggregation="fedopt", num_rounds=2)
    devices = []

    class Recorder(FederatedCallback):
        def on_aggregate(self, args, state, control, round, **kwargs):
            devices.append({value.device for value in round.state.values()})

    on_cpu = train(tmp_path / "cpu", callbacks=[Recorder()], aggregation="fedopt", num_rounds=2, server_device="cpu")
    assert same_weights(on_model.model, on_cpu.model)
    assert devices == [{torch.device("cpu")}] * 2


def test_state_of_the_server_and_updates_move_to_server_device():
    """`meta` represents a device that this machine may not have."""
    meta = torch.device("meta")
    state = Exchange(tiny_model()).read(meta)
    assert {value.device for value in state.values()} == {meta}
    update = ClientUpdate(0, "a", {"w": torch.ones(2)}, 1, 0, 1, extra={"e": torch.ones(1)}).to(meta)
    assert update.state["w"].device == update.extra["e"].device == meta


def test_unknown_server_device_is_refused():
    with pytest.raises(ValueError, match="server_device"):
        FederatedConfig(server_device="cuda:7")
