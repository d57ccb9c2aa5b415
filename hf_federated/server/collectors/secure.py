"""`SecureCollector`: the server learns the sum of the updates of a round, and no single update."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers.utils import logging

from ...aggregation import Aggregation
from ...engines import Plan
from ...messages import ClientFailure, Fit, Message
from ...messages.secure_aggregation import MAX_SESSIONS, MaskedUpdate, OpenFit, SecureFit
from ...methods import Accumulator, Round
from ...secure_aggregation import SecureAggregation
from ...secure_aggregation.content import fit_digest
from ...secure_aggregation.encoding import RingEncoding
from ...secure_aggregation.server_session import ServerSession, SessionFailedError
from ...utils.errors import RoundFailedError
from ...utils.fields import MAX_COUNT
from ...utils.weighted_mean import State
from ..bound_sum import BoundSum
from ..client_metrics import RoundSummary
from ..fit_requests import FitRequests
from .base import Collected, CollectorContext, UpdateCollector
from .round_records import FOLDER, RoundRecord, RoundRecords


logger = logging.get_logger(__name__)

_SESSION_BYTES = 16
# Sums that no number of examples limits.
_REAL_NUMBERS = ("total_flos", "loss")


class SecureCollector(UpdateCollector):
    """
    Asks all clients of the cohort, and obtains the sum of their updates by secure aggregation.

    The trainer uses this collector if `secure_aggregation` of [`FederatedConfig`] is set.

    Args:
        protocol ([`SecureAggregation`]): The protocol.
    """

    name: ClassVar[str] = "secure"

    def __init__(self, protocol: SecureAggregation) -> None:
        self.protocol = protocol

    def start(self, context: CollectorContext) -> None:
        super().start(context)
        self._bound = BoundSum(context.bound)
        # The last round in which each client was in the sum.
        self._counted: dict[str, int] = {}
        # Clients in this process train again when a run resumes.
        needs_records = not context.engine.trains_here and context.output_dir is not None
        folder = Path(context.output_dir or "") / FOLDER
        self._records = RoundRecords(folder, context.first_needed) if needs_records else None
        # Whether the records on disk are those of this run.
        self._owns_records = False

    def collect(self, round: Round) -> Collected:
        requests = FitRequests(self.context.fit, round)
        digest = "" if self._records is None else self._digest(requests)
        record = self._earlier(round, digest)
        if record is None:
            record = self._collect(round, requests, digest)
        else:
            self.context.engine.replay(round.number, record.states)
            for name, (down, up) in record.num_bytes.items():
                self.context.engine.ledger.set_account(round.number, name, bytes_down=down, bytes_up=up)
        for name, reason in record.failures.items():
            logger.warning(f"Client {name!r}, round {round.number + 1}: {reason}")
        return self._collected(round, requests, record)

    def _earlier(self, round: Round, digest: str) -> RoundRecord | None:
        """Return the result of the round in the interrupted run."""
        if self._records is None:
            return None
        if not self._owns_records:
            self._records.clear()
            self._owns_records = True
        return self._records.read(round.number, digest)

    def _digest(self, requests: FitRequests) -> str:
        return fit_digest(self._request(requests, requests.message_for("", is_sent=False), "")).hex()

    def _collect(self, round: Round, requests: FitRequests, digest: str) -> RoundRecord:
        """Run sessions until one succeeds, and write the result."""
        clients, failures = round.clients, dict[str, str]()
        for number in range(MAX_SESSIONS):
            session = self._new_session(round)
            try:
                total = self._sum(session, requests, clients)
                break
            except SessionFailedError as error:
                failures.update(session.failures)
                failures.update(dict.fromkeys(session.blamed, "most clients refused its keys or its shares"))
                # Clients that did not train need not be asked again.
                clients = tuple(name for name in session.advertised if name not in session.blamed)
                is_last = number == MAX_SESSIONS - 1 or len(clients) < session.min_clients
                if is_last or error.is_final:
                    raise RoundFailedError(f"Round {round.number + 1}, secure aggregation: {error}") from (
                        self.context.engine.last_error
                    )
                logger.warning(f"Round {round.number + 1}: the secure aggregation is repeated, because {error}.")
        failures.update(session.failures)
        failures = {name: reason for name, reason in failures.items() if name not in session.survivors}
        if self._records is None:
            return RoundRecord(round.number, digest, total, session.survivors, failures, {}, {})
        engine = self.context.engine
        record = RoundRecord(
            round.number,
            digest,
            total,
            session.survivors,
            failures,
            engine.record_states(),
            {name: list(engine.ledger.account(round.number, name)) for name in round.cohort},
        )
        self._records.write(record)
        return record

    def _new_session(self, round: Round) -> ServerSession:
        name = self.context.engine.shared(f"session, round {round.number}", lambda: secrets.token_hex(_SESSION_BYTES))
        return ServerSession(self.protocol, name, round.number, round.min_clients)

    def _accumulator(self, requests: FitRequests) -> Accumulator:
        return self.context.fit.methods[0].accumulator(requests.expected_state, requests.expected_extra)

    # ---- A session

    def _sum(self, session: ServerSession, requests: FitRequests, clients: tuple[str, ...]) -> torch.Tensor:
        """Run a session, and return the sum of the encoded updates."""
        encoding = self.protocol.encoding(self._accumulator(requests), len(requests.round.cohort))
        if not self.protocol.masks:
            return self._add(session, requests, clients, self._fit(session, requests), encoding)
        session.add_keys(self._ask(session, "training", clients, self._fit(session, requests), is_training=True))
        session.add_shares(self._ask(session, "shares of keys", session.advertised, session.share_keys))
        total = self._add(session, requests, session.sharing, session.submit, encoding)
        session.add_signatures(self._ask(session, "signatures", tuple(session.survivors), session.confirm))
        replies = self._ask(session, "shares of masks", session.signing, session.unmask)
        session.remove_masks(total, replies)
        return total

    def _fit(self, session: ServerSession, requests: FitRequests) -> Callable[[str], SecureFit]:
        return lambda client_id: self._request(requests, requests.message_for(client_id), session.session)

    def _request(self, requests: FitRequests, fit: Fit, session: str) -> SecureFit:
        cls = SecureFit if self.protocol.masks else OpenFit
        fields = {**vars(fit), "accepted_round": self._counted.get(fit.client_id)}
        return cls(**fields, session=session, num_clients=len(requests.round.cohort))

    def _plan(self, session: ServerSession, phase: str, clients: tuple[str, ...], message_for: Any) -> Plan:
        deadline = self.context.deadline
        return Plan(session.round, clients, message_for, phase, deadline, session.num_needed)

    def _ask(
        self,
        session: ServerSession,
        phase: str,
        clients: tuple[str, ...],
        message_for: Callable[[str], Message],
        is_training: bool = False,
    ) -> dict[str, Message]:
        context, plan = self.context, self._plan(session, phase, clients, message_for)
        return context.progress.collect(context.engine, plan, context.on_dispatch if is_training else None)

    def _add(
        self,
        session: ServerSession,
        requests: FitRequests,
        clients: tuple[str, ...],
        message_for: Callable[[str], Message],
        encoding: RingEncoding,
    ) -> torch.Tensor:
        """Ask for the encoded updates, and return their sum over all processes."""
        context, total = self.context, encoding.zeros()
        plan = self._plan(session, "masked updates" if self.protocol.masks else "training", clients, message_for)
        on_dispatch = None if self.protocol.masks else context.on_dispatch
        outcomes: dict[str, str | None] = {}
        with closing(context.progress.run(context.engine, plan, on_dispatch)) as replies:
            for reply in replies:
                outcomes[reply.client_id] = _problem(reply, session, encoding)
                if isinstance(reply, MaskedUpdate) and outcomes[reply.client_id] is None:
                    encoding.add_(total, reply.masked)
                del reply  # Free the memory before the next reply arrives.
        session.set_survivors(context.engine.gather(plan, outcomes))
        # The backends of torch.distributed cannot add 16-bit integers.
        wide = total.to(torch.int32) if total.dtype == torch.int16 else total
        context.engine.sum_(plan, [wide])
        return wide.to(total.dtype)

    # ---- The sum

    def _collected(self, round: Round, requests: FitRequests, record: RoundRecord) -> Collected:
        survivors, failures = record.survivors, record.failures
        accumulator = self._accumulator(requests)
        encoding = self.protocol.encoding(accumulator, len(round.cohort))
        try:
            contribution, statistics = encoding.decode(record.total, len(survivors))
        except ValueError as error:
            raise RoundFailedError(f"Round {round.number + 1}, secure aggregation: {error}") from error
        self._check(round, contribution, statistics, len(survivors))
        accumulator.order = {name: position for position, name in enumerate(round.cohort)}
        reference: State = requests.expected_state
        accumulator.load_sums([contribution], reference)
        numbers = dict.fromkeys(survivors, round.number)
        self._counted.update(numbers)
        if (steps := self.context.fit.steps).changes_requests:
            steps.accept(numbers)
        if statistics["num_clipped"]:
            logger.warning(
                f"Round {round.number + 1}: {statistics['num_clipped']} values of the updates were clipped. Raise "
                "`clip` of `secure_aggregation_kwargs`, or lower the learning rate of the clients."
            )
        round.logs["federated/num_clipped"] = float(statistics["num_clipped"])
        summary = RoundSummary.from_sums(
            statistics,
            {"loss": statistics["loss_weight"]},
            len(survivors),
            len(failures),
        )
        return Collected(accumulator, summary, failures)

    def _check(self, round: Round, contribution: Any, statistics: Any, num_clients: int) -> None:
        """Check what the sum claims. No client can be named."""
        aggregation: Any = self.context.fit.methods[0]
        weight, largest = contribution[aggregation.weighted_mean].weight, num_clients * self.protocol.largest_weight
        # A number of examples or tokens is at least 1. A small sum of the weights would make a change large.
        smallest = min(num_clients, largest) if type(aggregation).weight is Aggregation.weight else 0
        if not (0 < weight and smallest <= weight <= largest):
            raise RoundFailedError(
                f"Round {round.number + 1}: the weights of {num_clients} clients have the sum {weight:g}, but it must "
                f"be above 0 and at most {largest:g} (`max_weight`), and at least {smallest:g}. A client has sent "
                "wrong numbers."
            )
        for name, sums in contribution.items():
            if not 0 <= sums.num_updates <= num_clients:
                raise RoundFailedError(
                    f"Round {round.number + 1}: the mean {name!r} has {sums.num_updates} updates of {num_clients} "
                    "clients. A client has sent wrong numbers."
                )
        for name, value in statistics.items():
            limit = num_clients * (math.inf if name in _REAL_NUMBERS else MAX_COUNT)
            if not (0 <= value <= limit or name == "loss"):
                raise RoundFailedError(
                    f"Round {round.number + 1}: the sum of `{name}` of {num_clients} clients is {value:g}, but it "
                    f"must be from 0 to {limit:g}. A client has sent wrong numbers."
                )
        self._bound.check(contribution["state"], round.state, statistics["num_steps"] / num_clients, round.number)

    def state_dict(self) -> dict[str, Any]:
        return {"counted": dict(self._counted), "bound": self._bound.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._owns_records = True
        self._counted = dict(state["counted"])
        self._bound.load_state_dict(state["bound"])


def _problem(reply: Message, session: ServerSession, encoding: RingEncoding) -> str | None:
    """Return why an encoded update is not used."""
    if isinstance(reply, ClientFailure):
        return reply.error
    if not isinstance(reply, MaskedUpdate) or reply.session != session.session:
        return "its reply belongs to another session"
    return encoding.problem(reply.masked)
