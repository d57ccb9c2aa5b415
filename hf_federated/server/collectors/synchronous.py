"""`SynchronousCollector`: the server waits for the clients of the cohort."""

from __future__ import annotations

from contextlib import closing
from typing import ClassVar

from ...engines import Plan
from ...methods import Round
from ..fit_requests import FitRequests
from .base import Collected, UpdateCollector
from .received import ReceivedUpdates


class SynchronousCollector(UpdateCollector):
    """
    Asks all clients of the cohort, and waits for them or until `round_deadline` of [`FederatedConfig`].

    Updates that change the global state much more than other updates are rejected (`max_update_ratio`).

    Example:

    ```python
    >>> from hf_federated.server.collectors import SynchronousCollector

    >>> SynchronousCollector.name
    'synchronous'
    ```
    """

    name: ClassVar[str] = "synchronous"

    def collect(self, round: Round) -> Collected:
        context = self.context
        requests = FitRequests(context.fit, round)
        plan = Plan(
            round.number,
            round.clients,
            requests.message_for,
            deadline=context.deadline,
            min_replies=round.min_clients,
        )
        received = ReceivedUpdates(context, round, requests)
        num_spare = len(plan.cohort) - round.min_clients
        with closing(context.progress.run(context.engine, plan, context.on_dispatch)) as replies:
            for reply in replies:
                received.add(reply, requests.receive)
                del reply  # Free the memory before the next client trains.
                if received.num_failed > num_spare:
                    # Too few clients remain.
                    break
        return received.settle(plan)
