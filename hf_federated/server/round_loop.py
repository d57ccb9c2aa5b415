"""The round: sample, send, collect, check, aggregate. Nothing here knows an algorithm or a Trainer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from ..clients import ClientSampler, RowLimit, client_seed
from ..engines import Engine, Plan
from ..messages import CLASS_COUNT, ClientFailure, ClientUpdate, Evaluate, Fit, Message, Metrics
from ..messages.validation import InvalidUpdateError, RoundFailedError, check_update
from ..postprocessing import Postprocessor, cast_floating, run_server_side
from .callbacks import ServerState


logger = logging.get_logger(__name__)


KNOWN_METRICS = {"num_examples", "num_tokens", "num_steps", "loss", "grad_norm", "learning_rate", "total_flos"}


@dataclass
class RoundSummary:
    """
    What a round came to, over its accepted updates.

    Args:
        loss (`float`): Mean training loss of the clients, by examples.
        grad_norm (`float`, *optional*): Mean of the clients' last gradient norms.
        learning_rate (`float`, *optional*): Mean of the clients' last learning rates.
        num_clients (`int`): Accepted updates.
        num_failed (`int`): Failed or refused ones.
        num_examples (`int`): Rows that the accepted clients trained on, once each.
        num_tokens (`int`): Input tokens, where they are counted.
        total_flos (`float`): Floating point operations.
        further (`dict[str, float]`): What else the clients' trainers log, under their names: the mean over clients.
        clients (`dict[str, dict[str, float]]`): Each client's own metrics.
    """

    loss: float = 0.0
    grad_norm: float | None = None
    learning_rate: float | None = None
    num_clients: int = 0
    num_failed: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    total_flos: float = 0.0
    further: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def from_clients(cls, rows: dict[str, dict[str, float]], num_failed: int) -> RoundSummary:
        """Sum up the clients' metrics; each row has `num_examples`, `num_tokens`, `num_steps` and what it logged."""

        def mean(name: str) -> float | None:
            values = [row[name] for row in rows.values() if name in row]
            return statistics.fmean(values) if values else None

        told = dict.fromkeys(name for row in rows.values() for name in row if name not in KNOWN_METRICS)
        names = [name for name in told if not name.startswith(CLASS_COUNT)]
        weights = [max(row["num_examples"], 1) for row in rows.values()]
        losses = [row.get("loss", 0.0) for row in rows.values()]
        return cls(
            loss=sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights),
            grad_norm=mean("grad_norm"),
            learning_rate=mean("learning_rate"),
            num_clients=len(rows),
            num_failed=num_failed,
            num_examples=int(sum(row["num_examples"] for row in rows.values())),
            num_tokens=int(sum(row["num_tokens"] for row in rows.values())),
            total_flos=sum(row.get("total_flos", 0.0) for row in rows.values()),
            further={name: mean(name) or 0.0 for name in names},
            clients=rows,
        )


class RoundLoop:
    """
    Runs one round after the other on an engine.

    Args:
        engine ([`Engine`]): Where clients run.
        server ([`ServerState`]): The global state, changed in place.
        sampler ([`ClientSampler`]): Who takes part.
        seed (`int`): Of the run.
        min_clients (`int`): Accepted updates below which a round fails.
        postprocessors (`Sequence[Postprocessor]`): Their server sides run here.
        fire (`Callable`): `fire(event, **kwargs)` tells the callbacks.
        write (`Callable[[dict[str, torch.Tensor]], None]`): Puts a global state into the server's model.
        sent_dtype (`torch.dtype`, *optional*): Of what clients are sent; its own by default.
        sends_state (`bool`, *optional*, defaults to `True`): Whether the global state goes to the clients.
        returns_state (`bool`, *optional*, defaults to `True`): Whether what they make of it comes back.
        row_limit ([`RowLimit`], *optional*): How many rows clients train on at most; all by default.
    """

    def __init__(
        self,
        engine: Engine,
        server: ServerState,
        sampler: ClientSampler,
        seed: int,
        min_clients: int,
        postprocessors: Sequence[Postprocessor],
        fire: Callable[..., Any],
        write: Callable[[dict[str, torch.Tensor]], None],
        sent_dtype: torch.dtype | None = None,
        sends_state: bool = True,
        returns_state: bool = True,
        row_limit: RowLimit | None = None,
    ) -> None:
        self.engine = engine
        self.server = server
        self._sampler = sampler
        self._seed = seed
        self._min_clients = min_clients
        self._postprocessors = postprocessors
        self._fire = fire
        self._write = write
        self._sent_dtype = sent_dtype
        self._sends_state = sends_state
        self._returns_state = returns_state
        self._row_limit = row_limit
        server.ask = self._ask
        server.min_clients = min_clients
        # The global state to fall back on.
        self._settled = server.weights
        # What clients are sent, the same for all of them.
        self._sent: dict[str, torch.Tensor] = {}
        self._sent_extra: dict[str, torch.Tensor] = {}
        self._max_rows: int | None = None

    def run(self, round: int) -> RoundSummary:
        """
        Run a round.

        Args:
            round (`int`): Round number, from 0.

        Returns:
            [`RoundSummary`]: What it came to.

        Raises:
            RoundFailedError: If fewer than `min_clients` updates were accepted.

        Whatever ends it, the model holds the global state of the last finished aggregation, and no client's.
        """
        self._settled = self.server.weights
        try:
            return self._run(round)
        except BaseException:
            self._write(self._settled)
            raise

    def _run(self, round: int) -> RoundSummary:
        server = self.server
        server.round = round
        server.cohort = self._sampler(round)
        server.rejected = {}
        server.fit_settings, server.fit_extra, server.expected_extra, server.accumulators = {}, {}, {}, []
        server.check_extra = None
        self._fire("on_round_begin")
        self._sent = cast_floating(server.weights, self._sent_dtype) if self._sends_state else {}
        self._sent_extra = cast_floating(server.fit_extra, self._sent_dtype)
        self._max_rows = None if self._row_limit is None else self._row_limit(server.cohort)
        plan = Plan(round, server.cohort, self._fit_message)
        # Of each client what it counted and logged, or why it was refused.
        outcomes: dict[str, dict[str, float] | str] = {}
        first_error: Exception | None = None
        for reply in self.engine.run(plan, lambda client_id: self._fire("on_client_begin", client_id=client_id)):
            try:
                update = self._accept(reply)
            except InvalidUpdateError as error:
                first_error = first_error or self.engine.last_error or error
                outcomes[reply.client_id] = str(error)
                logger.warning(f"Refused: {error}")
                continue
            self._fire("on_client_end", update=update)
            counts = {
                "num_examples": update.num_examples,
                "num_tokens": update.num_tokens,
                "num_steps": update.num_steps,
            }
            outcomes[update.client_id] = {**update.metrics, **counts}
            del update, reply
        outcomes = self.engine.gather(plan, outcomes)
        rows = {client_id: outcome for client_id, outcome in outcomes.items() if isinstance(outcome, dict)}
        server.rejected = {client_id: reason for client_id, reason in outcomes.items() if isinstance(reason, str)}
        self._sent, self._sent_extra = {}, {}
        if len(rows) < self._min_clients:
            self._raise_failed(len(rows), first_error)
        server.client_metrics = dict(rows)
        for accumulator in server.accumulators:
            self.engine.reduce(plan, accumulator, self._expected, server.expected_extra)
        self._fire("on_aggregate")
        server.accumulators = []
        aggregated = server.weights
        self._write(aggregated)
        self._settled = aggregated
        self._fire("on_distill")
        if server.weights is not aggregated:
            self._write(server.weights)
        return RoundSummary.from_clients(rows, num_failed=len(server.rejected))

    def _fit_message(self, client_id: str) -> Fit:
        server = self.server
        return Fit(
            server.round,
            client_id,
            self._seed_of(client_id),
            self._sent,
            self._sent_extra,
            server.fit_settings,
            self._returns_state,
            self._max_rows,
        )

    @property
    def _expected(self) -> dict[str, torch.Tensor]:
        """What an update's state must look like."""
        return self.server.weights if self._returns_state else {}

    def _ask(self, phase: str, client_ids: Sequence[str], message_for: Callable[[str], Message]) -> dict[str, Message]:
        """Send clients messages beside those of the round, and return the replies in their order."""
        return self.engine.collect(Plan(self.server.round, tuple(client_ids), message_for, phase))

    def _seed_of(self, client_id: str) -> int:
        return client_seed(self._seed, client_id, self.server.round)

    def _accept(self, reply: Message) -> ClientUpdate:
        server = self.server
        if isinstance(reply, ClientFailure):
            raise InvalidUpdateError(f"Client {reply.client_id!r}, round {server.round}: {reply.error}")
        if not isinstance(reply, ClientUpdate):
            raise TypeError(f"A client answered a Fit with {type(reply).__name__}.")
        update = run_server_side(self._postprocessors, reply, self._expected, self._seed_of(reply.client_id))
        check_update(update, server.round, self._expected, server.expected_extra, server.check_extra)
        return update

    def _raise_failed(self, num_accepted: int, cause: Exception | None) -> None:
        server = self.server
        unanswered = set(server.cohort) - set(server.rejected)
        reason = next(iter(server.rejected.values()), f"no answer from {sorted(unanswered)[:3]}")
        raise RoundFailedError(
            f"Round {server.round}: {num_accepted} of {len(server.cohort)} clients delivered a valid update, and "
            f"min_clients={self._min_clients}. The first failure: {reason}"
        ) from cause

    def evaluate(self, client_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """
        Each client's metrics of the current global state on its own evaluation data.

        Args:
            client_ids (`Sequence[str]`): Whom to ask.

        Raises:
            RoundFailedError: If a client fails. The message names it.
        """
        server = self.server
        sent = cast_floating(server.weights, self._sent_dtype) if self._returns_state else {}
        plan = Plan(
            server.round, tuple(client_ids), lambda client_id: Evaluate(server.round, client_id, sent), "evaluation"
        )
        results: dict[str, dict[str, float]] = {}
        try:
            for reply in self.engine.run(plan):
                if not isinstance(reply, Metrics):
                    assert isinstance(reply, ClientFailure)
                    raise RoundFailedError(
                        f"Client {reply.client_id!r} could not be evaluated: {reply.error}"
                    ) from self.engine.last_error
                results[reply.client_id] = reply.metrics
        finally:
            # With `exchange_dtype` clients were sent something narrower.
            self._write(server.weights)
        return self.engine.gather(plan, results)
