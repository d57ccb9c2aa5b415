"""`SecureAnswers`: what clients answer under secure aggregation, after local training and without their models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.utils import logging

from ..messages import ClientUpdate, Message, RefusedRequestError
from ..messages.secure_aggregation import SECURE_REQUESTS, MaskedUpdate, OpenFit, SecureFit
from ..methods import Method
from ..secure_aggregation import SecureAggregation
from ..secure_aggregation.client_session import ClientSession
from ..secure_aggregation.content import fit_digest, survivors_digest
from ..secure_aggregation.credentials import Credentials
from ..secure_aggregation.encoding import statistics_of
from ..utils.weighted_mean import State
from .journal import ClientJournal


logger = logging.get_logger(__name__)


@dataclass
class _Trained:
    """An encoded update, and the session that masks it."""

    digest: bytes
    values: torch.Tensor
    # Whether the client has a state after the training, such as that of its optimizer.
    leaves_state: bool
    session: ClientSession | None = None


class SecureAnswers:
    """
    Encodes the updates of clients, and answers the requests of the sessions.

    An encoded update stays in memory until the next local training of its client, so that a session that fails can be
    repeated without training again. The secrets of a session also exist in memory only.

    Args:
        protocol ([`SecureAggregation`]): The settings, which all parties share.
        aggregation ([`Method`]): The client's instance of the aggregation, with its `max_weight`.
        credentials ([`~hf_federated.secure_aggregation.credentials.Credentials`]): The identity of the client, and the
            identities of the other clients.
        journal ([`~hf_federated.clients.journal.ClientJournal`]): What clients have agreed to.
    """

    def __init__(
        self, protocol: SecureAggregation, aggregation: Method, credentials: Credentials, journal: ClientJournal
    ) -> None:
        self.protocol, self.journal = protocol, journal
        self._aggregation, self._credentials = aggregation, credentials
        self._trained: dict[str, _Trained] = {}
        # The last request whose digest was computed.
        self._last: tuple[SecureFit, bytes] | None = None

    @property
    def requests(self) -> tuple[type[Message], ...]:
        """The requests that follow the local training."""
        return SECURE_REQUESTS

    def has_trained(self, request: SecureFit, has_state: bool) -> bool:
        """
        Return whether the client still has its encoded update of a request, and the state after the training.

        Args:
            request ([`SecureFit`]): The request, after the postprocessors have decoded it.
            has_state (`bool`): Whether the client has the state after the training of the request.

        Raises:
            RefusedRequestError: If the client has answered another request in this round.
        """
        digest = self._digest_of(request)
        earlier = self.journal.fit_digest(request.client_id, request.round)
        if earlier is not None and earlier != digest.hex():
            raise RefusedRequestError(
                request, "state", "differs from the request that the client has answered", "one training in a round"
            )
        trained = self._trained.get(request.client_id)
        if trained is not None and trained.digest == digest and (has_state or not trained.leaves_state):
            return True
        self._trained.pop(request.client_id, None)  # Free the memory before the client trains.
        return False

    def begin(self, request: SecureFit, update: ClientUpdate | None = None, leaves_state: bool = False) -> Message:
        """
        Begin a session.

        Args:
            request ([`SecureFit`]): The request of local training, after the postprocessors have decoded it.
            update ([`ClientUpdate`], *optional*): The update. By default, the client has its encoded update of the
                request.
            leaves_state (`bool`, *optional*, defaults to `False`): Whether the client has a state after the training.

        Returns:
            [`Message`]: The public keys of the client, without a nonce.

        Raises:
            ValueError: If a value of the update is not finite, or if the aggregation cannot use it.
        """
        if update is not None:
            self._trained[request.client_id] = _Trained(
                self._digest_of(request), self._encode(request, update), leaves_state
            )
        trained = self._trained[request.client_id]
        if trained.session is not None:
            trained.values = trained.session.withdraw()
        if isinstance(request, OpenFit):
            del self._trained[request.client_id]
            return MaskedUpdate(request.round, request.client_id, request.session, trained.values)
        digest = trained.digest
        self.journal.note_fit(request.client_id, request.round, digest.hex())
        consent = self._consent(request.client_id, request.round, digest.hex())
        trained.session = ClientSession(self.protocol, request, digest, self._credentials, trained.values, consent)
        return trained.session.advertise()

    def answer(self, request: Message) -> Message:
        """
        Answer a request of a session.

        Args:
            request ([`Message`]): A request of one of the classes in `requests`.

        Returns:
            [`Message`]: The reply, without a nonce.

        Raises:
            RefusedRequestError: If the client did not agree to the request.
        """
        trained = self._trained.get(request.client_id)
        session = None if trained is None else trained.session
        name = getattr(request, "session", "")
        if session is None or session.session != name or session.round != request.round:
            found = "is none that this client takes part in, because it has been started again or left the session"
            raise RefusedRequestError(request, "session", found, "the sessions that it has begun")
        return session.answer(request)

    def _encode(self, request: SecureFit, update: ClientUpdate) -> torch.Tensor:
        self._aggregation.check_extra(update.extra)
        reference: State = request.state
        accumulator = self._aggregation.accumulator(reference, self._aggregation.update_extra(reference))
        encoding = self.protocol.encoding(accumulator, request.num_clients)
        contribution = accumulator.contribution(update, reference)
        return encoding.encode(contribution, statistics_of(update), request.seed)

    def _digest_of(self, request: SecureFit) -> bytes:
        # The clients of one process share the tensors of the state, whose digest takes as long as sending them.
        if self._last is None or not _is_same(self._last[0], request):
            self._last = request, fit_digest(request)
        return self._last[1]

    def _consent(self, client_id: str, round: int, digest: str) -> Callable[[list[str]], None]:
        def consent(survivors: list[str]) -> None:
            self.journal.add_consent(client_id, round, digest, survivors_digest(survivors), len(survivors))

        return consent


def _is_same(first: SecureFit, second: SecureFit) -> bool:
    """Whether two requests have the same digest for certain."""
    shared = first.state is second.state and first.extra is second.extra
    names = ("round", "settings", "returns_state", "max_rows", "num_clients")
    return shared and all(getattr(first, name) == getattr(second, name) for name in names)
