"""Mutated messages of secure aggregation: a reply is a failure of its client, a request is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLIENTS
from mutations import mutate
from secure_clients import (
    COHORT,
    HOSTILE,
    MAX_WEIGHT,
    RoundFailedError,
    SecAgg,
    SecureEngine,
    SecureRounds,
    change_of,
)
from secure_server import PEERS, SETTINGS, VICTIM, SecureServer, Session, build, peer_identity

from hf_federated.aggregation import build_aggregation
from hf_federated.clients import RefusedRequestError
from hf_federated.clients.journal import ClientJournal
from hf_federated.clients.request_record import RequestRecord
from hf_federated.clients.secure_answers import SecureAnswers
from hf_federated.messages import KINDS, ClientFailure, Message, read_message
from hf_federated.messages.secure_aggregation import SECURE_MESSAGES, KeyShares, MaskedUpdate
from hf_federated.secure_aggregation.credentials import Credentials


# Largest error of the mean by the rounding.
ROUNDING = 1e-6
NUM_REQUESTS = 5


def mean_of(clients: set[str]) -> float:
    return sum(change_of(name) for name in clients) / len(clients)


def run_mutated(num_rounds: int, seed: int, every: float = 0.3) -> dict[str, int]:
    """Run rounds in which one reply of a client is mutated, or each of its replies. Return the numbers of outcomes."""
    draw = random.Random(seed)
    outcomes = {"exact": 0, "other update": 0, "failed": 0}
    chosen: list[Any] = [0, None, False, False]

    def spoil(request: Message, reply: Message) -> Any:
        chosen[0] += 1
        if chosen[1] is not None and chosen[0] != chosen[1]:
            return reply
        changed = mutate(reply, draw)
        chosen[3] |= isinstance(reply, KeyShares)
        masked = getattr(changed, "masked", None)
        if isinstance(changed, MaskedUpdate) and isinstance(masked, torch.Tensor):
            # A client may send any values. No other party knows them.
            chosen[2] |= masked.dtype == reply.masked.dtype and masked.shape == reply.masked.shape
        return changed

    engine = SecureEngine(COHORT, SecAgg(max_weight=MAX_WEIGHT), spoil)
    rounds = SecureRounds(engine, num_rounds=num_rounds)
    for round in range(num_rounds):
        chosen[:] = [0, None if draw.random() < every else draw.randrange(1, NUM_REQUESTS + 1), False, False]
        try:
            mean, lost, _ = rounds.run(round)
        except RoundFailedError as error:
            assert f"Round {round + 1}" in str(error) and len(str(error)) < 3000
            outcomes["failed"] += 1
            continue
        # A client that receives an envelope which is not authentic leaves the session. No other client can see who is
        # right, so a client can remove a few others from a round.
        others = lost - {HOSTILE}
        assert not others or (chosen[3] and len(others) < len(COHORT) / 2), (round, lost)
        if chosen[2]:
            outcomes["other update"] += 1
            continue
        assert abs(mean - mean_of(set(COHORT) - lost)) < ROUNDING, (round, lost)
        outcomes["exact"] += 1
    return outcomes


@pytest.mark.parametrize(("num_rounds", "seed"), [(60, 1), pytest.param(4000, 49, marks=pytest.mark.slow)])
def test_mutated_reply_gives_an_exact_sum_or_fails_the_round(num_rounds, seed):
    outcomes = run_mutated(num_rounds, seed)
    assert outcomes["exact"] > num_rounds / 3, outcomes


# ---- Requests


READERS = {**KINDS, **{kind.kind: kind for kind in SECURE_MESSAGES}}


class DirectServer(SecureServer):
    """A server whose client is in the same process."""

    def __init__(self, worker: Any) -> None:
        super().__init__(Path())
        self.worker = worker

    def ask(self, request: Message, state: str | None = None) -> Message:
        return self.worker.handle(read_message(request.to_bytes(), READERS))


def recorded_worker(directory: Path) -> Any:
    """The worker of a client, as if it had joined alone."""
    trainer = build(directory, {VICTIM: CLIENTS[VICTIM], **{name: CLIENTS["south"] for name in PEERS}})
    trainer.train()
    worker = trainer.engine.worker
    identity = peer_identity()
    credentials = Credentials(identity, dict.fromkeys([VICTIM, *PEERS], identity.fingerprint))
    aggregation: Any = build_aggregation("fedavg")
    aggregation.max_weight = SETTINGS["max_weight"]
    worker.secure = SecureAnswers(SecAgg(**SETTINGS), aggregation, credentials, ClientJournal())
    return worker


UNREADABLE = (ValueError, TypeError, RuntimeError, AttributeError, OverflowError)


def request_of(session: Session, phase: str) -> Message:
    """The honest request of a phase."""
    if phase == "keys":
        return session.request
    return getattr(session.session, "share_keys" if phase == "share" else phase)(VICTIM)


def check_requests(directory: Path, number: int, seed: int) -> int:
    """Mutate one request of each session. Return how many of them the client refused."""
    server, draw = DirectServer(recorded_worker(directory)), random.Random(seed)
    everyone, num_read, num_refused = sorted([VICTIM, *PEERS]), 0, 0
    while num_read < number:
        server.worker.agreement.record = RequestRecord()
        phase = draw.choice(["keys", "share", "submit", "confirm", "unmask"])
        session = server.begin()
        for earlier in ("share", "submit", "confirm"):
            if phase in ("keys", earlier):
                break
            reply = getattr(session, earlier)()
            assert not isinstance(reply, ClientFailure), reply.error
        request = request_of(session, phase)
        try:
            changed = mutate(request, draw)
            message = read_message(changed if isinstance(changed, bytes) else changed.to_bytes(), READERS)
        except UNREADABLE:
            continue
        num_read += 1
        reply = server.worker.handle(message)
        where = f"mutation {num_read}, seed {seed}: {message}"[:300]
        if isinstance(reply, ClientFailure):
            is_other_session = "takes no part in the session" in reply.error
            is_refused = isinstance(server.worker.last_error, RefusedRequestError)
            assert is_other_session or is_refused, f"{where}: {server.worker.last_error!r}"
            num_refused += 1
            continue
        assert reply.kind == request.answered_by, where
        # The client agrees to one sum only, and reveals one secret of each client.
        assert getattr(message, "survivors", everyone) == everyone, where
        assert not getattr(reply, "mask_keys", {}), where
    return num_refused


@pytest.mark.parametrize(("number", "seed"), [(50, 1), pytest.param(4000, 49, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_client_answers_or_refuses_each_mutated_request(tmp_path, number, seed):
    assert check_requests(tmp_path, number, seed) > number / 3
