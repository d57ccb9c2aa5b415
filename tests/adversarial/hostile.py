"""An engine with one hostile client, and the attacks that this client carries out on the server.

An attack replaces the replies of the hostile client to one phase of a round. It receives the request, the honest
reply and what the hostile client has seen so far. It returns what the server receives, each item with the client that
really sent it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_federated.engines import LocalEngine
from hf_federated.engines.requests import NoReply
from hf_federated.messages import ClientFailure, Message, Metrics, Predictions


# Replaces the replies of the hostile client: `(request, honest reply, knowledge) -> [(sender, reply), ...]`.
Act = Callable[[Any, Any, "Knowledge"], list[tuple[str, Any]]]


@dataclass
class Knowledge:
    """What the hostile client has seen: its own id, another client's id, and its own earlier replies."""

    own: str
    other: str
    replies: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Attack:
    """
    An attack.

    Args:
        name (`str`): Name of the test.
        act (`Callable`): Replaces the replies of the hostile client.
        named (`str`): Text that the log contains together with the name of the hostile client.
        phase (`str`): The attacked phase.
        refused (`bool`): Whether the server must refuse the reply. Otherwise it ignores the attack and counts the
            honest reply.
    """

    name: str
    act: Act
    named: str
    phase: str = "training"
    refused: bool = True


class HostileEngine(LocalEngine):
    """
    Runs all clients in this process; one of them is hostile.

    Args:
        attack ([`Attack`]): The attack.
        hostile (`str`): Id of the hostile client.
        other (`str`): Id of an honest client, in whose name some attacks speak.
    """

    def __init__(self, attack: Attack, hostile: str, other: str) -> None:
        super().__init__()
        self._attack = attack
        self._knowledge = Knowledge(hostile, other)
        self._phase = ""
        # What the hostile client has sent and the server has not read.
        self._sent: list[tuple[str, Any]] = []

    def run(self, plan, on_dispatch=None):
        self._phase = plan.phase
        return super().run(plan, on_dispatch)

    def _dispatch(self, client_id, request):
        self._request = super()._dispatch(client_id, request)
        return self._request

    def _receive(self, clients, until):
        if not self._sent:
            client_id, reply = super()._receive(clients, until)
            if client_id != self._knowledge.own or self._phase != self._attack.phase:
                return client_id, reply
            nothing = [(client_id, NoReply(reply.round, client_id, "no reply"))]
            self._sent = self._attack.act(self._request, reply, self._knowledge) or nothing
            self._knowledge.replies.append(reply)
        first, *self._sent = self._sent
        return first


def fail(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
    """The reply of a client that fails. The server's state after an attack equals the state after this reply."""
    return [(knowledge.own, ClientFailure(request.round, request.client_id, "OSError", nonce=request.nonce))]


def fail_with(error: str) -> Act:
    """Fail with a text as the error."""
    return replaced(lambda request: ClientFailure(request.round, request.client_id, error, nonce=request.nonce))


def changed(**fields: Any) -> Act:
    """Change fields of the reply."""
    return lambda request, reply, knowledge: [(knowledge.own, dataclasses.replace(reply, **fields))]


def changed_by(change: Callable[[Any], dict[str, Any]]) -> Act:
    """Change fields of the reply, as a function of the reply."""
    return lambda request, reply, knowledge: [(knowledge.own, dataclasses.replace(reply, **change(reply)))]


def replaced(reply_to: Callable[[Any], Any]) -> Act:
    """Replace the reply, as a function of the request."""
    return lambda request, reply, knowledge: [(knowledge.own, reply_to(request))]


def with_tensor(field_name: str, change: Callable[[torch.Tensor], Any]) -> Act:
    """Change the first floating tensor of a field."""

    def changes(reply: Any) -> dict[str, Any]:
        tensors = dict(getattr(reply, field_name))
        name = next(name for name, value in tensors.items() if value.is_floating_point())
        return {field_name: {**tensors, name: change(tensors[name].clone())}}

    return changed_by(changes)


def without_first(field_name: str) -> Act:
    """Leave out the first entry of a field."""
    return changed_by(lambda reply: {field_name: dict(list(getattr(reply, field_name).items())[1:])})


def as_old_reply(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
    """Send the reply of the previous round, or of an earlier run, as the reply of this round."""
    old = knowledge.replies[-1] if knowledge.replies else dataclasses.replace(reply, nonce="0" * 32)
    return [(knowledge.own, dataclasses.replace(old, round=request.round))]


def after(first: Act, then: Callable[[Any, Any, Knowledge], list[tuple[str, Any]]]) -> Act:
    """Carry out two acts, one after the other."""
    return lambda *args: [*first(*args), *then(*args)]


def honest(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
    """Reply honestly."""
    return [(knowledge.own, reply)]


def set_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Set the first value of a tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def metrics_with(**values: Any) -> Act:
    """Change metrics of the reply."""
    return changed_by(lambda reply: {"metrics": {**reply.metrics, **values}})


def metric_attacks(phase: str, loss: str) -> list[Attack]:
    """Attacks on the numbers of a `Metrics` or a `ClientUpdate`."""
    return [
        Attack("metrics are None", changed(metrics=None), "`metrics` is None", phase),
        Attack("100 000 metrics", changed(metrics={f"m{i}": 0.0 for i in range(10**5)}), "100000 entries", phase),
        Attack("name of a metric of 10 000 characters", metrics_with(**{"m" * 10**4: 0.0}), "10000 characters", phase),
        Attack("loss is a text", metrics_with(**{loss: "100"}), "value of type str, expected float", phase),
        Attack("loss is a list", metrics_with(**{loss: []}), "value of type list, expected float", phase),
        Attack("loss is None", metrics_with(**{loss: None}), "is None, expected float", phase),
        Attack("loss of 10**400", metrics_with(**{loss: 10**400}), "integer of more than 64 bits", phase),
    ]


def identity_attacks(phase: str, wrong_kind: Callable[[Any], Message]) -> list[Attack]:
    """Attacks on who answers what, when and how often."""

    def as_other(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
        return [(knowledge.own, dataclasses.replace(reply, client_id=knowledge.other))]

    def for_other(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
        return [(knowledge.other, dataclasses.replace(reply, client_id=knowledge.other))]

    def as_unknown(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
        return [("stranger", dataclasses.replace(reply, client_id="stranger"))]

    def hundred_times(request: Any, reply: Any, knowledge: Knowledge) -> list[tuple[str, Any]]:
        return [(knowledge.own, reply)] * 100

    return [
        Attack("answers in another's name", as_other, "in the name of client", phase),
        Attack("answers in an unknown name", changed(client_id="stranger"), "in the name of client 'stranger'", phase),
        Attack("an unknown client answers", after(as_unknown, honest), "it was not asked", phase, refused=False),
        Attack("answers for another client", after(for_other, honest), "already replied", phase, refused=False),
        Attack("answers 101 times", after(honest, hundred_times), "already replied", phase, refused=False),
        Attack("never answers", lambda *args: [], "no reply", phase),
        Attack("answers an earlier round", changed_by(lambda reply: {"round": reply.round + 7}), "to round", phase),
        Attack("repeats its previous reply", as_old_reply, "nonce", phase),
        Attack("sends no nonce", changed(nonce=""), "nonce", phase),
        Attack("sends a wrong nonce", changed(nonce="0" * 32), "nonce", phase),
        Attack("sends a nonce of 10 MB", changed(nonce="0" * 10**7), "`nonce` has 10000000 characters", phase),
        Attack("another kind of message", replaced(wrong_kind), "expected a", phase),
        Attack("nothing instead of a message", replaced(lambda request: None), "is a NoneType", phase),
        Attack("bytes instead of a message", replaced(lambda request: b"\0" * 64), "is a bytes", phase),
        Attack("round is not a number", changed(round="0"), "`round` is a value of type str", phase),
        Attack("client id is not a text", changed(client_id=None), "`client_id` is None", phase),
        Attack("fails in every round", fail, "OSError", phase),
        Attack("fails with lines that imitate the log", fail_with("x\nRejected: Client"), "x Rejected: Client", phase),
        Attack("fails with a text of 100 000 characters", fail_with("x" * 10**5), "`error` has 100000", phase),
    ]


UPDATE_ATTACKS = [
    *identity_attacks(
        "training", lambda request: Metrics(request.round, request.client_id, 1, {}, nonce=request.nonce)
    ),
    *metric_attacks("training", "loss"),
    Attack("claims 10**12 examples", changed(num_examples=10**12), "claims 1000000000000 examples"),
    Attack("claims 2**70 examples", changed(num_examples=2**70), "integer of more than 64 bits"),
    Attack("claims -5 examples", changed(num_examples=-5), "`num_examples` is -5"),
    Attack("claims 0 examples", changed(num_examples=0), "0 examples"),
    Attack("claims NaN examples", changed(num_examples=math.nan), "value of type float, expected int"),
    Attack("claims True examples", changed(num_examples=True), "value of type bool, expected int"),
    Attack("claims None examples", changed(num_examples=None), "`num_examples` is None"),
    Attack("claims '100' examples", changed(num_examples="100"), "value of type str, expected int"),
    Attack("claims [] examples", changed(num_examples=[]), "value of type list, expected int"),
    Attack("claims 10**400 steps", changed(num_steps=10**400), "integer of more than 64 bits"),
    Attack("claims 10**9 steps", changed(num_steps=10**9), "claims 1000000000 steps"),
    Attack("claims 0 steps", changed(num_steps=0), "0 steps"),
    Attack("claims 10**15 tokens", changed(num_tokens=10**15), "claims 1000000000000000 tokens"),
    Attack("additional tensors are None", changed(extra=None), "`extra` is None"),
    Attack("unexpected additional tensor", changed(extra={"x": torch.zeros(1)}), "unexpected"),
]

STATE_ATTACKS = [
    Attack("state is None", changed(state=None), "`state` is None"),
    Attack("state is a list", changed(state=[]), "`state` is a value of type list"),
    Attack("state is empty", changed(state={}), "keys are missing"),
    Attack("state lacks a tensor", without_first("state"), "1 keys are missing"),
    Attack("state has an unknown tensor", changed_by(lambda r: {"state": {**r.state, "x": torch.zeros(1)}}), "'x'"),
    Attack("tensor has another shape", with_tensor("state", lambda tensor: tensor.flatten()), "has shape"),
    Attack("tensor of 10**9 values", with_tensor("state", lambda tensor: tensor.new_zeros(1).expand(10**9)), "shape"),
    Attack("tensor has another dtype", with_tensor("state", torch.Tensor.double), "is torch.float64"),
    Attack("tensor is complex", with_tensor("state", lambda tensor: tensor.to(torch.complex64)), "torch.complex64"),
    Attack("tensor is sparse", with_tensor("state", torch.Tensor.to_sparse), "expected a tensor"),
    Attack("tensor is a list", with_tensor("state", torch.Tensor.tolist), "value of type list, expected a tensor"),
    Attack("state has NaN", with_tensor("state", set_value(math.nan)), "NaN or infinite"),
    Attack("state is infinite", with_tensor("state", set_value(math.inf)), "NaN or infinite"),
]

PREDICTION_ATTACKS = [
    *identity_attacks(
        "prediction", lambda request: Metrics(request.round, request.client_id, 1, {}, nonce=request.nonce)
    ),
    Attack("predictions are None", changed(values=None), "`values` is None", "prediction"),
    Attack("predictions are empty", changed(values={}), "Client", "prediction"),
    Attack("predictions lack a tensor", without_first("values"), "Client", "prediction"),
    Attack("predictions of other rows", with_tensor("values", lambda tensor: tensor[:-1]), "shape", "prediction"),
    Attack("predictions of other classes", with_tensor("values", lambda tensor: tensor[..., :1]), "", "prediction"),
    Attack("scalar prediction", with_tensor("values", lambda tensor: tensor.sum()), "", "prediction"),
    Attack("predictions have NaN", with_tensor("values", set_value(math.nan)), "", "prediction"),
    Attack("predictions are infinite", with_tensor("values", set_value(math.inf)), "", "prediction"),
    Attack("predictions of 1e30", with_tensor("values", lambda tensor: tensor.float() * 1e30), "", "prediction"),
    Attack("complex predictions", with_tensor("values", lambda tensor: tensor.to(torch.complex64)), "", "prediction"),
    Attack("sparse predictions", with_tensor("values", torch.Tensor.to_sparse), "expected a tensor", "prediction"),
]

LOSS_ATTACKS = [
    *identity_attacks(
        "distillation", lambda request: Predictions(request.round, request.client_id, {}, nonce=request.nonce)
    ),
    *metric_attacks("distillation", "distillation_loss"),
    Attack("no distillation loss", changed(metrics={}), "no number `distillation_loss`", "distillation"),
    Attack("loss is NaN", metrics_with(distillation_loss=math.nan), "`distillation_loss` is nan", "distillation"),
    Attack("loss of -1e300", metrics_with(distillation_loss=-1e300), "`distillation_loss` is -1e+300", "distillation"),
]
