"""Mutated requests to a client: it refuses each one by name, or answers it as a request of an honest server."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from distillation_setup import Recorder, distillation_trainer
from federations import CLIENTS, build_federation
from mutations import mutate
from tiny import tiny_model

from hf_federated import FederatedDataset
from hf_federated.clients import RefusedRequestError
from hf_federated.clients.request_record import RequestRecord
from hf_federated.messages import ClientFailure, Message, read_message


# Averaging with encoded parameters in both directions.
CODECS = ("topk",)
METHODS = ("fedavg", "fedprox", "scaffold", "mutual_kd", *CODECS, "dsfl", "fedid", "feddrs")
SETTINGS: dict[str, dict[str, Any]] = {
    "feddrs": {"num_samples": 6, "sample_length": 5, "num_steps": 3},
    "fedid": {"feedback": "mpl"},
}
AVERAGING = METHODS[:5]


def recorded(directory: Path, method: str) -> tuple[Any, list[Message]]:
    """The worker of the clients after a run, and the requests of the run."""
    recorder = Recorder()
    if method in AVERAGING:
        plain = {"optim": "sgd", "lr_scheduler_type": "constant"} if method == "scaffold" else {}
        more = {"client_model_init": lambda client_id: tiny_model()} if method == "mutual_kd" else {}
        options = {
            "trainer": {"callbacks": [recorder], "eval_dataset": FederatedDataset.from_dict(CLIENTS), **more},
            "num_rounds": 2,
            **plain,
        }
        named = {"exchange_codec": method} if method in CODECS else {"aggregation": method}
        federation = {**named, "evaluate_clients": True}
        trainer = build_federation(directory, CLIENTS, federation=federation, eval_strategy="steps", **options)
    else:
        trainer = distillation_trainer(directory, method, SETTINGS.get(method, {}), record=recorder)
    recorder.trainer = trainer
    trainer.train()
    return trainer.engine.worker, list(recorder.sent)


def check_requests(directory: Path, method: str, number: int, seed: int) -> None:
    worker, requests = recorded(directory, method)
    kinds = {request.kind: type(request) for request in requests}
    client_id = requests[0].client_id
    shapes = {name: value.shape for name, value in worker.models.open(client_id).exchange.tensors.items()}
    draw = random.Random(seed)
    num_read = num_refused = 0
    while num_read < number:
        request = draw.choice(requests)
        worker.agreement.record = RequestRecord()
        try:
            changed = mutate(request, draw)
            message = read_message(changed if isinstance(changed, bytes) else changed.to_bytes(), kinds)
        except (ValueError, TypeError, RuntimeError, AttributeError, OverflowError):
            continue  # It is no message.
        num_read += 1
        reply = worker.handle(message)
        where = f"mutation {num_read} of {method}, seed {seed}: {message}"[:300]
        if isinstance(reply, ClientFailure):
            error = worker.last_error
            # An honest server can also send a state or targets with which a training diverges.
            is_named = isinstance(error, RefusedRequestError) or "ower its learning rate" in str(error)
            is_named |= "ower this client's learning rate" in str(error)
            assert is_named, f"{where}: {error!r}"
            num_refused += "The client agreed to" in reply.error
            continue
        assert worker.last_error is None, where
        # The reply has the form of a reply to the honest request.
        assert reply.kind == request.answered_by and reply.round < worker.agreement.num_rounds, where
        state = getattr(reply, "state", {})
        assert not state or worker.agreement.returns_state, where
        if method not in ("mutual_kd", *CODECS):  # Their clients send compressed changes.
            assert all(state[name].shape == shapes[name] for name in state), where
    assert num_refused > number / 10


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(3)
def test_client_answers_or_refuses_each_of_30_mutated_requests(tmp_path, method):
    check_requests(tmp_path, method, 30, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_client_answers_or_refuses_each_of_1500_mutated_requests(tmp_path, method):
    """12,000 requests in all."""
    check_requests(tmp_path, method, 1500, seed=48)
