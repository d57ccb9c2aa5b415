"""A method's own kinds of messages travel on every engine that reads them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from federations import build_federation, settings_of
from launches import notes
from own_messages import OWN_KINDS, AskSum, Sum, SumWorker, ask_sum, sums_of
from tiny import arguments, rows, tiny_model

from hf_federated import FedAvg, FederatedConfig, FederatedTrainer
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import ClientEngine, EngineContext, LocalEngine, NetworkEngine, Plan
from hf_federated.messages import KINDS, Fit, Message, Metrics, Predict, kinds_of, message_from_tree, read_message
from hf_federated.trainer import join


# The values 0, 1, 2, 1 and 1, times the length of the client id.
SUMS = {"a": 5.0, "bb": 10.0, "ccc": 15.0}


@pytest.mark.parametrize("serialize", [False, True])
def test_own_messages_travel_on_the_local_engine(serialize):
    assert sums_of(LocalEngine(serialize)) == SUMS


def test_engine_that_does_not_know_a_kind_names_the_kinds_that_it_knows():
    with pytest.raises(ValueError, match=r"Unknown message kind 'ask_sum'; known kinds are \['client_failure'"):
        sums_of(LocalEngine(serialize=True), kinds=KINDS)


@pytest.mark.parametrize("parallelism", ["clients", "data"])
def test_own_messages_travel_between_the_processes_of_a_launch(finished, parallelism):
    directory = finished(f"own messages {parallelism}", 2)
    assert [notes(directory, rank) for rank in range(2)] == [SUMS, SUMS]


class SumClientEngine(ClientEngine):
    """The engine of a client that answers with sums."""

    def start(self, context: EngineContext) -> None:
        super().start(EngineContext(context.build_worker, context.costs, "data", context.processes, kinds=OWN_KINDS))
        self.worker = SumWorker(self.worker.models)


@pytest.mark.parametrize("server_knows", [True, False])
def test_own_messages_travel_over_the_network(tmp_path, monkeypatch, server_knows):
    monkeypatch.setattr(join, "ClientEngine", SumClientEngine)
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"north": rows(4)},
        federation=FederatedConfig(num_rounds=2),
    )
    engine = NetworkEngine(["north"], address="127.0.0.1:0", insecure=True, join_timeout=20)
    replies: list[Message] = []
    engine.transport.start(["north"], settings_of(trainer))

    def serve() -> None:
        engine._note(engine.transport.receive(20))
        kinds = OWN_KINDS if server_knows else KINDS
        engine.start(EngineContext(lambda: None, {}, "data", process_group(), kinds=kinds))
        for round in range(2):
            plan = Plan(round, ("north",), lambda client_id, round=round: ask_sum(client_id, round))
            replies.extend(engine.run(plan))
        engine.transport.stop()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    trainer.join(engine.transport.address, client_id="north", insecure=True, connect_timeout=10)
    server.join(timeout=20)
    if server_knows:
        assert [(reply.kind, reply.round, reply.value.item()) for reply in replies] == [("sum", 0, 25), ("sum", 1, 25)]
    else:
        assert all("its reply is damaged: Unknown message kind 'sum'" in reply.error for reply in replies)
        assert len(replies) == 2


class AskTwo(FedAvg):
    """Asks two of the three clients."""

    messages: ClassVar[tuple[type[Message], ...]] = (AskSum, Sum)

    def begin(self, round):
        self.replies = round.ask("sums", lambda name: ask_sum(name, round.number), clients=round.cohort[:2])


def test_failure_in_a_part_of_the_cohort_leaves_no_client_unasked(tmp_path):
    """The base class of client halves answers no message, so both clients fail."""
    trainer = build_federation(tmp_path, federation={"aggregation": AskTwo(), "min_clients": 2}, num_rounds=1)
    trainer.train()
    replies = trainer.aggregation.replies
    assert list(replies) == ["north", "south"]
    assert all("does not answer the message AskSum" in reply.error for reply in replies.values())


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (lambda asked, reply: Metrics(0, "a", 1, {}, nonce=reply.nonce), "it is a 'metrics', expected a 'sum'"),
        (lambda asked, reply: asked, "it is a 'ask_sum', expected a 'sum'"),
        (lambda asked, reply: replace(reply, nonce="0" * 32), "it does not contain the nonce of the request"),
        (lambda asked, reply: replace(reply, client_id="bb"), "it is in the name of client 'bb'"),
        (lambda asked, reply: replace(reply, round=1), "it belongs to round 2"),
        (lambda asked, reply: replace(reply, value=3.0), "`value` is a value of type float, expected a tensor"),
    ],
)
def test_wrong_reply_to_an_own_request_is_refused(hostile, reason):
    class Hostile(LocalEngine):
        def _deliver(self, message):
            reply = super()._deliver(message)
            return hostile(message, reply) if message.client_id == "a" else reply

    engine = Hostile()
    engine.start(EngineContext(SumWorker, {}, "data", process_group(), kinds=OWN_KINDS))
    refused, accepted = engine.collect(Plan(0, ("a", "bb"), ask_sum)).values()
    assert f"the server refused the reply: {reason}" in refused.error
    assert accepted.value.item() == SUMS["bb"]


# ---- Kinds


def test_kinds_contain_those_of_training_and_the_given_ones():
    kinds = kinds_of(AskSum, AskSum, Predict)
    assert kinds["ask_sum"] is AskSum and kinds["fit"] is Fit
    assert set(kinds) == {*kinds_of(), "ask_sum", "predict"}
    message = ask_sum("north")
    for read in (read_message(message.to_bytes(), kinds), message_from_tree(message.to_tree(), kinds)):
        assert read.to_bytes() == message.to_bytes()


@dataclass(frozen=True)
class OtherFit(Message):
    kind: ClassVar[str] = "fit"


@dataclass(frozen=True)
class WithoutKind(Message):
    pass


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (OtherFit, "OtherFit has the kind 'fit' of Fit. Set `kind` to another name"),
        (WithoutKind, "WithoutKind has no kind. Set `kind: ClassVar"),
        (dict, "<class 'dict'> is not a message. Pass a subclass of `Message`"),
        ("fit", "'fit' is not a message"),
    ],
)
def test_class_that_cannot_be_read_by_its_kind_is_refused(cls, error):
    with pytest.raises(ValueError, match=error):
        kinds_of(cls)
