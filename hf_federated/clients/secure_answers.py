"""`SecureAnswers`: what clients answer under secure aggregation, after local training and without their models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.utils import logging

from ..messages import ClientFailure, ClientUpdate, Message, RefusedRequestError
from ..messages.secure_aggregation import SECURE_REQUESTS, MaskedUpdate, OpenFit, SecureFit
from ..messages.validation import UpdateLimits, check_claims
from ..secure_aggregation import SecureAggregation
from ..secure_aggregation.client_session import ClientSession
from ..secure_aggregation.content import fit_digest, survivors_digest
from ..secure_aggregation.credentials import Credentials
from ..secure_aggregation.encoding import statistics_of
from ..utils.weighted_mean import State
from .journal import ClientJournal
from .store import ClientStore


logger = logging.get_logger(__name__)


@dataclass
class _Trained:
    """An encoded update, and the session that masks it."""

    round: int
    digest: bytes
    num_values: int
    # `None` if the values are on disk.
    values: torch.Tensor | None
    # Whether the client has a state after the training, such as that of its optimizer.
    leaves_state: bool
    session: ClientSession | None = None


class SecureAnswers:
    """
    Encodes the updates of clients, and answers the requests of the sessions.

    An encoded update is kept until its client has answered all requests of a session, or until the next round, so that
    a session that fails can be repeated without training again. The secrets of a session exist in memory only.

    Args:
        protocol ([`SecureAggregation`]): The settings, which all parties share.
        aggregation ([`Aggregation`]): The client's instance of the aggregation, with its `max_weight`.
        credentials ([`~hf_federated.secure_aggregation.credentials.Credentials`]): The identity of the client, and the
            identities of the other clients.
        journal ([`~hf_federated.clients.journal.ClientJournal`]): What clients have agreed to.
        store ([`~hf_federated.clients.ClientStore`], *optional*): Keeps the encoded updates. By default, they are in
            memory.
    """

    # A dry round has sessions without values.
    session_class: ClassVar[type[ClientSession]] = ClientSession

    def __init__(
        self,
        protocol: SecureAggregation,
        aggregation: Any,
        credentials: Credentials,
        journal: ClientJournal,
        store: ClientStore | None = None,
    ) -> None:
        self.protocol, self.journal = protocol, journal
        self._aggregation, self._credentials, self._store = aggregation, credentials, store
        # The weight of an update without `max_weight`, for the log.
        self._unlimited = aggregation.on_client()
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
        digest = self.digest_of(request)
        earlier = self.journal.fit_digest(request.client_id, request.round)
        if earlier is not None and earlier != digest.hex():
            raise RefusedRequestError(
                request, "state", "differs from the request that the client has answered", "one training in a round"
            )
        trained = self._trained.get(request.client_id)
        if trained is not None and trained.digest == digest and (has_state or not trained.leaves_state):
            return True
        # Free the memory before the client trains. Clients of earlier rounds did not receive all requests.
        for name in [name for name, each in self._trained.items() if each.round < request.round]:
            self._drop(name)
        self._drop(request.client_id)
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
        client_id, round = request.client_id, request.round
        if update is not None:
            values = self._encode(request, update)
            if isinstance(request, OpenFit):
                return MaskedUpdate(round, client_id, request.session, values)
            self._keep(client_id, _Trained(round, self.digest_of(request), len(values), values, leaves_state))
        trained = self._trained[client_id]
        if trained.session is not None and trained.values is not None:
            trained.session.withdraw(trained.values)
        digest = trained.digest.hex()
        self.journal.note_fit(client_id, round, digest)

        def consent(survivors: list[str]) -> None:
            self.journal.add_consent(client_id, round, digest, survivors_digest(survivors), len(survivors))

        trained.session = self.session_class(
            self.protocol,
            request,
            trained.digest,
            self._credentials,
            trained.num_values,
            lambda: self._values_of(client_id),
            consent,
        )
        return trained.session.advertise()

    def answer(self, request: Message) -> Message:
        """
        Answer a request of a session.

        Args:
            request ([`Message`]): A request of one of the classes in `requests`.

        Returns:
            [`Message`]: The reply, without a nonce. A [`ClientFailure`] if the client takes no part in the session,
            because the secrets of a session exist in the memory of one process.

        Raises:
            RefusedRequestError: If the client did not agree to the request.
        """
        trained = self._trained.get(request.client_id)
        session = None if trained is None else trained.session
        name = getattr(request, "session", "")
        if session is None or session.session != name or session.round != request.round:
            # The server is not dishonest if the client was started again, so this is no refusal.
            text = "the client takes no part in the session, because it was started again or has left the session"
            return ClientFailure(request.round, request.client_id, text)
        reply = session.answer(request)
        if session.is_complete:
            self._drop(request.client_id)
        return reply

    def _encode(self, request: SecureFit, update: ClientUpdate) -> torch.Tensor:
        # The server cannot check the numbers of an update.
        check_claims(update, UpdateLimits())
        self._aggregation.check_extra(update.extra)
        weight, counted = self._unlimited.weight(update), self._aggregation.weight(update)
        if weight > counted:
            logger.warning_once(
                f"Client {update.client_id!r}: the weight of its update is {weight:g} and counts as {counted:g} "
                "(`max_weight` of `secure_aggregation_kwargs`)."
            )
        reference: State = request.state
        accumulator = self._aggregation.accumulator(reference, self._aggregation.update_extra(reference))
        encoding = self.protocol.encoding(accumulator, request.num_clients)
        contribution = accumulator.contribution(update, reference)
        return encoding.encode(contribution, statistics_of(update), request.seed)

    def digest_of(self, request: SecureFit) -> bytes:
        """
        Return the digest of a request of local training.

        Args:
            request ([`SecureFit`]): The request, after the postprocessors have decoded it.
        """
        # The clients of one process share the tensors of the state, whose digest takes as long as sending them.
        if self._last is None or not _is_same(self._last[0], request):
            self._last = request, fit_digest(request)
        return self._last[1]

    # ---- Encoded updates

    def _keep(self, client_id: str, trained: _Trained) -> None:
        self._trained[client_id] = trained
        if self._store is not None:
            self._store.set(client_id, {"values": trained.values})
            trained.values = None

    def _values_of(self, client_id: str) -> torch.Tensor:
        """Return the encoded update of a client, which the caller may change if it is on disk."""
        values = self._trained[client_id].values
        if values is None and self._store is not None:
            values = self._store.get(client_id).get("values")
        if values is None:
            raise RuntimeError(f"The encoded update of client {client_id!r} is missing.")
        return values

    def _drop(self, client_id: str) -> None:
        if self._trained.pop(client_id, None) is not None and self._store is not None:
            self._store.remove(client_id)


def _is_same(first: SecureFit, second: SecureFit) -> bool:
    """Whether two requests have the same digest for certain."""
    shared = first.state is second.state and first.extra is second.extra
    names = ("round", "settings", "returns_state", "max_rows", "num_clients")
    return shared and all(getattr(first, name) == getattr(second, name) for name in names)
