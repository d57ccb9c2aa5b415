"""Clients of secure aggregation that reply without training, and a server that runs rounds with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from hf_federated import FederatedConfig
from hf_federated.aggregation import build_aggregation
from hf_federated.clients import ClientSampler
from hf_federated.clients.journal import ClientJournal
from hf_federated.clients.secure_answers import SecureAnswers
from hf_federated.engines import Engine
from hf_federated.messages import ClientFailure, ClientUpdate, Message, RefusedRequestError
from hf_federated.messages.secure_aggregation import SecureFit
from hf_federated.secure_aggregation import SecAgg, SecureAggregation
from hf_federated.secure_aggregation.credentials import Credentials, simulated_identity
from hf_federated.server import CollectorContext, FitSettings, RoundLoop, RoundProgress
from hf_federated.server.bound_update import BoundUpdate
from hf_federated.server.collectors.secure import SecureCollector
from hf_federated.utils.errors import RoundFailedError


COHORT = ("a", "b", "c", "d", "e")
HOSTILE = "b"
START = {"w": torch.zeros(5), "v": torch.zeros(2, 3), "n": torch.tensor(3)}
NUM_EXAMPLES = 8
MAX_WEIGHT = 10
# Changes a reply, or replaces it by what an engine could not read.
Spoil = Callable[[Message, Message], Any]


def change_of(client_id: str) -> float:
    """The change of all values by a client. Different sets of clients have different means."""
    return 0.01 * 2.0 ** COHORT.index(client_id) if client_id in COHORT else 0.01


class SecureEngine(Engine):
    """
    Clients that answer in turn, without training.

    Args:
        clients: Ids of the clients.
        protocol: The protocol.
        spoil: Changes the replies of the hostile client.
        train: Changes the updates of all clients before they are encoded.
    """

    def __init__(
        self,
        clients: tuple[str, ...],
        protocol: SecureAggregation,
        spoil: Spoil = lambda request, reply: reply,
        train: Callable[[ClientUpdate], ClientUpdate] = lambda update: update,
    ) -> None:
        super().__init__()
        self._spoil, self._train = spoil, train
        identity = simulated_identity()
        credentials = Credentials(identity, dict.fromkeys(clients, identity.fingerprint))
        aggregation: Any = build_aggregation("fedavg")
        aggregation.max_weight = protocol.max_weight
        self.answers = SecureAnswers(protocol, aggregation, credentials, ClientJournal())
        self.refusals: dict[str, str] = {}

    def _receive(self, clients, until):
        client_id = next(self._waiting(clients))
        request = self._dispatch(client_id, self._requests[client_id])
        reply = dataclasses.replace(self._answer(request), nonce=request.nonce)
        return client_id, self._spoil(request, reply) if client_id == HOSTILE else reply

    def _answer(self, request: Message) -> Message:
        try:
            if not isinstance(request, SecureFit):
                return self.answers.answer(request)
            if self.answers.has_trained(request, True):
                return self.answers.begin(request)
            change = change_of(request.client_id)
            state = {key: each + change if each.is_floating_point() else each for key, each in request.state.items()}
            metrics = {"loss": 1.0, "total_flos": 1e9}
            update = ClientUpdate(request.round, request.client_id, state, NUM_EXAMPLES, 40, 2, metrics=metrics)
            return self.answers.begin(request, self._train(update))
        except RefusedRequestError as error:
            self.refusals[request.client_id] = str(error)
            return ClientFailure(request.round, request.client_id, str(error))
        except ValueError as error:
            return ClientFailure(request.round, request.client_id, str(error))

    def save(self, directory):
        return {}

    def load(self, directory, digests):
        pass


class SecureRounds:
    """Rounds of secure aggregation. Each round starts from the same state."""

    def __init__(
        self,
        engine: SecureEngine,
        clients: tuple[str, ...] = COHORT,
        num_rounds: int = 1,
        max_update_ratio: float = math.inf,
        min_clients: int = 3,
    ) -> None:
        method = build_aggregation("fedavg")
        method.setup(num_rounds, len(clients))
        context = CollectorContext(
            engine,
            FitSettings([method], seed=0),
            RoundProgress(lambda: (), num_rounds),
            BoundUpdate(max_update_ratio),
        )
        collector = SecureCollector(engine.answers.protocol)
        collector.start(context)
        config = FederatedConfig(num_rounds=num_rounds, min_clients=min_clients)
        self.loop = RoundLoop(context, collector, ClientSampler(clients, clients_per_round=1.0, seed=0), config, START)

    def run(self, round: int = 0) -> tuple[float, set[str], Any]:
        """Return the change of all values by a round, the clients that are not in the sum, and the summary."""
        self.loop.state = {name: value.clone() for name, value in START.items()}
        summary = self.loop.run(round)
        values = torch.cat([self.loop.state[name].flatten() for name in ("w", "v")])
        assert torch.equal(self.loop.state["n"], START["n"])
        assert float(values.max() - values.min()) < 1e-5 or HOSTILE not in self.loop.round.rejected
        return float(values[0]), set(self.loop.round.rejected), summary


__all__ = [
    "COHORT",
    "HOSTILE",
    "MAX_WEIGHT",
    "NUM_EXAMPLES",
    "RoundFailedError",
    "SecAgg",
    "SecureEngine",
    "SecureRounds",
]
