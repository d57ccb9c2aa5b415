"""`ServerSession`: the server in one session of secure aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from ..messages import ClientFailure, Message
from ..messages.secure_aggregation import (
    AdvertisedKeys,
    ConfirmSurvivors,
    KeyShares,
    ShareKeys,
    SubmitMasked,
    SurvivorsSignature,
    Unmask,
    UnmaskShares,
)
from ..messages.validation import is_refusal
from ..security.masks import generate_exchange_key, shared_secret
from .base import SecureAggregation
from .client_session import KEY_BYTES, keys_content, survivors_content
from .content import byte_strings, check_byte_strings, encode, roster_digest, settings_digest, to_bytes
from .credentials import Credentials
from .masks import RosterView, UnmaskError


class SessionFailedError(RuntimeError):
    """
    A session failed.

    Args:
        reason (`str`): Why it failed.
        is_final (`bool`, *optional*, defaults to `False`): Whether another session would fail, too.
    """

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class ServerSession:
    """
    The server in one session: the keys, shares and signatures that it forwards, and the checks of the replies.

    Args:
        protocol ([`SecureAggregation`]): The settings, which all parties share.
        session (`str`): Id of the session.
        round (`int`): Round number, from 0.
        min_clients (`int`): Smallest number of clients in the sum.

    Attributes:
        failures (`dict[str, str]`): Why clients are not in the sum, by client id.
        survivors (`list[str]`): The clients in the sum, sorted.
        signatures (`dict[str, torch.Tensor]`): Signatures of the survivors, by client id.
    """

    def __init__(self, protocol: SecureAggregation, session: str, round: int, min_clients: int) -> None:
        self.session, self.round = session, round
        self.min_clients = max(min_clients, protocol.min_survivors)
        self.failures: dict[str, str] = {}
        self.survivors: list[str] = []
        self._protocol, self._settings = protocol, settings_digest(protocol.agreed())
        self._private_key, _ = generate_exchange_key()
        self._advertised: dict[str, AdvertisedKeys] = {}
        self._members: dict[str, tuple[str, ...]] = {}
        self._thresholds: dict[str, int] = {}
        self._fit_digest = self._roster = b""
        self._keys: dict[str, bytes] = {}
        self._shares: dict[str, KeyShares] = {}
        self.signatures: dict[str, torch.Tensor] = {}

    # ---- Keys

    def add_keys(self, replies: Mapping[str, Message]) -> None:
        """Add the keys of the clients that have trained."""
        found = {name: reply for name, reply in self._usable(replies) if isinstance(reply, AdvertisedKeys)}
        keys: dict[str, bytes] = {}
        digests: dict[str, bytes] = {}
        for name, reply in found.items():
            try:
                keys[name], digests[name] = self._read_keys(name, reply)
            except ValueError as error:
                self._fail(name, str(error))
        # A client that trained on something else would make all other clients refuse the roster.
        counts = Counter(digests.values())
        self._fit_digest = max(counts, key=lambda each: counts[each], default=b"")
        seen: set[bytes] = set()
        for name in sorted(keys):
            halves = {keys[name][:KEY_BYTES], keys[name][KEY_BYTES:]}
            if digests[name] != self._fit_digest:
                self._fail(name, "it trained on another state or with other settings than the other clients")
            elif seen & halves or len(halves) < 2:
                self._fail(name, "it advertised the key of another client")
            else:
                seen |= halves
                self._keys[name], self._advertised[name] = keys[name], found[name]
        self._check_number(len(self._keys), "have advertised keys")
        self._roster = roster_digest(self._keys)
        clients = sorted(self._keys)
        for name in clients:
            others = self._protocol.neighbors_of(name, clients, self._roster)
            self._members[name] = tuple(sorted([*others, name]))
            self._thresholds[name] = self._protocol.threshold_of(len(clients))

    def _read_keys(self, name: str, reply: AdvertisedKeys) -> tuple[bytes, bytes]:
        fields = {"keys": reply.keys, "identity": reply.identity, "signature": reply.signature}
        parts = byte_strings({**fields, "fit_digest": reply.fit_digest})
        if len(parts["keys"]) != 2 * KEY_BYTES:
            raise ValueError("its keys have another length")
        # An invalid point would make all other clients refuse the roster.
        for half in (parts["keys"][:KEY_BYTES], parts["keys"][KEY_BYTES:]):
            shared_secret(self._private_key, half)
        content = keys_content(self._settings, self.session, self.round, name, parts["fit_digest"], parts["keys"])
        if not Credentials.is_signed(content, parts["signature"], parts["identity"]):
            raise ValueError("the signature of its keys is not valid")
        return parts["keys"], parts["fit_digest"]

    @property
    def num_needed(self) -> int:
        """Number of clients that the next phase needs."""
        return max(self.min_clients, *self._thresholds.values(), 0)

    @property
    def advertised(self) -> tuple[str, ...]:
        """The clients that have advertised keys."""
        return tuple(self._keys)

    def share_keys(self, client_id: str) -> ShareKeys:
        """Return the request for the shares of a client."""
        others = [name for name in self._members[client_id] if name != client_id]
        return ShareKeys(
            self.round,
            client_id,
            self.session,
            {name: self._advertised[name].keys for name in sorted(self._keys)},
            {name: self._advertised[name].identity for name in others},
            {name: self._advertised[name].signature for name in others},
        )

    @property
    def blamed(self) -> frozenset[str]:
        """The clients whose keys or shares most clients of the session refused."""
        reasons = [reason for name, reason in self.failures.items() if name in self._keys]
        # The refusal of a client names the other client.
        votes = Counter(name for name in self._keys for reason in reasons if f"client {name!r}" in reason)
        return frozenset(name for name, number in votes.items() if number > len(self._keys) / 2)

    # ---- Shares and masked updates

    def add_shares(self, replies: Mapping[str, Message]) -> None:
        """Add the shares of the clients."""
        for name, reply in self._usable(replies):
            if not isinstance(reply, KeyShares):
                continue
            if reply.envelopes.keys() != set(self._members[name]) - {name}:
                self._fail(name, "it sent no share for a client")
                continue
            try:
                check_byte_strings(reply.envelopes)
            except ValueError as error:
                self._fail(name, f"its shares cannot be read: {error}")
                continue
            self._shares[name] = reply
        self._check_number(len(self._shares), "have sent shares")
        # A client without enough shares of others refuses to send its update.
        for name in list(self._shares):
            if sum(member in self._shares for member in self._members[name]) < self._thresholds[name]:
                self._fail(name, "too few of its neighbors sent shares")
                del self._shares[name]
        self._check_number(len(self._shares), "can remove their masks")

    @property
    def sharing(self) -> tuple[str, ...]:
        """The clients that have sent shares."""
        return tuple(self._shares)

    def submit(self, client_id: str) -> SubmitMasked:
        """Return the request for the masked update of a client."""
        envelopes = {
            name: self._shares[name].envelopes[client_id]
            for name in self._members[client_id]
            if name != client_id and name in self._shares
        }
        return SubmitMasked(self.round, client_id, self.session, envelopes)

    def set_survivors(self, outcomes: Mapping[str, str | None]) -> None:
        """
        Set the clients whose masked updates are in the sum.

        Args:
            outcomes (`Mapping[str, str | None]`): Why a client is not in the sum, or `None`, by client id.
        """
        for name, failure in outcomes.items():
            if failure is not None:
                self._fail(name, failure)
        self.survivors = sorted(name for name, failure in outcomes.items() if failure is None)
        self._check_number(len(self.survivors), "have sent a masked update")

    # ---- Consent and unmasking

    def confirm(self, client_id: str) -> ConfirmSurvivors:
        """Return the request for the signature of a survivor."""
        return ConfirmSurvivors(self.round, client_id, self.session, self.survivors)

    def add_signatures(self, replies: Mapping[str, Message]) -> None:
        """Add the signatures of the survivors. A client without a signature stays in the sum."""
        content = survivors_content(self.session, self.round, self._fit_digest, self._roster, self.survivors)
        for name, reply in self._usable(replies, is_lost=False):
            if not isinstance(reply, SurvivorsSignature):
                continue
            identity = to_bytes(self._advertised[name].identity)
            if Credentials.is_signed(content, to_bytes(reply.signature), identity):
                self.signatures[name] = reply.signature
        failed = {name: reply.error for name, reply in replies.items() if isinstance(reply, ClientFailure)}
        first = next(iter(failed.items()), None)
        shown = "" if first is None else f". Client {first[0]!r}: {first[1]}"
        for name in self.survivors:
            signed = sum(member in self.signatures for member in self._members[name])
            if signed < self._thresholds[name]:
                raise SessionFailedError(
                    f"{signed} of the clients that have shares of client {name!r} signed the survivors, "
                    f"{self._thresholds[name]} are needed{shown}",
                    # A client that has agreed to another sum of this round never agrees to a second one.
                    is_final=any(map(is_refusal, failed.values())),
                )

    @property
    def signing(self) -> tuple[str, ...]:
        """The clients that have signed the survivors."""
        return tuple(self.signatures)

    def unmask(self, client_id: str) -> Unmask:
        """Return the request for the shares of a survivor."""
        signatures = {
            name: signature
            for name, signature in self.signatures.items()
            if name in self._members[client_id] and name != client_id
        }
        return Unmask(self.round, client_id, self.session, signatures)

    def remove_masks(self, total: torch.Tensor, replies: Mapping[str, Message]) -> None:
        """
        Remove the masks from the sum of the masked updates, in place.

        Args:
            total (`torch.Tensor` of shape `(num_values,)`): The sum, in the ring.
            replies (`Mapping[str, Message]`): Replies to the requests of `unmask`, by client id.

        Raises:
            SessionFailedError: If the shares do not give the masks.
        """
        shares = {
            name: reply for name, reply in self._usable(replies, is_lost=False) if isinstance(reply, UnmaskShares)
        }
        view = RosterView(
            encode(self.session, self._fit_digest),
            {name: keys[KEY_BYTES:] for name, keys in self._keys.items()},
            self._members,
            self._thresholds,
            {name: to_bytes(reply.commitment) for name, reply in self._shares.items()},
            tuple(self.survivors),
            tuple(sorted(self._shares.keys() - set(self.survivors))),
        )
        try:
            self._protocol.server_masks().remove(total, view, shares)
        except UnmaskError as error:
            raise SessionFailedError(str(error)) from error

    def _usable(self, replies: Mapping[str, Message], is_lost: bool = True) -> list[tuple[str, Message]]:
        """Return the replies of this session. The other ones are failures of their clients."""
        usable = []
        for name, reply in replies.items():
            if isinstance(reply, ClientFailure):
                failure: str | None = reply.error
            elif getattr(reply, "session", self.session) != self.session:
                failure = "its reply belongs to another session"
            else:
                failure = None
                usable.append((name, reply))
            if failure is not None and is_lost:
                self._fail(name, failure)
        return usable

    def _fail(self, name: str, reason: str) -> None:
        self.failures[name] = reason

    def _check_number(self, number: int, text: str) -> None:
        if number < self.min_clients:
            first = next(iter(self.failures.items()), None)
            shown = "" if first is None else f" Client {first[0]!r}: {first[1]}"
            smallest = f"at least {self.min_clients} are needed (`min_survivors`, `min_clients`)"
            raise SessionFailedError(f"{number} clients {text}, but {smallest}.{shown}")
