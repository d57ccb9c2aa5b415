"""Mutated replies through rounds of a federation: each one is accepted or is one client's failure, by name."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from mutations import mutate

from hf_federated import FederatedConfig
from hf_federated.aggregation import build_aggregation
from hf_federated.clients import ClientSampler
from hf_federated.codecs import Codec, Int4, Int8, PowerSGD, TopK
from hf_federated.distillation import Cohort, PredictionCodec
from hf_federated.distillation.codec import rows_of
from hf_federated.distillation.public_rows import PublicRows
from hf_federated.engines import Engine, Plan
from hf_federated.messages import ClientUpdate, Metrics, Predictions
from hf_federated.messages.validation import UpdateLimits
from hf_federated.postprocessing import (
    EncodeState,
    EncodeUpdate,
    Memories,
    run_client_receive,
    run_client_send,
)
from hf_federated.server import (
    CollectorContext,
    FitSettings,
    RoundLoop,
    RoundProgress,
    StepMemories,
    SynchronousCollector,
)
from hf_federated.server.bound_update import BoundUpdate


COHORT = ("a", "b", "c", "d", "e", "f")
HOSTILE = "b"


class MutatingEngine(Engine):
    """Clients that reply without training. The replies of one client are mutated."""

    def __init__(self, draw: random.Random, reply_to) -> None:
        super().__init__()
        self._draw = draw
        self._reply_to = reply_to

    def _receive(self, clients, until):
        client_id = next(self._waiting(clients))
        request = self._dispatch(client_id, self._requests[client_id])
        reply = dataclasses.replace(self._reply_to(request), nonce=request.nonce)
        return client_id, mutate(reply, self._draw) if client_id == HOSTILE else reply

    def save(self, directory):
        return {}

    def load(self, directory, digests):
        pass


# ---- Averaging


START = {"w": torch.ones(5), "v": torch.zeros(2, 3), "n": torch.tensor(3)}
# With blocks of several scales, indices as places, and factors of rank 2.
LARGE_START = {"w": torch.ones(600), "v": torch.zeros(12, 10), "n": torch.tensor(3)}


def run_rounds(
    aggregation: str, num_rounds: int, seed: int, codec: Codec | None = None
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Run rounds with a client whose replies are mutated. Return the weights and the names of all rejected clients."""
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    steps = [] if codec is None else [EncodeState(codec), EncodeUpdate(codec)]
    memories: dict[str, Memories] = {client_id: {} for client_id in COHORT}
    method = build_aggregation(aggregation)
    method.setup(num_rounds, len(COHORT))
    rejected: set[str] = set()

    def train(request):
        request = run_client_receive(steps, request, memories[request.client_id])
        changes = {
            name: value + 0.01 * torch.randn(value.shape, generator=noise)
            for name, value in request.state.items()
            if value.is_floating_point()
        }
        metrics = {"loss": 1.0, "grad_norm": 2.0, "total_flos": 1e9}
        update = ClientUpdate(
            request.round, request.client_id, {**request.state, **changes}, 8, 40, 2, metrics=metrics
        )
        return run_client_send(steps, update, request, memories[request.client_id])

    context = CollectorContext(
        MutatingEngine(draw, train),
        FitSettings(
            [method], seed=0, steps=StepMemories(steps), limits=lambda client_id, max_rows: UpdateLimits(8, 2, 80)
        ),
        RoundProgress(lambda: (), num_rounds),
        BoundUpdate(30.0),
    )
    collector = SynchronousCollector()
    collector.start(context)
    loop = RoundLoop(
        context,
        collector,
        ClientSampler(COHORT, clients_per_round=1.0, seed=0),
        FederatedConfig(num_rounds=num_rounds, min_clients=len(COHORT) - 1),
        START if codec is None else LARGE_START,
    )
    for round in range(num_rounds):
        summary = loop.run(round)
        assert summary.num_clients + summary.num_failed == len(COHORT)
        assert abs(summary.loss) < 1e6
        for client_id, reason in loop.round.rejected.items():
            assert f"Client {client_id!r}, round {round + 1}" in reason and len(reason) < 3000
        rejected |= loop.round.rejected.keys()
    return loop.state, rejected


@pytest.mark.parametrize(
    ("aggregation", "num_rounds"),
    [
        ("fedavg", 150),
        ("median", 40),
        pytest.param("fedavg", 9000, marks=pytest.mark.slow),
        pytest.param("fedopt", 2000, marks=pytest.mark.slow),
        pytest.param("krum", 1000, marks=pytest.mark.slow),
    ],
)
def test_mutated_updates_are_failures_of_their_client(aggregation, num_rounds, caplog):
    weights, rejected = run_rounds(aggregation, num_rounds, seed=1)
    assert rejected == {HOSTILE}
    assert any(HOSTILE in text for text in caplog.messages)
    # The honest clients walk randomly with steps of 0.01, and the bound limits what the mutated updates add.
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert max(float((weights[name] - start).abs().max()) for name, start in {"w": 1.0, "v": 0.0}.items()) < 5


@pytest.mark.parametrize(
    ("codec", "num_rounds"),
    [
        (Int4(), 40),
        (TopK(0.02), 40),
        (PowerSGD(2), 40),
        pytest.param(Int8(), 2000, marks=pytest.mark.slow),
        pytest.param(Int4(), 2000, marks=pytest.mark.slow),
        pytest.param(TopK(0.2), 2000, marks=pytest.mark.slow),
        pytest.param(TopK(0.02), 2000, marks=pytest.mark.slow),
        pytest.param(PowerSGD(2), 2000, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_mutated_encoded_updates_are_failures_of_their_client(codec, num_rounds):
    weights, rejected = run_rounds("fedavg", num_rounds, seed=3, codec=codec)
    assert rejected == {HOSTILE}
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert max(float((weights[name] - start).abs().max()) for name, start in {"w": 1.0, "v": 0.0}.items()) < 5


# ---- Distillation


def ask_for_predictions(num_rounds: int, seed: int) -> int:
    """Ask for predictions and losses with a client whose replies are mutated. Return the number of its failures."""
    draw = random.Random(seed)
    codec = PredictionCodec("float16", top_k=2)
    num_failures = 0

    def reply_to(request):
        if request.kind == "predict":
            logits = torch.randn(request.stop - request.start, 3)
            return Predictions(request.round, request.client_id, codec.encode({"logits": logits}))
        return Metrics(request.round, request.client_id, 4, {"distillation_loss": 0.5})

    for round in range(num_rounds):
        engine = MutatingEngine(draw, reply_to)

        def ask(phase, client_ids, message_for, engine=engine, round=round):
            return engine.collect(Plan(round, tuple(client_ids), message_for, phase))

        def decode(values, client_id):
            return codec.decode(values, rows_of(3))["rows"]

        cohort = Cohort(round, {name: {"num_examples": 4} for name in COHORT}, ask, decode, seed)
        rows = PublicRows(0, 4)
        predictions = cohort.predict(rows, (4, 3))
        assert all(bool(value.isfinite().all()) and float(value.abs().max()) <= 1e6 for value in predictions.values())
        losses = cohort.distill(rows, {"values": torch.zeros(4, 3)}, 1, 1)
        assert set(COHORT) - {HOSTILE} <= losses.keys() and all(abs(loss) < 1e13 for loss in losses.values())
        assert cohort.rejected.keys() <= {HOSTILE}
        assert all(f"Client {HOSTILE!r}, round {round + 1}" in text for text in cohort.rejected.values())
        num_failures += len(cohort.rejected)
    return num_failures


@pytest.mark.parametrize("num_rounds", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_predictions_are_failures_of_their_client(num_rounds):
    assert ask_for_predictions(num_rounds, seed=2) > num_rounds / 3
