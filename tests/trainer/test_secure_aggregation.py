"""Federations with secure aggregation in one process: results, lost clients, repeated sessions and limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from federations import build_federation
from tiny import rows

from hf_federated import ClientPart, FedAvg, FedNova, RoundFailedError
from hf_federated.clients.models import SharedModel
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientFailure, ClientUpdate, Message, RefusedRequestError
from hf_federated.messages.secure_aggregation import ConfirmSurvivors, SecureFit, ShareKeys, SubmitMasked
from hf_federated.secure_aggregation import SecAgg
from hf_federated.testing.engines import ReversedReplies


CLIENTS = {f"client {number}": rows(4 + 4 * number, seed=number) for number in range(4)}
SECURE: dict[str, Any] = {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 16}}


class LosingEngine(LocalEngine):
    """
    Loses replies of clients.

    Args:
        lost: The kind of request of each reply that is lost, with the round and the client.
        num_lost: Number of times that each of these replies is lost.
    """

    def __init__(self, *lost: tuple[type[Message], int, str], num_lost: int = 1) -> None:
        super().__init__(serialize=True)
        self.lost = dict.fromkeys(lost, num_lost)
        self.num_requests: dict[type[Message], int] = {}

    def _deliver(self, message: Message) -> Message:
        self.num_requests[type(message)] = self.num_requests.get(type(message), 0) + 1
        reply = super()._deliver(message)
        key = type(message), message.round, message.client_id
        if self.lost.get(key, 0) > 0:
            self.lost[key] -= 1
            return ClientFailure(message.round, message.client_id, "the reply is lost", nonce=message.nonce)
        return reply


def run(directory: Any, engine: LocalEngine | None = None, trainer: Any = None, **federation: Any) -> Any:
    federated = build_federation(
        directory,
        CLIENTS,
        federation={**SECURE, **federation},
        trainer={"engine": engine or LocalEngine(), **(trainer or {})},
    )
    federated.train()
    return federated


def differences(first: Any, second: Any) -> float:
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    return max(float((one.double() - two.double()).abs().max()) for one, two in pairs)


def logged(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("aggregation", ["fedavg", "fedopt", "scaffold", "fedexp"])
def test_result_is_that_of_plain_aggregation_up_to_rounding(tmp_path, aggregation):
    kwargs = {"aggregation": aggregation, "num_rounds": 1}
    plain = run(tmp_path / "plain", secure_aggregation=None, secure_aggregation_kwargs=None, **kwargs)
    secure = run(tmp_path / "secure", **kwargs)
    assert 0 < differences(plain, secure) < 1e-5
    for name in ("loss", "federated/num_clients"):
        assert logged(secure, name) == pytest.approx(logged(plain, name), abs=1e-6)


def test_fednova_normalizes_under_secure_aggregation(tmp_path):
    kwargs = {"aggregation": FedNova(), "num_rounds": 1}
    arguments = {"optim": "sgd", "learning_rate": 0.1}
    results = []
    for name, secure in (
        ("plain", {"secure_aggregation": None, "secure_aggregation_kwargs": None}),
        ("secure", SECURE),
    ):
        trainer = build_federation(tmp_path / name, CLIENTS, federation={**kwargs, **secure}, **arguments)
        trainer.train()
        results.append(trainer)
    assert 0 < differences(*results) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": False},
        pytest.param({"min_survivors": 2}, marks=pytest.mark.slow),
        pytest.param({"num_colluding": 1}, marks=pytest.mark.slow),
    ],
)
def test_masks_do_not_change_a_byte(tmp_path, changes):
    first = run(tmp_path / "first", client_optimizer_state="carry")
    kwargs = {"max_weight": 16, **changes}
    second = run(tmp_path / "second", client_optimizer_state="carry", secure_aggregation_kwargs=kwargs)
    assert differences(first, second) == 0


def test_updates_on_disk_give_the_same_bytes(tmp_path):
    first = run(tmp_path / "first", client_optimizer_state="carry")
    second = run(tmp_path / "second", client_optimizer_state="carry", client_store="disk")
    assert differences(first, second) == 0
    assert not list((tmp_path / "second" / "secure_updates").iterdir())


def test_instance_of_the_protocol_is_accepted(tmp_path):
    first = run(tmp_path / "first")
    second = run(tmp_path / "second", secure_aggregation=SecAgg(max_weight=16), secure_aggregation_kwargs=None)
    assert differences(first, second) == 0


def test_session_that_fails_is_repeated_without_training_again(tmp_path, monkeypatch):
    """Two of four signatures are lost, and three are needed."""
    expected = run(tmp_path / "expected", client_optimizer_state="carry")
    trained: list[str] = []
    engine = LosingEngine((ConfirmSurvivors, 1, "client 0"), (ConfirmSurvivors, 1, "client 1"))
    original = SharedModel.open

    def counted(self: SharedModel, client_id: str) -> Any:
        trained.append(client_id)
        return original(self, client_id)

    monkeypatch.setattr(SharedModel, "open", counted)
    trainer = run(tmp_path / "found", engine, client_optimizer_state="carry")
    assert differences(expected, trainer) == 0
    # A request of local training opens the model, also in the repeated session. No other request does.
    assert len(trained) == 4 * 3
    assert engine.num_requests[SecureFit] == 4 * 3


class RefusingEngine(LosingEngine):
    """Lets all clients refuse the survivors."""

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        if not isinstance(message, ConfirmSurvivors):
            return reply
        error = str(RefusedRequestError(message, "survivors", "is refused: a second sum", "one sum of a round"))
        return ClientFailure(message.round, message.client_id, error, nonce=message.nonce)


def test_refused_sum_is_not_asked_for_again(tmp_path):
    engine = RefusingEngine()
    with pytest.raises(RoundFailedError, match="0 of the clients .* signed .*'client 0': `survivors` .* a second sum"):
        run(tmp_path, engine)
    assert engine.num_requests[SecureFit] == 4


def test_lost_client_is_left_out_and_returns_to_its_earlier_state(tmp_path):
    """The run equals one in which the client was lost before it trained, also in the later round."""
    lost = run(
        tmp_path / "lost", LosingEngine((SubmitMasked, 0, "client 3")), client_optimizer_state="carry", num_rounds=3
    )
    never = run(
        tmp_path / "never", LosingEngine((SecureFit, 0, "client 3")), client_optimizer_state="carry", num_rounds=3
    )
    assert logged(lost, "federated/num_clients") == logged(never, "federated/num_clients") == [3, 4, 4]
    assert differences(lost, never) == 0


def test_round_fails_if_too_few_clients_are_left(tmp_path):
    engine = LosingEngine(*((ShareKeys, 0, f"client {number}") for number in (0, 1)), num_lost=3)
    with pytest.raises(RoundFailedError, match=r"2 clients have sent shares, but at least 3 are needed.* is lost"):
        run(tmp_path, engine)


def test_clients_that_fail_to_train_are_not_asked_again(tmp_path):
    engine = LosingEngine(*((SecureFit, 0, f"client {number}") for number in (0, 1)), num_lost=3)
    with pytest.raises(RoundFailedError, match=r"2 clients have advertised keys, but at least 3 are needed"):
        run(tmp_path, engine)
    assert engine.num_requests[SecureFit] == 4


class DivergingPart(ClientPart):
    """Sends values that are not finite, if it is one of the clients."""

    def send(self, update: ClientUpdate) -> ClientUpdate:
        if update.client_id != "client 2":
            return update
        return dataclasses.replace(update, state={name: value * torch.inf for name, value in update.state.items()})


class DivergingClient(FedAvg):
    client_part = DivergingPart


def test_client_that_diverges_fails_before_it_masks(tmp_path):
    trainer = run(tmp_path, aggregation=DivergingClient(), num_rounds=1)
    assert logged(trainer, "federated/num_clients") == [3]
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_weight_above_the_limit_counts_as_the_limit(tmp_path):
    kwargs = {"max_weight": 4}
    limited = run(tmp_path / "limited", secure_aggregation_kwargs=kwargs, num_rounds=1)
    uniform = run(
        tmp_path / "uniform",
        aggregation_kwargs={"weighting": "uniform"},
        secure_aggregation_kwargs=None,
        num_rounds=1,
    )
    assert differences(limited, uniform) < 1e-6


def test_missing_limit_of_the_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match="needs the largest weight of an update.* or set weighting='uniform'"):
        run(tmp_path, secure_aggregation_kwargs=None)


class Jump(LocalEngine):
    """Lets all clients send a large change in one round."""

    def _deliver(self, message: Message) -> Message:
        if isinstance(message, SecureFit):
            args = self.worker.models.open(message.client_id).args
            args.learning_rate = 100.0 if message.round == 1 else 1e-4
        return super()._deliver(message)


def test_change_that_is_much_larger_than_in_earlier_rounds_fails_the_round(tmp_path):
    kwargs = {"max_weight": 16, "clip": 1e6}
    with pytest.raises(RoundFailedError, match="the mean change of all clients is .*`max_update_ratio`=30"):
        run(tmp_path, Jump(), secure_aggregation_kwargs=kwargs, lr_schedule="round")


def test_clipped_values_are_counted_and_logged(tmp_path):
    kwargs = {"max_weight": 16, "clip": 1e-4}
    trainer = run(tmp_path, secure_aggregation_kwargs=kwargs, num_rounds=1)
    (number,) = logged(trainer, "federated/num_clipped")
    assert number > 0


def test_replies_in_another_order_give_the_same_bytes(tmp_path):
    assert differences(run(tmp_path / "first"), run(tmp_path / "second", ReversedReplies())) == 0


def test_arguments_without_a_protocol_are_refused(tmp_path):
    """The user may believe that updates are hidden."""
    with pytest.raises(ValueError, match="'max_weight': 16.* but `secure_aggregation` is None"):
        build_federation(tmp_path, CLIENTS, federation={**SECURE, "secure_aggregation": None})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"threshold": 9}, "threshold=9 is above the 4 clients"),
        ({"threshold": 3.5}, "`threshold` is 3.5; it must be at least 2 and an integer"),
        ({"min_survivors": 5}, "A round samples 4 clients, but min_survivors=5 .*Raise `clients_per_round`"),
        ({"clip": {"stat": 1.0}}, "`clip` has the means .*'stat'"),
        ({"max_weight": "many"}, "`max_weight` is 'many'; it must be positive"),
        ({"masks": "no"}, "`masks` is 'no'; it must be True or False"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_that_no_round_can_have_are_refused_before_training(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build_federation(
            tmp_path, CLIENTS, federation={**SECURE, "secure_aggregation_kwargs": {"max_weight": 16, **kwargs}}
        )
