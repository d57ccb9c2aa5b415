"""The round loop: one conversation of the server with its clients. It depends on no method and no `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from transformers.utils import logging

from ..clients import ClientSampler, client_seed
from ..config import FederatedConfig
from ..engines import Plan
from ..messages import ClientFailure, ClientUpdate, Evaluate, Fit, Message, Metrics
from ..methods import Round
from ..methods.round import MessageFor
from ..postprocessing import narrowed
from ..utils.errors import RoundFailedError
from ..utils.weighted_mean import State
from .client_metrics import RoundSummary
from .collectors import CollectorContext, UpdateCollector


logger = logging.get_logger(__name__)

# Name of the server in messages to its own worker.
SERVER_NAME = "server"


@dataclass(eq=False)
class RoundLoop:
    """
    Runs rounds on an engine.

    Args:
        context ([`~hf_federated.server.collectors.CollectorContext`]): The engine, the methods and the settings of the
            requests.
        collector ([`~hf_federated.server.collectors.UpdateCollector`]): Obtains the updates of a round.
        sampler ([`ClientSampler`]): Draws the cohort of a round.
        config ([`FederatedConfig`]): The configuration, with `federation_seed` filled in.
        state (`dict[str, torch.Tensor]`): The global state before the first round.
        write (`Callable[[dict[str, torch.Tensor]], None]`): Writes a global state into the server's model.
        train_on_server (`Callable[[Fit], ClientUpdate]`, *optional*): Trains the global model on the server's own
            examples, as a client would, for a method that needs it.

    Attributes:
        state (`dict[str, torch.Tensor]`): The global state.
        round ([`Round`]): The current or the last round.
        context ([`~hf_federated.server.collectors.CollectorContext`]): The engine, the methods and the settings.
    """

    context: CollectorContext
    collector: UpdateCollector
    sampler: ClientSampler
    config: FederatedConfig
    state: State
    write: Callable[[State], None] = field(default_factory=lambda: lambda state: None)
    train_on_server: Callable[[Fit], ClientUpdate] | None = None

    def __post_init__(self) -> None:
        self.round = Round(0, (), self.state)
        self._min_clients = self.config.min_clients_of(self.sampler.num_sampled)

    def run(self, number: int) -> RoundSummary:
        """
        Run a round. If the round fails, the model holds the global state of the last finished aggregation.

        Args:
            number (`int`): Round number, from 0.

        Returns:
            [`RoundSummary`]: Sums and means over the accepted updates.

        Raises:
            RoundFailedError: If the server accepted fewer than `min_clients` updates.
        """
        try:
            return self._run(number)
        except BaseException:
            self.write(self.state)
            raise

    def _run(self, number: int) -> RoundSummary:
        fire, fit, cohort = self.context.fire, self.context.fit, self.sampler(number)
        self.round = round = Round(number, cohort, self.state, self._min_clients, exchange=self._exchange)
        fire("on_round_begin")
        self._train_server(round)
        for method in fit.methods:
            method.begin(round)
        round.check_enough()
        collected = self.collector.collect(round)
        round.sums, round.metrics = collected.sums, collected.summary.clients
        if fit.steps.steps:
            round.sums = fit.steps.on_sums(collected.sums, round, fit.seed)
        round.rejected.update(collected.rejected)
        fire("on_aggregate")
        for method in fit.methods:
            round.state = method.finish(round)
        self._keep(round)
        fire("on_distill")
        for method in fit.methods:
            method.after(round)
        round.sums = None
        if round.state is not self.state:
            self._keep(round)
        return replace(collected.summary, num_failed=len(round.rejected))

    def _keep(self, round: Round) -> None:
        """Keep the state of a round as the global state, and write it into the model."""
        self.write(round.state)
        self.state = round.state

    def _train_server(self, round: Round) -> None:
        """Train the global model on the server's own examples, for a method that needs it."""
        for method in self.context.fit.methods:
            if not method.trains_on_server:
                continue
            if self.train_on_server is None:
                raise RuntimeError("The server has no examples to train on. Pass `server_dataset` to the trainer.")
            seed = client_seed(self.config.federation_seed or 0, SERVER_NAME, round.number)
            message = Fit(round.number, SERVER_NAME, seed, round.state, settings=method.fit_settings())
            method.on_server_update(self.train_on_server(message))

    def _exchange(self, phase: str, clients: Sequence[str], message_for: MessageFor) -> dict[str, Message]:
        """
        Send additional messages within a round, and return the replies in the order of the clients.

        Clients are left out after a failure that leaves too few clients.
        """
        num_spare = max(len(self.round.clients) - self.round.min_clients, 0)
        plan = Plan(self.round.number, tuple(clients), message_for, phase, max_failures=num_spare)
        return self.context.progress.collect(self.context.engine, plan)

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
        context, number = self.context, self.round.number
        state = narrowed(self.state, context.fit.dtype) if context.fit.returns_state else {}
        plan = Plan(number, tuple(client_ids), lambda client_id: Evaluate(number, client_id, state), "evaluation")
        results: dict[str, dict[str, float] | str] = {}
        first_error: Exception | None = None
        try:
            with closing(context.progress.run(context.engine, plan)) as replies:
                for reply in replies:
                    if isinstance(reply, Metrics):
                        results[reply.client_id] = reply.metrics
                        continue
                    first_error = first_error or context.engine.last_error
                    error = reply.error if isinstance(reply, ClientFailure) else f"a {type(reply).__name__}"
                    reason = f"Client {reply.client_id!r} could not be evaluated: {error}"
                    results[reply.client_id] = reason
                    logger.warning(reason)
        finally:
            # With `exchange_dtype`, the clients evaluated a state of lower precision.
            self.write(self.state)
        outcomes = context.engine.gather(plan, results)
        evaluated = {client_id: outcome for client_id, outcome in outcomes.items() if isinstance(outcome, dict)}
        if client_ids and not evaluated:
            raise RoundFailedError(str(next(iter(outcomes.values())))) from first_error
        return evaluated
