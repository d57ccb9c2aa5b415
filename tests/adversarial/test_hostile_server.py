"""A client refuses each request that its own settings do not allow, and computes nothing for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from distillation_setup import distillation_trainer
from federations import CLIENTS, build_federation

from hf_federated import FedProx
from hf_federated.clients import Agreement, RefusedRequestError, client_seed
from hf_federated.clients.agreement import RULES, rules_of
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientFailure, Distill, Evaluate, Feedback, Fit, Message, Predict, read_message
from hf_federated.messages.registry import KINDS
from hf_federated.trainer.join import ServerRefusedError
from hf_federated.transport import Connection, LinkError
from hf_federated.transport.framing import frame
from hf_federated.utils.errors import RoundFailedError


@dataclass(frozen=True)
class Demand:
    """
    A hostile request.

    Args:
        name (`str`): Name of the test.
        kind (`type`): The request that the server changes.
        change (`Callable`): Returns the fields to change, or another message.
        field (`str`): The field that the client names.
    """

    name: str
    kind: type[Message]
    change: Callable[[Any], dict[str, Any] | Message]
    field: str


class HostileServer(LocalEngine):
    """Changes one kind of requests, and keeps the client's replies to them. The honest reply is never seen."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(serialize=True)
        self._demand = demand
        self.answers: list[Message] = []
        self.errors: list[Exception | None] = []

    def _deliver(self, message: Message) -> Message:
        if type(message) is not self._demand.kind:
            return super()._deliver(message)
        changed = self._demand.change(message)
        if isinstance(changed, dict):
            changed = dataclasses.replace(message, **changed)
        self.answers.append(super()._deliver(changed))
        self.errors.append(self.worker.last_error)
        return self.answers[-1]


def first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], dict[str, Any]]:
    """Change the largest tensor of the state."""

    def fields(request: Any) -> dict[str, Any]:
        name = max(request.state, key=lambda key: request.state[key].numel())
        return {"state": {**request.state, name: change(request.state[name])}}

    return fields


def first_extra(request: Any) -> dict[str, Any]:
    name = max(request.state, key=lambda key: request.state[key].numel())
    return {"extra": {**request.extra, name: torch.ones(1)}}


FIT = [
    Demand("the private model", Fit, lambda request: {"returns_state": not request.returns_state}, "returns_state"),
    Demand("one example", Fit, lambda request: {"max_rows": 1}, "max_rows"),
    Demand("no example", Fit, lambda request: {"max_rows": 0}, "max_rows"),
    Demand("a further round", Fit, lambda request: {"round": 2}, "round"),
    Demand("a setting that is not finite", Fit, lambda request: {"settings": {"lr": float("nan")}}, "settings"),
    Demand("a later update", Fit, lambda request: {"accepted_round": request.round}, "accepted_round"),
]
STATE = [
    Demand("no state", Fit, lambda request: {"state": {}}, "state"),
    Demand("one value for a matrix", Fit, first_tensor(lambda value: value.reshape(-1)[:1]), "state"),
    Demand("a transposed matrix", Fit, first_tensor(lambda value: value.T.contiguous()), "state"),
    Demand("one value as the additional tensor of a matrix", Fit, first_extra, "extra"),
    Demand("integers", Fit, first_tensor(lambda value: value.to(torch.int32)), "state"),
    Demand("a parameter less", Fit, lambda request: {"state": dict(list(request.state.items())[1:])}, "state"),
    Demand("a parameter more", Fit, lambda request: {"state": {**request.state, "b": torch.ones(1)}}, "state"),
]
OWN_MODEL = [
    Demand(
        "a state with many long names",
        Fit,
        lambda request: {"state": {f"{number:0500}": torch.ones(1) for number in range(2000)}},
        "state",
    ),
    Demand("training from a given model", Fit, lambda request: {"state": {"classifier.bias": torch.ones(2)}}, "state"),
]
ROWS = [
    Demand("no rows", Predict, lambda request: {"stop": request.start}, "stop"),
    Demand("rows that do not exist", Predict, lambda request: {"stop": 10**6}, "stop"),
    Demand("predictions of a further round", Predict, lambda request: {"round": 2}, "round"),
]
TARGETS = [
    Demand("epochs", Distill, lambda request: {"num_epochs": 10**9}, "num_epochs"),
    Demand("a graph", Predict, lambda request: {"keeps_graph": True}, "keeps_graph"),
    Demand(
        "feedback",
        Distill,
        lambda request: Feedback(
            request.round,
            request.client_id,
            request.order,
            request.start,
            request.stop,
            request.seed,
            request.targets,
            feedback={},
            step=0,
            num_training_steps=1,
            nonce=request.nonce,
        ),
        "feedback",
    ),
]


def assert_refused(trainer: Any, demand: Demand) -> None:
    with pytest.raises(RoundFailedError):
        trainer.train()
    engine = trainer.engine
    assert engine.answers and all(isinstance(reply, ClientFailure) for reply in engine.answers)
    assert all(isinstance(error, RefusedRequestError) for error in engine.errors)
    assert all(f"`{demand.field}`" in reply.error and "agreed to" in reply.error for reply in engine.answers)


@pytest.mark.parametrize("aggregation", ["fedavg", pytest.param("fedprox", marks=pytest.mark.slow), "scaffold"])
@pytest.mark.parametrize("demand", [*FIT, *STATE], ids=lambda demand: demand.name)
def test_client_of_an_averaging_federation_refuses(tmp_path, demand, aggregation):
    settings = {"optim": "sgd", "lr_scheduler_type": "constant"} if aggregation == "scaffold" else {}
    trainer = build_federation(
        tmp_path,
        CLIENTS,
        federation={"aggregation": aggregation, "min_clients": 2},
        trainer={"engine": HostileServer(demand)},
        **settings,
    )
    assert_refused(trainer, demand)


def test_type_of_a_setting_is_that_of_the_method(tmp_path):
    demand = Demand("a text", Fit, lambda request: {"settings": {"proximal_weight": "0.1"}}, "settings")
    trainer = build_federation(
        tmp_path, CLIENTS, federation={"aggregation": "fedprox"}, trainer={"engine": HostileServer(demand)}
    )
    assert_refused(trainer, demand)


@pytest.mark.parametrize("demand", [*FIT, *OWN_MODEL, *ROWS, *TARGETS], ids=lambda demand: demand.name)
def test_client_with_its_own_model_refuses(tmp_path, demand):
    trainer = distillation_trainer(tmp_path, "dsfl", {}, engine=HostileServer(demand))
    assert_refused(trainer, demand)


@pytest.mark.parametrize("demand", [FIT[0], FIT[1], *ROWS], ids=lambda demand: demand.name)
def test_client_of_a_bidirectional_distillation_refuses(tmp_path, demand):
    trainer = distillation_trainer(tmp_path, "fedid", {}, engine=HostileServer(demand))
    assert_refused(trainer, demand)


@pytest.mark.parametrize("rounds", [(0, 0), (0, 1, 0)], ids=["repeated", "after another round"])
def test_client_predicts_each_public_example_as_often_as_the_method_asks(tmp_path, rounds):
    """Another order of the examples, for example, would give further predictions."""

    class AsksAgain(LocalEngine):
        replies_to_predict: ClassVar[list[Message]] = []

        def _deliver(self, message: Message) -> Message:
            if not isinstance(message, Predict):
                return super()._deliver(message)
            # A repeated request, as of a server that resumes, is answered.
            for order, number in [(None, 0), *enumerate(rounds)]:
                request = dataclasses.replace(message, order=None if order == 0 else order, round=number)
                self.replies_to_predict.append(super()._deliver(request))
            return self.replies_to_predict[-1]

    AsksAgain.replies_to_predict = []
    trainer = distillation_trainer(tmp_path, "dsfl", {}, engine=AsksAgain())
    with pytest.raises(RoundFailedError, match="passes_per_round"):
        trainer.train()
    failed = [isinstance(reply, ClientFailure) for reply in AsksAgain.replies_to_predict[: len(rounds) + 1]]
    assert failed == [False] * len(rounds) + [True]


class HostileConnection(Connection):
    """Asks for the private model until the client leaves."""

    def __init__(self) -> None:
        self.replies: list[Message] = []

    def receive(self, reply: bytes | None = None) -> bytes:
        if reply is not None:
            self.replies.append(read_message(reply))
        number = len(self.replies)
        if number > 5:
            raise LinkError("The client did not leave.")
        request = Fit(0, "a", client_seed(42, "a", 0), state={}, returns_state=False, nonce=str(number))
        return frame({"state": "", "keep": [], "num_clients": 1}) + request.to_bytes()

    def close(self) -> None:
        pass


def test_joined_client_leaves_after_three_refused_requests(tmp_path, caplog):
    trainer = build_federation(tmp_path, {"a": CLIENTS["north"]})
    connection = HostileConnection()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ServerRefusedError, match=r"after 3 requests .*`state`.*The client agreed to the global state"):
        trainer.join_over(lambda settings, announcement: connection, client_id="a")
    assert [type(reply) for reply in connection.replies] == [ClientFailure] * 2
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert sum("this client refused a request" in text for text in caplog.messages) == 3


@pytest.mark.parametrize(
    ("sent", "is_agreed"), [(1, True), (1.0, True), (0.5, False), (True, False), ("1", False), (None, False)]
)
def test_setting_has_the_type_and_the_value_of_the_clients_own_setting(sent, is_agreed):
    """A recipe of another party can have the number 1 where this party has 1.0."""
    agreement = Agreement([FedProx(1.0)], num_rounds=1)
    request = Fit(0, "a", seed=0, state={"w": torch.zeros(1)}, settings={"proximal_weight": sent, "step": 3})
    if is_agreed:
        agreement.check(request)
    else:
        with pytest.raises(RefusedRequestError, match="`settings`"):
            agreement.check(request)


def test_limit_of_the_recipe_is_the_smallest_limit(tmp_path):
    demand = Demand("fewer", Fit, lambda request: {"max_rows": request.max_rows - 1}, "max_rows")
    trainer = build_federation(
        tmp_path, CLIENTS, federation={"max_rows_per_round": 2}, trainer={"engine": HostileServer(demand)}
    )
    assert_refused(trainer, demand)


@pytest.mark.parametrize("cls", [Fit, Evaluate, Predict, Distill, Feedback])
def test_each_field_of_a_request_has_a_rule(cls):
    known = {name for base in cls.__mro__ for name in RULES.get(base, {})}
    assert known == {field.name for field in dataclasses.fields(cls)} == rules_of(cls).keys()


def test_all_requests_of_the_library_have_rules():
    requests = {cls for cls in KINDS.values() if cls.answered_by}
    assert requests == {Fit, Evaluate, Predict, Distill, Feedback}
