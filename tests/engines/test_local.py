"""`LocalEngine`: clients and server share only messages, and the ledger counts the bytes of the messages."""

from __future__ import annotations

import re

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.adapters import Exchange
from hf_federated.clients import ClientStore, ClientWorker, MemoryStore, SharedModel
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, LocalEngine, Plan
from hf_federated.messages import ClientFailure, ClientUpdate, Evaluate, Fit, Message, Metrics


CLIENTS = {"a": rows(8), "b": rows(5, seed=1), "c": rows(4, seed=2)}


class RecordingEngine(LocalEngine):
    """Records the number of bytes of each message, per round and client."""

    def __init__(self) -> None:
        super().__init__()
        self.down: dict[tuple[int, str], int] = {}
        self.up: dict[tuple[int, str], int] = {}

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        self.down[message.round, message.client_id] = len(message.to_bytes())
        self.up[reply.round, reply.client_id] = len(reply.to_bytes())
        return reply


def federated(tmp_path, engine=None, **federation):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=CLIENTS,
        federation=FederatedConfig(num_rounds=2, clients_per_round=2, **federation),
        engine=engine,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("aggregation", "kwargs"),
    [("fedavg", {"weighting": "tokens"}), ("fedprox", {"proximal_weight": 1.0}), ("fedopt", None), ("scaffold", None)],
)
def test_serialized_messages_give_identical_results(tmp_path, aggregation, kwargs):
    federation = {"aggregation": aggregation, "aggregation_kwargs": kwargs, "client_optimizer_state": "carry"}
    objects = federated(tmp_path, **federation)
    through_bytes = federated(tmp_path, LocalEngine(serialize=True), **federation)
    assert same_weights(objects.model, through_bytes.model)
    assert not same_weights(objects.model, tiny_model())
    assert objects.ledger.to_dict() == through_bytes.ledger.to_dict()


@pytest.mark.parametrize("aggregation", ["fedavg", "scaffold"])
def test_ledger_counts_the_bytes_of_every_message(tmp_path, aggregation):
    counter = RecordingEngine()
    ledger = federated(tmp_path, counter, aggregation=aggregation).ledger
    assert len(counter.down) == len(counter.up) == 4
    for (round, client_id), down in counter.down.items():
        account = ledger.to_dict()["rounds"][str(round)][client_id]
        assert account == [down, counter.up[round, client_id]]
    assert (ledger.bytes_down, ledger.bytes_up) == (sum(counter.down.values()), sum(counter.up.values()))
    payload = sum(parameter.nbytes for parameter in tiny_model().parameters())
    assert all(down > (2 if aggregation == "scaffold" else 1) * payload for down in counter.down.values())


# ---- The engine without a round loop


def engine(tmp_path, serialize: bool = False, store: ClientStore | None = None) -> LocalEngine:
    trainer = FederatedTrainer(
        model=tiny_model(), args=arguments(tmp_path), train_dataset=CLIENTS, federation=FederatedConfig(num_rounds=2)
    )

    def build_worker() -> ClientWorker:
        return ClientWorker(
            models=SharedModel(trainer, Exchange(trainer.model), trainer.args, store or MemoryStore()),
            train_datasets=CLIENTS,
            eval_datasets={"a": rows(3, seed=9)},
            methods=[trainer.aggregation],
            config=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
        )

    local = LocalEngine(serialize=serialize)
    local.start(EngineContext(build_worker, dict.fromkeys(CLIENTS, 1.0), "data", process_group()))
    return local


def fit(client_id: str, round: int = 0, seed: int = 5) -> Fit:
    return Fit(round, client_id, seed, Exchange(tiny_model()).read())


def test_replies_are_identical_with_and_without_serialization(tmp_path):
    plan = Plan(0, ("c", "a"), fit)
    replies = [[reply.to_bytes() for reply in engine(tmp_path, serialize).run(plan)] for serialize in (False, True)]
    assert replies[0] == replies[1]


def test_replies_are_in_the_order_of_the_cohort(tmp_path):
    replies = list(engine(tmp_path).run(Plan(0, ("c", "a", "b"), fit)))
    assert [type(reply) for reply in replies] == [ClientUpdate] * 3
    assert [reply.client_id for reply in replies] == ["c", "a", "b"]
    assert [reply.num_examples for reply in replies] == [4, 8, 5]
    assert [reply.num_steps for reply in replies] == [1, 2, 2]


def test_reply_does_not_depend_on_the_order_of_clients(tmp_path):
    first = {reply.client_id: reply.to_bytes() for reply in engine(tmp_path).run(Plan(0, ("a", "c"), fit))}
    for reply in engine(tmp_path).run(Plan(0, ("c", "a"), fit)):
        assert reply.to_bytes() == first[reply.client_id]


def test_replies_do_not_share_memory(tmp_path):
    replies = list(engine(tmp_path).run(Plan(0, ("a", "b"), fit)))
    first, second = replies[0].state, replies[1].state
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])
    assert {value.data_ptr() for value in first.values()}.isdisjoint(value.data_ptr() for value in second.values())


def test_messages_are_built_when_they_are_sent(tmp_path):
    built: list[str] = []

    def message_for(client_id: str) -> Fit:
        built.append(client_id)
        return fit(client_id)

    replies = engine(tmp_path).run(Plan(0, ("a", "b", "c"), message_for))
    assert built == []
    next(replies)
    assert built == ["a"]
    next(replies)
    assert built == ["a", "b"]


def test_failed_client_is_reported_and_counted_and_does_not_affect_other_clients(tmp_path):
    local = engine(tmp_path)

    def message_for(client_id: str) -> Fit:
        message = fit(client_id)
        if client_id == "b":
            del message.state["classifier.bias"]
        return message

    sent: list[Message] = []
    deliver = local._deliver
    local._deliver = lambda message: sent.append(deliver(message)) or sent[-1]
    replies = list(local.run(Plan(0, ("a", "b", "c"), message_for)))
    assert [type(reply) for reply in replies] == [ClientUpdate, ClientFailure, ClientUpdate]
    assert replies[1].client_id == "b" and "KeyError" in replies[1].error and "classifier.bias" in replies[1].error
    # The client sent the class and the place of the error. This process adds the text.
    assert re.fullmatch(r"KeyError \(hf_federated/adapters/exchange\.py, line \d+\)", sent[1].error)
    assert local.ledger.to_dict()["rounds"]["0"]["b"][1] == len(sent[1].to_bytes())
    without_failure = list(engine(tmp_path).run(Plan(0, ("c",), fit)))
    assert replies[2].to_bytes() == without_failure[0].to_bytes()


def test_last_error_is_the_exception_of_a_failed_client(tmp_path):
    local = engine(tmp_path)
    for reply in local.run(Plan(0, ("nobody",), fit)):
        assert isinstance(reply, ClientFailure)
        assert isinstance(local.last_error, KeyError)
    list(local.run(Plan(0, ("a",), fit)))
    assert local.last_error is None


def test_clients_evaluate_on_their_own_examples(tmp_path):
    def message_for(client_id: str) -> Evaluate:
        return Evaluate(1, client_id, Exchange(tiny_model()).read())

    evaluated, failed = engine(tmp_path).run(Plan(1, ("a", "b"), message_for))
    assert isinstance(evaluated, Metrics) and evaluated.num_examples == 3
    data = rows(3, seed=9)
    model = tiny_model().eval()
    with torch.no_grad():
        loss = model(input_ids=torch.tensor(data["input_ids"]), labels=torch.tensor(data["labels"])).loss
    assert evaluated.metrics["eval_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert isinstance(failed, ClientFailure) and failed.client_id == "b"


def test_client_states_are_restored_from_a_checkpoint_and_cleared_by_a_reset(tmp_path):
    local = engine(tmp_path)
    list(local.run(Plan(0, ("a",), fit)))
    (tmp_path / "saved").mkdir()
    digests = local.save(tmp_path / "saved")
    resumed = engine(tmp_path)
    resumed.load(tmp_path / "saved", digests)

    def second_round(client_id: str) -> Fit:
        return fit(client_id, round=1)

    continued, restored = (next(iter(each.run(Plan(1, ("a",), second_round)))).to_bytes() for each in (local, resumed))
    assert continued == restored
    fresh = engine(tmp_path)
    resumed.load(tmp_path / "saved", digests)
    resumed.worker.models.clear()
    cleared, new = (next(iter(each.run(Plan(1, ("a",), second_round)))).to_bytes() for each in (resumed, fresh))
    assert cleared == new != continued
