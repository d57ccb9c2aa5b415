"""The round loop: sample, send, collect, check, aggregate. It does not depend on an algorithm or on a `Trainer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from transformers.utils import logging

from ..clients import ClientSampler, RowLimit, client_seed
from ..config import FederatedConfig
from ..engines import Engine, Plan
from ..messages import ClientFailure, ClientUpdate, Evaluate, Fit, Message, Metrics
from ..messages.validation import InvalidUpdateError, UpdateLimits, check_claims, check_update
from ..postprocessing import Postprocessor, cast_floating, exchange_dtype, run_server_side
from ..utils.errors import RoundFailedError
from .bound_update import BoundUpdate, ClientGroups, Group, Magnitude
from .callbacks import ServerState
from .client_metrics import RoundSummary
from .progress import RoundProgress


logger = logging.get_logger(__name__)

# The metrics, the magnitude and the group of an update, or the reason for which it was rejected.
Outcome = tuple[dict[str, float], Magnitude, Group] | str
# Fires an event of the round on the trainer's callbacks.
Fire = Callable[..., Any]


class RoundLoop:
    """
    Runs rounds on an engine.

    Args:
        engine ([`Engine`]): Runs the clients.
        server ([`ServerState`]): The global state, changed in place.
        sampler ([`ClientSampler`]): Draws the cohort of a round.
        config ([`FederatedConfig`]): The configuration, with `federation_seed` filled in.
        postprocessors (`Sequence[Postprocessor]`): Steps whose server sides run on every update.
        fire (`Callable`): `fire(event, **kwargs)` calls the trainer's callbacks.
        write (`Callable[[dict[str, torch.Tensor]], None]`): Writes a global state into the server's model.
        sends_state (`bool`, *optional*, defaults to `True`): Whether clients receive the global state.
        row_limit ([`RowLimit`], *optional*): Limits the number of examples that a client trains on.
        progress ([`~hf_federated.server.progress.RoundProgress`], *optional*): Shows how far a round is.
        limits (`Callable[[str, int | None], UpdateLimits]`, *optional*): `limits(client_id, max_rows)` returns the
            limits of what an update of a client may claim, if the client trains on at most `max_rows` examples. By
            default, there are none.
        bound ([`~hf_federated.server.bound_update.BoundUpdate`], *optional*): Rejects updates with a change that is
            too large. By default, there is no bound.
    """

    def __init__(
        self,
        engine: Engine,
        server: ServerState,
        sampler: ClientSampler,
        config: FederatedConfig,
        postprocessors: Sequence[Postprocessor],
        fire: Fire,
        write: Callable[[dict[str, torch.Tensor]], None],
        sends_state: bool = True,
        row_limit: RowLimit | None = None,
        progress: RoundProgress | None = None,
        limits: Callable[[str, int | None], UpdateLimits] = lambda client_id, max_rows: UpdateLimits(),
        bound: BoundUpdate | None = None,
    ) -> None:
        self.engine = engine
        self.server = server
        self._sampler = sampler
        self._config = config
        self._postprocessors = postprocessors
        self._fire = fire
        self._write = write
        self._sends_state = sends_state
        self._row_limit = row_limit
        # The largest number of examples of a client in this round.
        self._max_rows: int | None = None
        self._progress = progress or RoundProgress(lambda: (), config.num_rounds or 1)
        self._limits = limits
        self._bound = BoundUpdate(math.inf) if bound is None else bound
        server.ask = self._ask

    def run(self, round: int) -> RoundSummary:
        """
        Run a round. If the round fails, the model holds the global state of the last finished aggregation.

        Args:
            round (`int`): Round number, from 0.

        Returns:
            [`RoundSummary`]: Sums and means over the accepted updates.

        Raises:
            RoundFailedError: If the server accepted fewer than `min_clients` updates.
        """
        before = self.server.weights
        try:
            return self._run(round)
        except BaseException:
            aggregated = self.server.aggregated
            self._write(before if aggregated is None else aggregated)
            raise

    def _run(self, round: int) -> RoundSummary:
        server, config = self.server, self._config
        server.begin_round(round, self._sampler(round))
        self._fire("on_round_begin")
        server.min_clients = config.min_clients_of(len(server.cohort))
        self._bound.begin_round(server.expected_state, server.averaged_extra, round)
        plan = Plan(
            round,
            server.cohort,
            self._fit_messages(),
            deadline=config.round_deadline,
            min_replies=server.min_clients,
        )
        outcomes, first_error = self._collect_updates(plan)
        accepted = self._settle(self.engine.gather(plan, outcomes))
        self._check_failures(first_error)
        self._check_enough(len(accepted), first_error)
        server.client_metrics = dict(accepted)
        server.accumulators = [grouped.settle(self._bound.is_accepted) for grouped in server.grouped]
        server.grouped = []
        for accumulator in server.accumulators:
            self.engine.reduce(plan, accumulator)
        self._fire("on_aggregate")
        server.accumulators = []
        server.aggregated = server.weights
        self._write(server.weights)
        self._fire("on_distill")
        if server.weights is not server.aggregated:
            self._write(server.weights)
        return RoundSummary.from_clients(accepted, num_failed=len(server.rejected), round=round)

    def _collect_updates(self, plan: Plan) -> tuple[dict[str, Outcome], Exception | None]:
        """
        Train the clients of this process. Stop at a failure after which too few clients remain.

        Returns:
            `dict[str, Outcome]`: Metrics, magnitude and group of each update that passed the checks, or the reason for
                which the server rejected it.
            `Exception`, *optional*: The error of the first rejected update.
        """
        outcomes: dict[str, Outcome] = {}
        measured: dict[str, tuple[dict[str, float], Magnitude]] = {}
        groups = ClientGroups(self.server.grouped, self._bound.max_ratio)
        first_error: Exception | None = None
        num_failed = 0
        replies = self._progress.run(
            self.engine, plan, lambda client_id: self._fire("on_client_begin", client_id=client_id)
        )
        with closing(replies):
            for reply in replies:
                try:
                    update = self._accept(reply)
                    magnitude = self._bound.measure(update)
                except InvalidUpdateError as error:
                    first_error = first_error or self.engine.last_error or error
                    outcomes[reply.client_id] = str(error)
                    logger.warning(f"Rejected: {error}")
                    num_failed += 1
                    if num_failed > self._num_spare:
                        break
                    continue
                group = groups.add(update.client_id, self._bound.group_of(magnitude))
                self._fire("on_client_end", update=update, group=group)
                measured[update.client_id] = (update.reported_metrics, magnitude)
                del update, reply  # Free the memory before the next client trains.
                for client_id in groups.limit():
                    outcomes[client_id] = (
                        f"Client {client_id!r}, round {self.server.round + 1}: its change is far above the median of "
                        "the other clients, whose sizes are far apart."
                    )
                    logger.warning(f"Rejected: {outcomes[client_id]}")
        outcomes |= {client_id: (*measured[client_id], group) for client_id, group in groups.by_client().items()}
        return outcomes, first_error

    def _settle(self, outcomes: dict[str, Outcome]) -> dict[str, dict[str, float]]:
        """
        Decide which updates are accepted, when the updates of all processes are known.

        Returns:
            `dict[str, dict[str, float]]`: Metrics of the accepted updates. `rejected` of the server has the others.
        """
        measured = {client_id: outcome for client_id, outcome in outcomes.items() if not isinstance(outcome, str)}
        magnitudes = {client_id: magnitude for client_id, (_, magnitude, _) in measured.items()}
        groups = {client_id: group for client_id, (_, _, group) in measured.items()}
        out_of_bounds = self._bound.decide(magnitudes, groups, self.server.round)
        for reason in out_of_bounds.values():
            logger.warning(f"Rejected: {reason}")
        rejected = {client_id: outcome for client_id, outcome in outcomes.items() if isinstance(outcome, str)}
        # In the order of the cohort.
        self.server.rejected = {
            client_id: rejected.get(client_id) or out_of_bounds[client_id]
            for client_id in outcomes
            if client_id in rejected or client_id in out_of_bounds
        }
        return {
            client_id: metrics for client_id, (metrics, _, _) in measured.items() if client_id not in out_of_bounds
        }

    @property
    def _num_spare(self) -> int:
        """Number of clients of the cohort that may fail."""
        return len(self.server.cohort) - self.server.min_clients

    def _fit_messages(self) -> Callable[[str], Fit]:
        """Return the function that builds this round's messages, which share the tensors of the global state."""
        server = self.server
        dtype = exchange_dtype(self._config.exchange_dtype)
        state = cast_floating(server.weights, dtype) if self._sends_state else {}
        extra = cast_floating(server.fit_extra, dtype)
        settings, returns_state = server.fit_settings, server.returns_state
        self._max_rows = max_rows = None if self._row_limit is None else self._row_limit(server.cohort)
        return lambda client_id: Fit(
            server.round, client_id, self._seed_of(client_id), state, extra, settings, returns_state, max_rows
        )

    def _ask(self, phase: str, client_ids: Sequence[str], message_for: Callable[[str], Message]) -> dict[str, Message]:
        """
        Send additional messages within a round, and return the replies in the order of the clients.

        Clients are left out after a failure that leaves too few clients.
        """
        num_spare = max(len(client_ids) - self.server.min_clients, 0)
        plan = Plan(self.server.round, tuple(client_ids), message_for, phase, max_failures=num_spare)
        return self._progress.collect(self.engine, plan)

    def _seed_of(self, client_id: str) -> int:
        return client_seed(self._config.federation_seed or 0, client_id, self.server.round)

    def _accept(self, reply: Message) -> ClientUpdate:
        server = self.server
        if isinstance(reply, ClientFailure):
            raise InvalidUpdateError(f"Client {reply.client_id!r}, round {server.round + 1}: {reply.error}")
        assert isinstance(reply, ClientUpdate)  # The engine refuses another reply to a `Fit`.
        where = f"Client {reply.client_id!r}, round {server.round + 1}"
        check_claims(reply, self._limits(reply.client_id, self._max_rows))
        try:
            reply = reply.to(server.device)
            update = run_server_side(
                self._postprocessors, reply, server.expected_state, self._seed_of(reply.client_id)
            )
        except InvalidUpdateError:
            raise
        except Exception as error:
            raise InvalidUpdateError(f"{where}, postprocessing: {type(error).__name__}: {error}") from error
        check_update(update, server.expected_state, server.expected_extra, server.extra_checks)
        for check in server.update_checks:
            try:
                check(update)
            except ValueError as error:
                raise InvalidUpdateError(f"{where}: {error}") from error
        return update

    def _check_failures(self, cause: Exception | None) -> None:
        """Raise an error if too few clients remain."""
        server, num_spare, min_clients = self.server, self._num_spare, self.server.min_clients
        if len(server.rejected) <= num_spare:
            return
        # Several processes may see further failures before each of them stops. The error counts the failures at which
        # one process stops, so that all engines raise the same error.
        raise RoundFailedError(
            f"Round {server.round + 1}: {num_spare + 1} of {len(server.cohort)} clients failed. The remaining "
            f"{min_clients - 1} are fewer than min_clients={min_clients}. The first failure: "
            f"{next(iter(server.rejected.values()))}"
        ) from cause

    def _check_enough(self, num_accepted: int, cause: Exception | None) -> None:
        server, min_clients = self.server, self.server.min_clients
        if num_accepted >= min_clients:
            return
        reason = next(iter(server.rejected.values()), "the cohort is too small")
        raise RoundFailedError(
            f"Round {server.round + 1}: {num_accepted} of {len(server.cohort)} clients delivered a valid update, but "
            f"min_clients={min_clients}. The first failure: {reason}"
        ) from cause

    def evaluate(self, client_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """
        Evaluate the current global state on each client's own evaluation data.

        Args:
            client_ids (`Sequence[str]`): Ids of the clients to evaluate.

        Returns:
            `dict[str, dict[str, float]]`: Metrics by client id, without the clients that failed. The log names these.

        Raises:
            RoundFailedError: If every client fails. The message contains the first failure.
        """
        server = self.server
        state = cast_floating(server.expected_state, exchange_dtype(self._config.exchange_dtype))
        plan = Plan(
            server.round, tuple(client_ids), lambda client_id: Evaluate(server.round, client_id, state), "evaluation"
        )
        results: dict[str, dict[str, float] | str] = {}
        first_error: Exception | None = None
        try:
            with closing(self._progress.run(self.engine, plan)) as replies:
                for reply in replies:
                    if isinstance(reply, Metrics):
                        results[reply.client_id] = reply.metrics
                        continue
                    assert isinstance(reply, ClientFailure)  # The engine refuses another reply to an `Evaluate`.
                    first_error = first_error or self.engine.last_error
                    reason = f"Client {reply.client_id!r} could not be evaluated: {reply.error}"
                    results[reply.client_id] = reason
                    logger.warning(reason)
        finally:
            # With `exchange_dtype`, the clients evaluated a state of lower precision.
            self._write(server.weights)
        outcomes = self.engine.gather(plan, results)
        evaluated = {client_id: outcome for client_id, outcome in outcomes.items() if isinstance(outcome, dict)}
        if client_ids and not evaluated:
            raise RoundFailedError(str(next(iter(outcomes.values())))) from first_error
        return evaluated
