"""`ReceivedUpdates`: the updates of a round while they arrive, and the decision which of them are accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

from transformers.utils import logging

from ...aggregation import Aggregation, lora_inexactness
from ...aggregation.lora_factors import FactorPair
from ...engines import Plan
from ...messages import ClientUpdate, Message
from ...messages.validation import InvalidUpdateError
from ...methods import Accumulator, Method, Round
from ...utils.errors import RoundFailedError
from ..bound_update import Group, GroupedAccumulator, Magnitude
from ..client_metrics import RoundSummary
from ..fit_requests import FitRequests
from .base import Collected, CollectorContext


logger = logging.get_logger(__name__)

# The metrics, the magnitude and the group of an update, or the reason for which it was rejected.
Outcome = tuple[dict[str, float], Magnitude, Group] | str


class ReceivedUpdates:
    """
    Adds the updates of a round to its sums, in groups of similar norms, and rejects updates.

    Args:
        context ([`CollectorContext`]): What the collector works with.
        round ([`Round`]): The round.
        requests ([`FitRequests`]): The requests of the round, whose expected tensors the sums have.

    Attributes:
        outcomes (`dict[str, Outcome]`): Metrics, magnitude and group of each update that passed the checks, or the
            reason for which it was rejected.
    """

    def __init__(self, context: CollectorContext, round: Round, requests: FitRequests) -> None:
        self._context = context
        self._round = round
        self._requests = requests
        self._methods = context.fit.methods
        self._averaging = cast(Aggregation, self._methods[0])
        context.bound.begin_round(requests.expected_state, requests.averaged_extra, round.number)
        # A method of a user can send factors of other shapes.
        is_known = self._averaging.needs_lora or not requests.individual
        has_lora = is_known and "lora_" in " ".join(requests.expected_state)
        # Most methods receive whole updates.
        self._completes = type(self._averaging).whole_update is not Aggregation.whole_update
        self._pairs: list[FactorPair] = []
        if has_lora:
            self._pairs = lora_inexactness.exchanged_pairs(self._averaging, requests.expected_state)
        # A bound method would be a reference cycle, which keeps the state of the round until a garbage collection.
        build = functools.partial(_build_sums, self._methods[0], requests, self._pairs)
        self._sums = GroupedAccumulator(build, round.cohort, context.bound.max_ratio)
        self._measured: dict[str, tuple[dict[str, float], Magnitude]] = {}
        # The round whose request each update answers.
        self._numbers: dict[str, int] = {}
        self._first_error: Exception | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.num_failed = 0

    def add(self, reply: Message, receive: Callable[[Message], tuple[ClientUpdate, float | None]]) -> None:
        """
        Check a reply and add its update to the sums.

        Args:
            reply ([`Message`]): The reply.
            receive (`Callable`): Returns the checked update of a reply, and the norm of its change, as
                [`FitRequests.receive`].
        """
        context, round = self._context, self._round
        try:
            update, norm = receive(reply)
            state = self._requests.expected_for(update.client_id) if norm is None else None
            magnitude = context.bound.measure(update, state, norm)
        except InvalidUpdateError as error:
            self._first_error = self._first_error or context.engine.last_error or error
            self._reject(reply.client_id, str(error))
            self.num_failed += 1
            return
        if self._completes:
            update = self._averaging.whole_update(update, self._requests.expected_state)
        sums = self._sums.add(update.client_id, context.bound.group_of(magnitude))
        context.fire("on_client_end", update=update)
        round.sums = sums
        for method in self._methods:
            method.accept(round, update)
        if self._pairs:
            lora_inexactness.add_factors(sums, update, self._averaging)
        round.sums = None
        self._measured[update.client_id] = (update.reported_metrics, magnitude)
        self._numbers[update.client_id] = update.round
        for client_id in self._sums.limit():
            where = f"Client {client_id!r}, round {round.number + 1}"
            self._reject(
                client_id,
                f"{where}: its change is far above the median of the other clients, whose sizes are far apart.",
            )

    def _reject(self, client_id: str, reason: str) -> None:
        self.outcomes[client_id] = reason
        logger.warning(f"Rejected: {reason}")

    def settle(self, plan: Plan) -> Collected:
        """
        Decide which updates are accepted, when the updates of all processes are known.

        Args:
            plan ([`Plan`]): The plan whose clients replied.

        Raises:
            RoundFailedError: If fewer than `min_clients` updates are accepted.
        """
        engine, bound, round = self._context.engine, self._context.bound, self._round
        groups = self._sums.by_client()
        passed = {client_id: (*self._measured[client_id], group) for client_id, group in groups.items()}
        outcomes = engine.gather(plan, self.outcomes | passed)
        measured = {client_id: outcome for client_id, outcome in outcomes.items() if not isinstance(outcome, str)}
        out_of_bounds = bound.decide(
            {client_id: magnitude for client_id, (_, magnitude, _) in measured.items()},
            {client_id: group for client_id, (_, _, group) in measured.items()},
            round.number,
        )
        for reason in out_of_bounds.values():
            logger.warning(f"Rejected: {reason}")
        # In the order of the cohort.
        rejected = {
            client_id: outcome if isinstance(outcome, str) else out_of_bounds[client_id]
            for client_id, outcome in outcomes.items()
            if isinstance(outcome, str) or client_id in out_of_bounds
        }
        accepted = {
            client_id: metrics for client_id, (metrics, _, _) in measured.items() if client_id not in out_of_bounds
        }
        self._check_enough(plan.cohort, rejected, len(accepted))
        if (steps := self._context.fit.steps).changes_requests:
            steps.accept({client_id: number for client_id, number in self._numbers.items() if client_id in accepted})
        sums = self._sums.settle(bound.is_accepted)
        engine.reduce(plan, sums)
        if self._pairs:
            round.logs.update(lora_inexactness.measure(sums, self._pairs))
        return Collected(sums, RoundSummary.from_clients(accepted, len(rejected), round.number), rejected)

    def _check_enough(self, asked: Sequence[str], rejected: dict[str, str], num_accepted: int) -> None:
        """Raise an error if too few clients remain."""
        round, num_clients = self._round, len(asked) + len(self._round.rejected)
        min_clients, cause = round.min_clients, self._first_error
        first = next(iter({**round.rejected, **rejected}.values()), "the cohort is too small")
        num_spare = num_clients - min_clients
        if len(rejected) + len(round.rejected) > num_spare:
            # Several processes may see further failures before each of them stops. The error counts the failures at
            # which one process stops, so that all engines raise the same error.
            raise RoundFailedError(
                f"Round {round.number + 1}: {num_spare + 1} of {num_clients} clients failed. The remaining "
                f"{min_clients - 1} are fewer than min_clients={min_clients}. The first failure: {first}"
            ) from cause
        if num_accepted < min_clients:
            raise RoundFailedError(
                f"Round {round.number + 1}: {num_accepted} of {num_clients} clients delivered a valid update, but "
                f"min_clients={min_clients}. The first failure: {first}"
            ) from cause


def _build_sums(method: Method, requests: FitRequests, pairs: list[FactorPair]) -> Accumulator:
    """Return empty sums of the updates of a round."""
    sums = method.accumulator(requests.expected_state, requests.expected_extra)
    if pairs:
        lora_inexactness.add_collection(sums, requests.expected_state, pairs)
    return sums
