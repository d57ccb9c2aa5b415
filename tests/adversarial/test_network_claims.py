"""A client on another machine that claims more than it announced is named, and the run goes on without its claim."""

from __future__ import annotations

import dataclasses

import pytest
from threaded_clients import ANNOUNCED, changed, honest, run_with_threads
from tiny import same_weights

from hf_federated import FederatedTrainer
from hf_federated.messages import Message, Metrics


HONEST, HOSTILE = "north", "south"
FEDDRS = {"distillation": "feddrs", "distillation_kwargs": {"num_samples": 2, "sample_length": 3, "num_steps": 1}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> FederatedTrainer:
    """A run with the honest client only."""
    return run_with_threads(tmp_path_factory.mktemp("alone"), {HONEST: honest}, {})[0]


STREAM = dataclasses.replace(ANNOUNCED, num_examples=None, num_encoded_examples=None, class_counts=None)
CLAIMS = {
    "examples": (changed(num_examples=9), ANNOUNCED, "the update claims 9 examples, but the client has at most 8"),
    "steps": (changed(num_steps=9), ANNOUNCED, "the update claims 9 steps, but the client has at most 8"),
    "tokens": (changed(num_tokens=2**40), ANNOUNCED, "tokens, but the client has at most"),
    "an endless stream": (changed(num_examples=2**50), STREAM, "it announced a stream, whose epoch has no length"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_above_the_announcement_is_refused_and_the_run_goes_on(tmp_path, alone, claim):
    reply, announced, expected = CLAIMS[claim]
    trainer, rejected = run_with_threads(tmp_path, {HONEST: honest, HOSTILE: reply}, {HOSTILE: announced})
    assert [list(reasons) for reasons in rejected] == [[HOSTILE], [HOSTILE]]
    assert all(expected in reasons[HOSTILE] for reasons in rejected)
    assert same_weights(trainer.model, alone.model)


LARGE = dataclasses.replace(ANNOUNCED, num_examples=64, num_encoded_examples=64)
ROUNDS = {
    "limit of a round": (6, LARGE, {"max_rows_per_round": 6}, 6),
    "balance": (8, LARGE, {"balance": "min"}, 8),
    "steps of a stream": (8, STREAM, {"local_steps": 2}, 2 * 2 * ANNOUNCED.examples_per_step),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_claim_above_the_examples_of_a_round_is_refused_and_the_run_goes_on(tmp_path, alone, case):
    num_examples, announced, federation, limit = ROUNDS[case]
    for claimed in (limit, limit + 1):
        replies = {HONEST: changed(num_examples=num_examples), HOSTILE: changed(num_examples=claimed, num_steps=2)}
        trainer, rejected = run_with_threads(tmp_path / str(claimed), replies, {HOSTILE: announced}, **federation)
        if claimed == limit:
            assert rejected == [{}, {}]
        else:
            text = f"the update claims {claimed} examples, but the client has at most {limit}"
            assert all(text in reasons[HOSTILE] for reasons in rejected)
            assert same_weights(trainer.model, alone.model)


@pytest.mark.parametrize(
    ("counts", "announced", "expected"),
    [
        ({"class_count_0": 4.0, "class_count_1": 4.0}, [3, 5], "4 examples of class 0, but the client announced 3"),
        ({"class_count_0": float("nan"), "class_count_1": 5.0}, [3, 5], "nan examples of class 0"),
        ({"class_count_0": 3.0, "class_count_1": 5.0, "class_count_2": 1.0}, [3, 5], "1 examples of class 2"),
        ({"class_count_0": 3.0, "class_count_1": 5.0}, None, "3 examples of class 0, but the client announced 0"),
    ],
    ids=["more of a class", "nan", "unknown class", "not announced"],
)
def test_class_counts_above_the_announced_counts_are_refused(tmp_path, counts, announced, expected):
    replies = {HONEST: honest, HOSTILE: changed(metrics={"loss": 0.5, **counts})}
    announcements = {HOSTILE: dataclasses.replace(ANNOUNCED, class_counts=announced)}
    trainer, rejected = run_with_threads(tmp_path, replies, announcements, **FEDDRS)
    assert trainer.state.global_step == 2
    assert [list(reasons) for reasons in rejected] == [[HOSTILE], [HOSTILE]]
    assert all(expected in reasons[HOSTILE] for reasons in rejected)


def test_method_without_class_counts_ignores_them(tmp_path):
    reply = changed(metrics={"loss": 0.5, "class_count_0": 100.0})
    _, rejected = run_with_threads(tmp_path, {HONEST: honest, HOSTILE: reply}, {})
    assert rejected == [{}, {}]


def test_evaluation_of_more_examples_than_announced_is_refused(tmp_path, caplog):
    def reply(request: Message) -> Message:
        answer = honest(request)
        return dataclasses.replace(answer, num_examples=5) if isinstance(answer, Metrics) else answer

    trainer, rejected = run_with_threads(tmp_path, {HONEST: honest, HOSTILE: reply}, {}, evaluate_clients=True)
    assert rejected == [{}, {}] and list(trainer.client_metrics) == [HONEST]
    expected = (
        f"Client {HOSTILE!r} could not be evaluated: the server refused the reply: it claims 5 evaluation examples, "
        "but the client announced 4"
    )
    assert sum(expected in text for text in caplog.messages) == 2


def test_client_without_evaluation_examples_is_not_evaluated(tmp_path, caplog):
    asked: list[str] = []

    def reply(request: Message) -> Message:
        asked.append(request.kind)
        return honest(request)

    announced = {HOSTILE: dataclasses.replace(ANNOUNCED, num_eval_examples=0)}
    trainer, _ = run_with_threads(tmp_path, {HONEST: honest, HOSTILE: reply}, announced, evaluate_clients=True)
    assert asked == ["fit", "fit"] and list(trainer.client_metrics) == [HONEST]
