"""Requests that stay open until they are answered or withdrawn, without a plan and beyond a round."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from hf_federated.distributed.process_group import process_group
from hf_federated.engines import ClientEngine, EngineContext, LocalEngine, NetworkEngine, Plan, RankEngine
from hf_federated.messages import ClientFailure, Evaluate, Message, Metrics


class AnsweringEngine(LocalEngine):
    """Runs clients that reply without training, and records which clients have run."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = SimpleNamespace(last_error=None)
        self.ran: list[str] = []

    def _deliver(self, message: Message) -> Message:
        self.ran.append(message.client_id)
        return Metrics(message.round, message.client_id, 3, {"eval_loss": 0.5}, nonce=message.nonce)


def question(round: int):
    return lambda client_id: Evaluate(round, client_id, {})


def opened(*client_ids: str) -> AnsweringEngine:
    """Return an engine with open requests of round 0."""
    engine = AnsweringEngine()
    for client_id in client_ids:
        engine.send(client_id, question(0))
    return engine


def test_request_stays_open_beyond_a_round():
    engine = opened("a", "b")
    assert next(engine.replies()).client_id == "a"
    (evaluated,) = engine.run(Plan(1, ("a",), question(1)))
    assert (evaluated.client_id, evaluated.round) == ("a", 1)
    assert engine.open_requests == ("b",)
    (late,) = engine.replies()
    assert (late.client_id, late.round) == ("b", 0) and engine.open_requests == ()


def test_bytes_are_booked_under_the_round_of_the_request():
    engine = opened("a", "b")
    next(engine.replies())
    list(engine.run(Plan(1, ("a",), question(1))))
    list(engine.replies())
    rounds = engine.ledger.to_dict()["rounds"]
    assert {round: list(clients) for round, clients in rounds.items()} == {"0": ["a", "b"], "1": ["a"]}
    assert rounds["0"]["a"] == rounds["0"]["b"] and all(count > 0 for count in rounds["0"]["b"])


def test_caller_chooses_the_order_of_clients():
    engine = AnsweringEngine()
    built: list[str] = []

    def message_for(client_id: str) -> Evaluate:
        built.append(client_id)
        return Evaluate(0, client_id, {})

    sent: list[str] = []
    for client_id in "abc":
        engine.send(client_id, message_for, sent.append)
    assert engine.open_requests == ("a", "b", "c") and built == sent == []
    assert [reply.client_id for reply in engine.replies(clients=["c"])] == ["c"]
    assert built == sent == engine.ran == ["c"] and engine.open_requests == ("a", "b")
    assert [reply.client_id for reply in engine.replies(clients=["b", "a"])] == ["a", "b"]
    assert built == sent == ["c", "a", "b"]


def test_caller_that_stops_early_leaves_the_other_requests_open():
    engine = opened("a", "b", "c")
    for reply in engine.replies():
        if reply.client_id == "b":
            break
    assert engine.open_requests == ("c",) and engine.ran == ["a", "b"]


def test_requests_that_are_opened_while_the_caller_waits_are_answered():
    engine, rounds = opened("a", "b"), itertools.count(1)
    replies = []
    for reply in engine.replies():
        replies.append((reply.client_id, reply.round))
        if len(replies) < 4:
            engine.send(reply.client_id, question(next(rounds)))
    assert replies == [("a", 0), ("b", 0), ("a", 1), ("b", 2), ("a", 3)]


def test_withdrawn_client_does_not_run():
    engine = opened("a", "b")
    engine.withdraw("a")
    engine.withdraw("a")
    assert [reply.client_id for reply in engine.replies()] == ["b"]
    assert engine.ran == ["b"] and list(engine.ledger.to_dict()["rounds"]["0"]) == ["b"]


def test_second_request_to_a_client_is_refused():
    engine = opened("a")
    with pytest.raises(ValueError, match=r"Client 'a' has an open request. Wait .* `replies\(\)`, .* `withdraw\(\)`"):
        engine.send("a", question(1))
    engine.withdraw("a")
    engine.send("a", question(1))
    assert [reply.round for reply in engine.replies()] == [1]


def test_plan_refuses_a_client_with_an_open_request_and_leaves_the_request_open():
    engine = opened("b")
    with pytest.raises(ValueError, match="Client 'b' has an open request"):
        list(engine.run(Plan(1, ("a", "b", "c"), question(1))))
    assert engine.open_requests == ("b",) and engine.ran == []
    assert [reply.round for reply in engine.replies()] == [0]


def test_closed_plan_leaves_requests_without_a_plan_open():
    engine = opened("a")
    replies = engine.run(Plan(1, ("b", "c"), question(1)))
    assert next(replies).client_id == "b"
    assert engine.open_requests == ("a", "c")
    replies.close()
    assert engine.open_requests == ("a",) and engine.ran == ["b"]


def test_second_reply_to_a_request_is_ignored(caplog):
    class Repeating(AnsweringEngine):
        """Client a replies twice."""

        def _receive(self, clients, until):
            if self.ran == ["a"]:
                self.ran.append("a")
                return "a", self.first
            client_id, self.first = super()._receive(clients, until)
            return client_id, self.first

    engine = Repeating()
    for client_id in ("a", "b"):
        engine.send(client_id, question(4), round=4)
    assert [reply.client_id for reply in engine.replies()] == ["a", "b"]
    assert "Ignored a reply of client 'a', round 5: it has already replied." in caplog.messages


def test_reply_of_a_client_whose_turn_has_not_come_is_ignored(caplog):
    class Early(AnsweringEngine):
        """Client b replies before it is asked."""

        def _receive(self, clients, until):
            if not self.ran:
                self.ran.append("early")
                return "b", Metrics(0, "b", 3, {"eval_loss": 0.0})
            return super()._receive(clients, until)

    engine = Early()
    for client_id in ("a", "b"):
        engine.send(client_id, question(0))
    assert [reply.metrics["eval_loss"] for reply in engine.replies()] == [0.5, 0.5]
    assert "Ignored a reply of client 'b', round 1: it was not asked." in caplog.messages


def test_new_run_has_no_open_requests():
    class Worker(SimpleNamespace):
        models: dict[str, object] = {}

    engine = opened("a", "b")
    engine.start(EngineContext(lambda: Worker(last_error=None), {}, "data", process_group()))
    assert engine.open_requests == () and list(engine.replies()) == []


@pytest.mark.parametrize("with_plan", [True, False])
@pytest.mark.parametrize(
    ("deadline", "min_replies", "num_replies", "is_over"),
    [(None, 0, 5, False), (1e9, 0, 5, False), (1e-9, 0, 0, True), (1e-9, 3, 2, False), (1e-9, 3, 3, True)],
)
def test_plan_ends_at_its_deadline_once_min_replies_have_arrived(
    deadline, min_replies, num_replies, is_over, with_plan
):
    cohort = tuple("abcdef"[: num_replies + 1])
    if with_plan:
        replies = AnsweringEngine().run(Plan(0, cohort, question(0), deadline=deadline, min_replies=min_replies))
    else:
        replies = opened(*cohort).replies(deadline, min_replies)
    assert all(isinstance(reply, Metrics) for reply in itertools.islice(replies, num_replies))
    further = next(replies, None)
    assert (further is None or isinstance(further, ClientFailure)) is is_over


def test_engines_state_whether_requests_may_stay_open():
    engines = (LocalEngine, NetworkEngine, RankEngine, ClientEngine)
    assert [engine.holds_requests for engine in engines] == [True, True, False, False]


def test_client_of_a_federation_sends_no_requests():
    with pytest.raises(RuntimeError, match="Only the server runs the rounds"):
        list(ClientEngine().run(Plan(0, ("a",), question(0))))
