"""Randomly mutated answers of the server of a split model. The client uses an answer or refuses it by name."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from mutations import mutate_value
from split_runs import whole_model

from hf_federated import SplitModel
from hf_federated.messages.serialization import FlatTree, pack
from hf_federated.split import LocalLink
from hf_federated.split.agreement import AnswerBounds, RefusedAnswerError
from hf_federated.split.messages import read_request
from hf_federated.split_training.answers import check_join_reply
from hf_federated.split_training.messages import (
    BeginStep,
    BeginStepReply,
    EndStep,
    EndStepReply,
    Finish,
    Join,
    JoinReply,
    LateReply,
    ResendReply,
    as_tensor,
)
from hf_federated.split_training.run_link import LateError, RunLink


def mutated(answer: Any, draw: random.Random) -> bytes:
    """Change one field of an answer without the checks of its class, or its bytes."""
    tree = answer.to_tree()
    if draw.random() < 0.6:
        fields = tree if isinstance(tree, FlatTree) else tree["fields"]
        name = draw.choice(list(fields))
        fields[name] = mutate_value(fields[name], draw)
        try:
            return pack(tree)
        except (TypeError, ValueError, UnicodeError, RuntimeError):  # no sender can serialize this value
            return b""
    blob = bytearray(answer.to_bytes())
    for _ in range(draw.choice([1, 1, 2, 8])):
        blob[draw.randrange(len(blob))] = draw.randrange(256)
    return bytes(blob[: draw.randrange(len(blob))] if draw.random() < 0.2 else blob)


class MutatingLink:
    """Link to an honest server. It mutates half of the answers."""

    def __init__(self, link: LocalLink, draw: random.Random) -> None:
        self.link, self.draw = link, draw

    def exchange(self, blob: bytes) -> bytes:
        answer = self.link.server.process(read_request(blob))
        return mutated(answer, self.draw) if self.draw.random() < 0.5 else answer.to_bytes()

    def end_step(self) -> None:
        pass


@pytest.mark.parametrize("num_steps", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_hidden_states_and_gradients_are_refused_by_name(num_steps):
    model = SplitModel.from_model(whole_model()).train()
    model.boundary.link = MutatingLink(model.boundary.link, random.Random(0))
    model.boundary.bounds = AnswerBounds()
    ids, num_refused = torch.tensor([[3, 4, 5], [6, 7, 8]]), 0
    for step in range(num_steps):
        model.boundary.begin_step(step)
        try:
            model(ids, labels=ids).loss.backward()
        except RefusedAnswerError as error:
            assert len(str(error)) < 1000
            num_refused += 1
        for part in (model.client_head, model.client_tail):
            assert all(
                parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in part.parameters()
            )
        model.zero_grad()
    assert num_refused > num_steps / 4


REPLIES = [
    (Join("a", "digest", 3, [2], as_tensor(b"x")), JoinReply("a", 2, {"a": 3, "b": 4}, {"a": as_tensor(b"x")})),
    (BeginStep("a", 1, 1, 2), BeginStepReply("a", 1)),
    (EndStep("a", 1, 1.0), EndStepReply("a", 1, 2.0)),
    (EndStep("a", 1, 1.0), LateReply("a", 1)),
    (Finish("a", 1), ResendReply("a", 1, ["b"])),
]


@pytest.mark.parametrize("number", range(len(REPLIES)))
def test_mutated_control_messages_are_refused_by_name(number):
    request, reply = REPLIES[number]
    if isinstance(reply, JoinReply):
        reply = dataclasses.replace(reply, introductions={"a": as_tensor(b"x"), "b": as_tensor(b"y")})
    draw, num_refused = random.Random(number), 0

    class Link:
        def exchange(self, blob: bytes) -> bytes:
            return mutated(reply, draw)

        def end_step(self) -> None:
            pass

    for _ in range(300):
        try:
            answer = RunLink(Link(), "a").request(request, type(reply))
            if isinstance(answer, JoinReply):
                check_join_reply(request, answer)
        except (ValueError, LateError) as error:
            num_refused += isinstance(error, RefusedAnswerError)
    assert num_refused > 100
