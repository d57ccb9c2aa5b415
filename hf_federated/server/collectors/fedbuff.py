"""`BufferedCollector`: FedBuff, asynchronous aggregation of a buffer of updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ...engines import Plan
from ...messages import ClientUpdate, Message
from ...methods import Round
from ...utils.arguments import require
from ...utils.random import derived_seed
from ..fit_requests import FitRequests
from .base import Collected, CollectorContext, UpdateCollector
from .received import ReceivedUpdates


class BufferedCollector(UpdateCollector):
    """
    FedBuff: a round ends when any `buffer_size` updates have arrived. The other clients continue to train.

    [Federated Learning with Buffered Asynchronous Aggregation](https://arxiv.org/abs/2106.06639) (Nguyen et al.,
    AISTATS 2022), algorithm 1. An update `y_i − x^v` of a client that started from the state `x^v` of round `v`
    arrives in round `t`. The method aggregates it as the state `x^t + s(t − v) (y_i − x^v)` with
    `s(τ) = 1 / √(1 + τ)`, so that each averaging algorithm works unchanged. Each round starts new clients of its
    cohort until `clients_per_round` clients train; the paper starts a client as soon as another one has finished.

    | paper | here |
    |---|---|
    | `K` | `buffer_size` |
    | `η_g` | `server_lr` of [`FedOpt`] |
    | clients that train concurrently | `clients_per_round` of [`FederatedConfig`] |

    Args:
        buffer_size (`int`, *optional*, defaults to `10`): Number of accepted updates of a round.
        max_staleness (`int`, *optional*): Largest `t − v`. An older request is withdrawn. Defaults to no
            limit.
        order (`Sequence[str]`, *optional*): Client ids in the order in which to use their updates, such as
            `recorded_order` of another run. By default, clients on other machines have the order of their replies, and
            simulated clients that of a seeded model of their speeds (exponentially distributed durations).

    Attributes:
        recorded_order (`list[str]`): The clients in the order in which their updates were used.

    Requirements:
        An averaging algorithm without additional tensors. Clients in one process or on other machines.

    Relations:
        - [`SynchronousCollector`] waits for the slowest client. With `buffer_size` equal to `clients_per_round`, the
          result is the same.

    Example:

    ```python
    >>> from hf_federated.server.collectors import BufferedCollector

    >>> BufferedCollector(buffer_size=3)
    BufferedCollector(buffer_size=3)
    ```
    """

    name: ClassVar[str] = "fedbuff"
    holds_requests: ClassVar[bool] = True

    def __init__(
        self, buffer_size: int = 10, max_staleness: int | None = None, order: Sequence[str] | None = None
    ) -> None:
        require("buffer_size", buffer_size, buffer_size >= 1, "at least 1")
        require("max_staleness", max_staleness, max_staleness is None or max_staleness >= 0, "at least 0")
        self.buffer_size, self.max_staleness, self.order = buffer_size, max_staleness, order

    def start(self, context: CollectorContext) -> None:
        super().start(context)
        self.recorded_order: list[str] = []
        # The open request of each client, and the simulated time at which the client replies.
        self._requests: dict[str, FitRequests] = {}
        self._finish: dict[str, float] = {}
        self._time = 0.0

    def collect(self, round: Round) -> Collected:
        engine, requests = self.context.engine, FitRequests(self.context.fit, round)
        for client_id, older in list(self._requests.items()):
            if self.max_staleness is not None and round.number - older.round.number > self.max_staleness:
                engine.withdraw(client_id)
                del self._requests[client_id]
        idle = [client_id for client_id in round.clients if client_id not in self._requests]
        for client_id in idle[: len(round.cohort) - len(self._requests)]:
            uniform = derived_seed(self.context.fit.seed, "duration", client_id, round.number) / 2**32
            self._finish[client_id] = self._time - math.log1p(-uniform)
            self._send(client_id, requests)
        received, replied = ReceivedUpdates(self.context, round, requests), []
        while self._requests and len(replied) - received.num_failed < self.buffer_size:
            reply = next(engine.replies(clients=self._next_clients()))
            answered = self._requests.pop(reply.client_id)
            self._time = max(self._time, self._finish.pop(reply.client_id))
            self.recorded_order.append(reply.client_id)
            replied.append(reply.client_id)
            received.add(reply, lambda message, answered=answered: self._move(answered, message, round))
        return received.settle(Plan(round.number, tuple(replied), requests.message_for))

    def _send(self, client_id: str, requests: FitRequests) -> None:
        self._requests[client_id] = requests
        fire = self.context.fire
        self.context.engine.send(
            client_id, requests.message_for, lambda client_id: fire("on_client_begin", client_id=client_id)
        )

    def _next_clients(self) -> Sequence[str] | None:
        """Return the client whose update is next, or `None` for the first one that replies."""
        if self.order is not None and len(self.recorded_order) < len(self.order):
            return [self.order[len(self.recorded_order)]]
        return [min(self._requests, key=lambda name: self._finish[name])] if self.context.engine.trains_here else None

    def _move(self, requests: FitRequests, reply: Message, round: Round) -> ClientUpdate:
        """Return an update with its change of an older state as a change of the current state."""
        update, staleness = requests.receive(reply), round.number - requests.round.number
        if staleness == 0:
            return update
        moved = dict(update.state)
        for name, value in round.state.items():
            if value.is_floating_point():
                change = update.state[name].double() - requests.round.state[name].double()
                moved[name] = (value.double() + change / math.sqrt(1 + staleness)).to(value.dtype)
        return replace(update, state=moved)

    def state_dict(self) -> dict[str, Any]:
        rounds = {requests.round.number: requests.state_dict() for requests in self._requests.values()}
        versions = {client_id: requests.round.number for client_id, requests in self._requests.items()}
        times = {"time": self._time, "finish": dict(self._finish)}
        return {"rounds": rounds, "versions": versions, "order": list(self.recorded_order), **times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        rounds = {number: FitRequests.load(self.context.fit, saved) for number, saved in state["rounds"].items()}
        self._time, self._finish, self.recorded_order = state["time"], dict(state["finish"]), list(state["order"])
        for client_id, number in state["versions"].items():
            self._send(client_id, rounds[number])
