"""
A dishonest server of a networked split model.

The server is a real one behind a link that changes its answers. The client must refuse each change by name, before its
parameters change.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import SESSION_CONFIG
from networked import Run, unbundled
from split_attacks import with_fields, with_values
from split_runs import clients_of

from hf_federated import SplitConfig
from hf_federated.split.agreement import RefusedAnswerError
from hf_federated.split.messages import Backward, Forward, Gradient, Hidden
from hf_federated.split_training.gradient_bounds import GradientBounds
from hf_federated.split_training.messages import (
    BeginStep,
    BeginStepReply,
    Bundle,
    EndStep,
    EndStepReply,
    FetchEnvelope,
    FetchEnvelopeReply,
    Join,
    JoinReply,
    LateReply,
    PeerRemovedReply,
    ResendReply,
    as_tensor,
    read_message,
)
from hf_federated.transport import GrpcLink, GrpcServer


VICTIM = "client 0"
MODES = ("serial", "client_batch")
# Returns the answer to send in place of an honest answer. Arguments: the message of the client and the honest answer.
Change = Callable[[Any, bytes], bytes]


@dataclass(frozen=True)
class Action:
    """
    A hostile action.

    Args:
        request (`type`): The messages whose answers are changed.
        change (`Callable`): Returns the answer.
        field (`str`): The field that the client names.
        modes (`tuple[str, ...]`): The strategies with such messages.
    """

    request: type
    change: Change
    field: str
    modes: tuple[str, ...] = MODES


def states(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the hidden states or the gradient of an answer."""

    def changed(request: Any, answer: bytes) -> bytes:
        name, cls = ("hidden", Hidden) if isinstance(request, Forward) else ("gradient", Gradient)
        return with_values(cls.from_bytes(answer), name, change)

    return changed


def fields(**values: Any) -> Change:
    """Change fields of an answer."""
    return lambda request, answer: with_fields(answer, **values)


def reply(create: Callable[[Any], Any]) -> Change:
    """Send another answer."""
    return lambda request, answer: create(request).to_bytes()


def grow(request: Backward, answer: bytes) -> bytes:
    """The gradient of the first step is honest. It grows tenfold in each step."""
    return states(lambda values: values * 10.0**request.step)(request, answer)


def more_steps(request: Join, answer: bytes) -> bytes:
    steps = JoinReply.from_bytes(answer).steps_of
    return with_fields(answer, steps_of={**steps, VICTIM: steps[VICTIM] + 1})


def stranger(request: FetchEnvelope, answer: bytes) -> bytes:
    return ResendReply(VICTIM, request.step, ["mallory"]).to_bytes()


ACTIONS: dict[str, Action] = {
    # ---- Hidden states
    "hidden states of a longer sequence": Action(Forward, states(lambda values: values.repeat(2, 1)), "hidden"),
    "hidden states of another batch size": Action(Forward, states(lambda values: values[:7]), "hidden"),
    "hidden states of another model": Action(Forward, states(lambda values: values[:, :8].contiguous()), "hidden"),
    "hidden states in half precision": Action(Forward, states(lambda values: values.bfloat16()), "hidden"),
    "hidden states in double precision": Action(Forward, states(lambda values: values.double()), "kind"),
    "hidden states of NaN": Action(Forward, states(lambda values: values * math.nan), "hidden"),
    "infinite hidden states": Action(Forward, states(lambda values: values / 0), "hidden"),
    "hidden states of 1e30": Action(Forward, states(lambda values: values * 1e30), "hidden"),
    "hidden states of a micro-batch that was never sent": Action(Forward, fields(micro_step=7), "micro_step"),
    "hidden states of another client": Action(Forward, fields(client_id="client 1"), "client_id"),
    # ---- Gradients
    "gradient of another shape": Action(Backward, states(lambda values: values[:7]), "gradient"),
    "gradient of another model": Action(Backward, states(lambda values: values[:, :8].contiguous()), "gradient"),
    "gradient in half precision": Action(Backward, states(lambda values: values.half()), "gradient"),
    "gradient of NaN": Action(Backward, states(lambda values: values * math.nan), "gradient"),
    "huge gradient": Action(Backward, states(lambda values: values * 1e6), "gradient"),
    "gradient of 1e30": Action(Backward, states(lambda values: torch.full_like(values, 1e30)), "gradient"),
    "gradient of 3e38": Action(Backward, states(lambda values: torch.full_like(values, 3e38)), "gradient"),
    "gradient that grows slowly": Action(Backward, grow, "gradient"),
    "gradient of a micro-batch that was never sent": Action(Backward, fields(micro_step=3), "micro_step"),
    "gradient of another step": Action(Backward, fields(step=99), "step"),
    "hidden states in place of a gradient": Action(
        Backward,
        reply(lambda request: Hidden(VICTIM, request.step, request.micro_step, request.gradient)),
        "kind",
    ),
    # ---- Norms
    "negative norm": Action(Backward, fields(squared_norm=-1e30), "squared_norm"),
    "norm that differs from the one before": Action(EndStep, fields(norm=1e-9), "norm", ("serial",)),
    "norm of a shared step": Action(Backward, fields(squared_norm=1.0), "squared_norm", ("client_batch",)),
    "norm below that of the client": Action(
        EndStep, reply(lambda request: EndStepReply(VICTIM, request.step, 0.0)), "norm", ("client_batch",)
    ),
    "norm of NaN": Action(
        EndStep, reply(lambda request: EndStepReply(VICTIM, request.step, math.nan)), "norm", ("client_batch",)
    ),
    "infinite norm": Action(
        EndStep, reply(lambda request: EndStepReply(VICTIM, request.step, math.inf)), "norm", ("client_batch",)
    ),
    # ---- Control messages
    "more steps": Action(Join, more_steps, "steps_of"),
    "checkpoint that does not exist": Action(Join, fields(resume_step=5), "resume_step"),
    "end of another step": Action(EndStep, fields(step=99), "step"),
    "begin of another step": Action(BeginStep, fields(step=99), "step"),
    "begin in another name": Action(BeginStep, fields(client_id="client 1"), "client_id"),
    "late client that joins": Action(Join, reply(lambda request: LateReply(VICTIM, 0)), "kind"),
    "removed client in place of hidden states": Action(
        Forward, reply(lambda request: PeerRemovedReply(VICTIM, request.step, "client 1")), "kind"
    ),
    "begin in place of hidden states": Action(
        Forward, reply(lambda request: BeginStepReply(VICTIM, request.step)), "kind"
    ),
    "number in place of a text": Action(BeginStep, fields(client_id=7), "kind"),
    "undeclared field": Action(Forward, fields(seed=1), "kind"),
    "bytes of another format": Action(Forward, lambda request, answer: bytes(len(answer)), "kind"),
    "no bytes": Action(Forward, lambda request, answer: b"", "kind"),
    "half of an answer": Action(Backward, lambda request, answer: answer[: len(answer) // 2], "kind"),
    "pickle": Action(Forward, lambda request, answer: pickle.dumps({"kind": "split_hidden"}), "kind"),
    # ---- Parts of other clients
    "parts for a stranger": Action(FetchEnvelope, stranger, "recipients", ("client_batch",)),
    "parts again and again": Action(
        FetchEnvelope,
        reply(lambda request: ResendReply(VICTIM, request.step, ["client 1"])),
        "recipients",
        ("client_batch",),
    ),
    "parts of a step after the run": Action(
        FetchEnvelope, reply(lambda request: ResendReply(VICTIM, 10**6, ["client 1"])), "step", ("client_batch",)
    ),
    "parts of another client": Action(
        FetchEnvelope,
        reply(lambda request: FetchEnvelopeReply(VICTIM, request.step, "client 2", as_tensor(b"x"))),
        "sender",
        ("client_batch",),
    ),
    "removal of another client": Action(
        FetchEnvelope,
        reply(lambda request: PeerRemovedReply(VICTIM, request.step, "client 2")),
        "peer",
        ("client_batch",),
    ),
}


class HostileServer:
    """
    Changes answers of the server to one client.

    Args:
        action ([`Action`]): The hostile action.

    Attributes:
        run ([`Run`]): The run, which is set after its construction.
        before (`dict[str, torch.Tensor]`): The parameters of the client at the last changed answer.
    """

    run: Run

    def __init__(self, action: Action) -> None:
        self.action = action
        self.before: dict[str, torch.Tensor] = {}

    def answer(self, client_id: str, blob: bytes | memoryview) -> bytes:
        try:
            answer = self.run.server.answer(client_id, blob)
        except ValueError:
            # An honest server delivers parts once.
            if self.action.request is not FetchEnvelope:
                raise
            answer = b""
        if client_id != VICTIM:
            return answer
        messages, answers = unbundled(bytes(blob)), unbundled(answer)
        answers = self.change([read_message(message) for message in messages], answers)
        return answers[0] if len(messages) == 1 else Bundle(VICTIM, list(map(as_tensor, answers))).to_bytes()

    def change(self, messages: list[Any], answers: list[bytes]) -> list[bytes]:
        return [
            self._changed(message, answer) if isinstance(message, self.action.request) else answer
            for message, answer in zip(messages, answers, strict=True)
        ]

    def _changed(self, message: Any, answer: bytes) -> bytes:
        if isinstance(message, BeginStep) and not message.num_batches:
            return answer
        changed = self.action.change(message, answer)
        if changed != answer:
            self.before = parameters_of(self.run)
        return changed


def parameters_of(run: Run) -> dict[str, torch.Tensor]:
    parameters = run.trainers[VICTIM].model.named_parameters()
    return {name: value.detach().clone() for name, value in parameters}


@pytest.fixture
def attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """A function that trains a run with a hostile server over gRPC, and checks that the client refuses by name."""
    # A hostile server does not check the norms that follow from its gradients.
    monkeypatch.setattr(GradientBounds, "check_squared_norms", lambda *args: None)
    with contextlib.ExitStack() as stack:

        def train(hostile: HostileServer, strategy: str, field: str, **changes: Any) -> Run:
            def connect(server: Any, client_id: str) -> GrpcLink:
                clients = [client_id], SESSION_CONFIG
                grpc = stack.enter_context(GrpcServer(hostile.answer, None, *clients, insecure=True))
                return stack.enter_context(GrpcLink(grpc.address, None, client_id, SESSION_CONFIG, insecure=True))

            data = clients_of(12) if strategy == "serial" else clients_of(12, 12)
            split = SplitConfig(strategy, average_every=None if strategy == "serial" else 2)
            run = hostile.run = Run(tmp_path, data, split, links=connect, optim="sgd", **changes)
            run.train()
            error = run.errors[VICTIM]
            assert isinstance(error, RefusedAnswerError), repr(error)
            assert f"`{field}` of an answer" in str(error) and "The client agreed to" in str(error), error
            after = parameters_of(run)
            assert hostile.before and all(torch.equal(after[name], value) for name, value in hostile.before.items())
            return run

        yield train


# One action of each group. The slow tests run all actions.
FAST = [
    ("hidden states of another batch size", "serial"),
    ("hidden states of a longer sequence", "serial"),
    ("hidden states of 1e30", "client_batch"),
    ("gradient of NaN", "client_batch"),
    ("gradient that grows slowly", "serial"),
    ("norm below that of the client", "client_batch"),
    ("more steps", "serial"),
    ("parts again and again", "client_batch"),
]
CASES = [(name, mode) for name, action in ACTIONS.items() for mode in action.modes]


@pytest.mark.parametrize(
    ("name", "strategy"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_client_refuses_by_name_and_keeps_its_parameters(name, strategy, attacked):
    attacked(HostileServer(ACTIONS[name]), strategy, ACTIONS[name].field)


SEVERAL_BATCHES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    ("request_type", "strategy"),
    [
        (Forward, "serial"),
        *(
            pytest.param(request, mode, marks=pytest.mark.slow)
            for request, mode in ((Backward, "serial"), (Forward, "client_batch"), (Backward, "client_batch"))
        ),
    ],
)
def test_swapped_answers_of_micro_batches_are_refused(request_type, strategy, attacked):
    class Swaps(HostileServer):
        def change(self, messages: list[Any], answers: list[bytes]) -> list[bytes]:
            numbers = [number for number, message in enumerate(messages) if isinstance(message, request_type)]
            for first, second in zip(numbers[::2], numbers[1::2], strict=False):
                self.before = parameters_of(self.run)
                answers[first], answers[second] = answers[second], answers[first]
            return answers

    hostile = Swaps(Action(request_type, lambda request, answer: answer, "micro_step"))
    attacked(hostile, strategy, "micro_step", **SEVERAL_BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", MODES)
@pytest.mark.parametrize("change", [-1, 1])
def test_missing_and_additional_answers_are_refused(change, strategy, attacked):
    class Miscounts(HostileServer):
        def change(self, messages: list[Any], answers: list[bytes]) -> list[bytes]:
            if len(answers) > 1:
                self.before = parameters_of(self.run)
                return answers[:-1] if change < 0 else [*answers, answers[-1]]
            return answers

    attacked(Miscounts(Action(Join, lambda request, answer: answer, "messages")), strategy, "messages")
