"""`BufferedCollector`: FedBuff, asynchronous aggregation of a buffer of updates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from ...engines import Plan
from ...messages import Message
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
    AISTATS 2022), algorithm 1. A client that started from the state `x^v` of round `v` sends `y`, which arrives in
    round `t`. The algorithm averages it as `x^t + s(t − v) (y − x^v)` with `s(τ) = 1 / √(1 + τ)`. Each round starts
    new clients of its cohort until `clients_per_round` clients train; the paper starts one as soon as one finishes.
    `K` of the paper is `buffer_size`, `η_g` is `server_lr` of [`FedOpt`], the concurrency is `clients_per_round`.

    Args:
        buffer_size (`int`, *optional*, defaults to `10`): Number of accepted updates of a round.
        max_staleness (`int`, *optional*): Largest `τ`. An older request is withdrawn. Defaults to no limit.
        order (`Sequence[str]`, *optional*): Clients in the order in which to use their replies, such as
            `recorded_order` of another run. Defaults to the order of arrival. Simulated clients have
            exponentially distributed durations, drawn from the seed of the run.

    Requirements:
        An averaging algorithm whose updates are parameters. Clients in one process or on other machines.

    Relations:
        - [`SynchronousCollector`] waits for the cohort, as does `buffer_size` equal to `clients_per_round`.

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
        # The open request of each client, the simulated time at which the client replies, and the present time.
        self._requests: dict[str, FitRequests] = {}
        self._finish: dict[str, float] = {}
        self._time = 0.0

    def collect(self, round: Round) -> Collected:
        engine, requests = self.context.engine, FitRequests(self.context.fit, round)
        oldest = -math.inf if self.max_staleness is None else round.number - self.max_staleness
        for client_id in [name for name, older in self._requests.items() if older.round.number < oldest]:
            engine.withdraw(client_id)
            del self._requests[client_id], self._finish[client_id]
        idle = [client_id for client_id in round.clients if client_id not in self._requests]
        for client_id in idle[: len(round.cohort) - len(self._requests)]:
            uniform = derived_seed(self.context.fit.seed, "duration", client_id, round.number) / 2**32
            self._finish[client_id] = self._time - math.log1p(-uniform)
            self._send(client_id, requests)
        received = ReceivedUpdates(self.context, round, requests)
        replied: list[str] = []
        while self._requests and len(replied) - received.num_failed < self.buffer_size:
            reply = self._next_reply(len(self.recorded_order) + len(replied))
            self._time = max(self._time, self._finish.pop(reply.client_id))
            answered = self._requests.pop(reply.client_id)
            scale = 1 / math.sqrt(1 + round.number - answered.round.number)
            replied.append(reply.client_id)
            received.add(reply, functools.partial(answered.receive_in, round, scale))
        self.recorded_order += replied
        return received.settle(Plan(round.number, tuple(replied), requests.message_for))

    def _send(self, client_id: str, requests: FitRequests) -> None:
        self._requests[client_id] = requests
        on_dispatch = self.context.on_dispatch
        self.context.engine.send(client_id, requests.message_for, on_dispatch, round=requests.round.number)

    def _next_reply(self, num_used: int) -> Message:
        """Wait for the reply of the next client in the order, or for any reply without an order."""
        clients: list[str] | None = None
        if self.order is not None and num_used < len(self.order):
            clients = [self.order[num_used]]
        elif self.context.engine.trains_here:
            clients = [min(self._requests, key=lambda client_id: self._finish[client_id])]
        for reply in self.context.engine.replies(clients=clients):
            return reply
        raise ValueError(f"`order` names client {clients}, which has no open request. Use the settings of its run.")

    def state_dict(self) -> dict[str, Any]:
        rounds = {requests.round.number: requests.state_dict() for requests in self._requests.values()}
        numbers = {client_id: requests.round.number for client_id, requests in self._requests.items()}
        clock = {"time": self._time, "finish": dict(self._finish)}
        return {"rounds": rounds, "numbers": numbers, "order": list(self.recorded_order), **clock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rounds = {number: FitRequests.load(self.context.fit, saved) for number, saved in state["rounds"].items()}
        self._time, self._finish, self.recorded_order = state["time"], dict(state["finish"]), list(state["order"])
        for client_id, number in state["numbers"].items():
            self._send(client_id, rounds[number])
