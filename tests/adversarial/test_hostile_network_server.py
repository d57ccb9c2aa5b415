"""A dishonest server on a network: a client that has joined refuses each hostile request, by name, and goes on."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_setup import NUM_PUBLIC, Recorder, distillation_trainer
from federations import CLIENTS, build_federation, settings_of
from tiny import tiny_model

from hf_federated import FederatedDataset
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, NetworkEngine
from hf_federated.messages import ClientFailure, Distill, Evaluate, Feedback, Fit, Message, Predict
from hf_federated.trainer.join import ServerRefusedError


METHODS = ("fedavg", "fedprox", "scaffold", "mutual_kd", "dsfl", "fedid", "feddrs")
AVERAGING = METHODS[:4]
SETTINGS: dict[str, dict[str, Any]] = {
    "feddrs": {"num_samples": 6, "sample_length": 5, "num_steps": 3},
    "fedid": {"feedback": "mpl"},
}


def build(directory: Path, method: str, **arguments: Any) -> Any:
    """A trainer with three clients, or with the given ones."""
    if method not in AVERAGING:
        return distillation_trainer(directory, method, SETTINGS.get(method, {}), **arguments)
    plain = {"optim": "sgd", "lr_scheduler_type": "constant"} if method == "scaffold" else {}
    clients = arguments.pop("train_dataset", CLIENTS)
    callbacks = [recorder] if (recorder := arguments.pop("record", None)) else []
    more: dict[str, Any] = {"client_model_init": lambda client_id: tiny_model()} if method == "mutual_kd" else {}
    trainer = build_federation(
        directory,
        clients,
        federation={"aggregation": method, "evaluate_clients": True},
        trainer={"callbacks": callbacks, "eval_dataset": FederatedDataset.from_dict(clients), **more},
        eval_strategy="steps",
        **plain,
    )
    if recorder is not None:
        recorder.trainer = trainer
    return trainer


def honest_requests(directory: Path, method: str) -> list[Message]:
    """The requests of the first round to one client."""
    recorder = Recorder()
    trainer = build(directory, method, record=recorder)
    trainer.train()
    name = next(iter(trainer.clients))
    return [request for request in recorder.sent if request.client_id == name and request.round == 0]


# ---- Hostile requests


def largest(tensors: dict[str, torch.Tensor]) -> str:
    return max(tensors, key=lambda name: tensors[name].numel())


def changed(
    tensors: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors with a change of the largest one."""
    name = largest(tensors)
    return {**tensors, name: change(tensors[name])}


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def invalid_states(request: Fit | Evaluate) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of the state that no client accepts."""
    state = request.state
    if not state:
        yield "a state", {"state": {"classifier.bias": torch.ones(2)}}
        yield "many long names", {"state": {f"{number:0500}": torch.ones(1) for number in range(200)}}
        return
    name = largest(state)
    yield "no state", {"state": {}}
    yield "one value for a matrix", {"state": changed(state, lambda tensor: tensor.reshape(-1)[:1])}
    yield "a scalar for a matrix", {"state": changed(state, lambda tensor: tensor.reshape(-1)[0])}
    yield "a transposed matrix", {"state": changed(state, lambda tensor: tensor.T.contiguous())}
    yield "a further dimension", {"state": changed(state, lambda tensor: tensor[None])}
    yield "an empty matrix", {"state": changed(state, lambda tensor: tensor[:0])}
    yield "integers", {"state": changed(state, lambda tensor: tensor.to(torch.int32))}
    yield "truth values", {"state": changed(state, lambda tensor: tensor > 0)}
    yield "NaN", {"state": changed(state, with_value(float("nan")))}
    yield "an infinite value", {"state": changed(state, with_value(float("inf")))}
    yield "a parameter less", {"state": {key: value for key, value in state.items() if key != name}}
    yield "a parameter more", {"state": {**state, "x": torch.ones(1)}}
    yield "a name in capitals", {"state": {key.upper() if key == name else key: state[key] for key in state}}


def invalid_training(request: Fit) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "the private model, or no model", {"returns_state": not request.returns_state}
    for number in (0, 1, 2, 3, 10**6):
        yield f"{number} examples", {"max_rows": number}
    yield "another seed", {"seed": (request.seed + 1) % 2**32}
    yield "the seed 0", {"seed": 0}
    yield "the use of a later update", {"accepted_round": 0}
    yield "a setting that is not finite", {"settings": {**request.settings, "x": float("nan")}}
    for name in request.settings:
        yield f"no {name}", {"settings": {key: value for key, value in request.settings.items() if key != name}}
        yield f"{name} as a text", {"settings": {**request.settings, name: "1"}}
        # With the inverse of the learning rate, for example, each step of FedProx would forget the previous ones.
        for value in (1e3, -1.0, 1e308):
            yield f"{name}={value}", {"settings": {**request.settings, name: value}}
    yield "an additional tensor that is not finite", {"extra": {**request.extra, "x": torch.tensor(float("inf"))}}
    yield "a large additional tensor", {"extra": {**request.extra, "x": torch.zeros(2**24 + 1, dtype=torch.int8)}}
    if request.extra:
        yield "no additional tensors", {"extra": {}}
        # It would lead the client away from the state, which is otherwise harmless.
        yield "a control variate in the first round", {"extra": changed(request.extra, with_value(1.0))}
        yield (
            "one value as an additional tensor",
            {"extra": changed(request.extra, lambda value: value.reshape(-1)[:1])},
        )
    if request.state:
        # Another state in the round, such as one that differs in a single value.
        yield "a second training", {"state": changed(request.state, lambda value: value + 1)}
        yield (
            "a second training from almost the same state",
            {"state": changed(request.state, lambda value: value.index_fill(0, torch.tensor([0]), 1e-30))},
        )


def invalid_rows(request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "examples that do not exist", {"stop": 10**6}
    yield "no examples", {"stop": request.start}
    yield "examples in reverse", {"start": request.stop, "stop": request.start}
    if request.stop - request.start >= NUM_PUBLIC:
        # A request for some of the examples can be followed by others, whose sum is limited.
        yield "another order", {"order": 7 if request.order is None else None}
    yield "the largest position", {"stop": 2**53}


def invalid_targets(request: Distill | Feedback) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "no targets", {"targets": {}}
    yield (
        "targets that are not finite",
        {"targets": changed(request.targets, lambda value: value.float() * float("nan"))},
    )
    yield "targets of other examples", {"targets": {name: value[:-1] for name, value in request.targets.items()}}
    if isinstance(request, Distill):
        for number in (0, 10**9, 2**53):
            yield f"{number} epochs", {"num_epochs": number}
        yield "a schedule that ends before", {"num_training_epochs": 0}
        yield "feedback", {"kind": Feedback}
    else:
        yield "a step after the last one", {"step": request.num_training_steps}
        yield "a schedule without steps", {"num_training_steps": 0}
        yield "no feedback", {"feedback": {}}


def hostile_requests(request: Message) -> Iterator[tuple[str, Message]]:
    """Hostile variants of an honest request that the client has just answered."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("a round after the last one", {"round": 10**6}),
        ("the largest round", {"round": 2**53}),
        ("another client", {"client_id": "b" if request.client_id != "b" else "a"}),
        ("no client", {"client_id": ""}),
    ]
    if isinstance(request, (Fit, Evaluate)):
        changes += invalid_states(request)
    if isinstance(request, Fit):
        changes += invalid_training(request)
    if isinstance(request, (Predict, Distill, Feedback)):
        changes += invalid_rows(request)
    if isinstance(request, Predict) and not request.keeps_graph:
        changes.append(("a graph", {"keeps_graph": True}))
    if isinstance(request, (Distill, Feedback)):
        changes += invalid_targets(request)
    for name, fields in changes:
        if fields.pop("kind", None) is Feedback:
            about = {key: getattr(request, key) for key in ("round", "client_id", "order", "start", "stop", "seed")}
            yield name, Feedback(**about, targets=request.targets, feedback={}, step=0, num_training_steps=1)  # type: ignore[attr-defined]
        else:
            yield name, dataclasses.replace(request, **fields)


# ---- The conversation


def ask(directory: Path, method: str, requests: list[tuple[str, Message]]) -> list[tuple[str, Message, Message]]:
    """Send requests to a client that has joined over a network. Return their names, the requests and the replies."""
    name = requests[0][1].client_id
    everyone = build(directory / "server", method)
    alone = build(directory / "client", method, train_dataset={name: everyone.clients[name]})
    engine = NetworkEngine([name], address="127.0.0.1:0", insecure=True, join_timeout=20)
    engine.transport.start([name], settings_of(alone, name))
    replies: list[tuple[str, Message, Message]] = []

    def serve() -> None:
        try:
            engine._note(engine.transport.receive(20))
            kinds = alone.engine.kinds | {kind.kind: kind for kind in (Distill, Feedback, Predict)}
            engine.start(EngineContext(lambda: None, {}, "data", process_group(), kinds=kinds))
            for text, request in requests:
                engine.send(name, lambda client_id, request=request: request, round=request.round)
                replies.extend((text, request, reply) for reply in engine.replies())
        finally:
            engine.transport.stop()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    alone.join(engine.transport.address, client_id=name, insecure=True, connect_timeout=10, refusals=10**6)
    server.join(timeout=20)
    return replies


def check_conversation(directory: Path, method: str) -> int:
    requests: list[tuple[str, Message]] = []
    later: list[tuple[str, Message]] = []
    for request in honest_requests(directory / "honest", method):
        requests.append(("", request))
        # A request with unreadable content counts against the limit of the round.
        (later if isinstance(request, Feedback) else requests).extend(hostile_requests(request))
    first = requests[0][1]
    requests += [*later, ("the same training from another state of the client", first)]
    replies = ask(directory, method, requests)
    assert len(replies) == len(requests)
    for name, request, reply in replies:
        where = f"{method}, {request.kind}, {name}: {str(reply)[:300]}"
        assert isinstance(reply, ClientFailure) == bool(name), where
        if name:
            assert "of a request of kind" in reply.error and "The client agreed to" in reply.error, where
    return sum(bool(name) for name, _ in requests)


@pytest.mark.parametrize(
    "method", [name if name in ("fedavg", "dsfl") else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_client_refuses_hostile_requests_between_honest_ones(tmp_path, method):
    assert check_conversation(tmp_path, method) >= 25


def test_client_leaves_if_it_cannot_read_a_message(tmp_path):
    request = honest_requests(tmp_path / "honest", "fedavg")[0]
    unknown = Predict(0, request.client_id, None, 0, 1, seed=0)
    with pytest.raises(
        ServerRefusedError, match="cannot read a message of the server: Unknown message kind 'predict'"
    ):
        ask(tmp_path, "fedavg", [("", request), ("predictions", unknown)])
