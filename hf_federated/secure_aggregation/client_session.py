"""`ClientSession`: one client in one session of secure aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..messages import Message, RefusedRequestError
from ..messages.secure_aggregation import (
    AdvertisedKeys,
    ConfirmSurvivors,
    KeyShares,
    MaskedUpdate,
    SecureFit,
    ShareKeys,
    SubmitMasked,
    SurvivorsSignature,
    Unmask,
    UnmaskShares,
)
from ..security.keys import EncryptionError
from ..security.masks import derive_key, generate_exchange_key, open_sealed, seal, shared_secret
from .base import SecureAggregation
from .content import byte_strings, byte_views, digest, encode, roster_digest, settings_digest, to_tensor
from .credentials import Credentials
from .masks import MaskPlace


KEY_BYTES = 32


def keys_content(settings: bytes, session: str, round: int, client_id: str, fit_digest: bytes, keys: bytes) -> bytes:
    """Return what a client signs when it advertises its keys. `settings` is the digest of the protocol's settings."""
    return encode("keys", session, round, client_id, fit_digest, keys, settings)


def survivors_content(session: str, round: int, fit_digest: bytes, roster: bytes, survivors: list[str]) -> bytes:
    """Return what a client signs when it confirms the survivors."""
    return encode("survivors", session, round, fit_digest, roster, *survivors)


class ClientSession:
    """
    One client in one session: its secrets, what it has sent, and what it refuses.

    The requests of a session arrive once, and in the order of the classes in `messages/secure_aggregation.py`.

    Args:
        protocol ([`SecureAggregation`]): The settings, which all parties share.
        request ([`SecureFit`]): The request of local training.
        fit_digest (`bytes`): Digest of the request.
        credentials ([`~hf_federated.secure_aggregation.credentials.Credentials`]): The client's identity, and the
            identities of the other clients.
        num_values (`int`): Number of values of the encoded update.
        read (`Callable[[], torch.Tensor]`): Returns the encoded update, which the session masks in place.
        consent (`Callable[[list[str]], None]`): Called before the client signs the survivors. It raises `ValueError`
            if the client has signed other survivors.
    """

    def __init__(
        self,
        protocol: SecureAggregation,
        request: SecureFit,
        fit_digest: bytes,
        credentials: Credentials,
        num_values: int,
        read: Callable[[], torch.Tensor],
        consent: Callable[[list[str]], None],
    ) -> None:
        self.session, self.round, self.client_id = request.session, request.round, request.client_id
        self.fit_digest = fit_digest
        self._protocol, self._credentials, self._consent = protocol, credentials, consent
        self._settings = settings_digest(protocol.agreed())
        self._num_clients = request.num_clients
        self._num_values, self._read = num_values, read
        self._share_key, self._share_public = generate_exchange_key()
        self._masks = protocol.client_masks()
        # The kind of the next request.
        self._next: type[Message] | None = ShareKeys
        self._is_complete = False
        self._keys: dict[str, bytes] = {}
        self._identities: dict[str, bytes] = {}
        self._roster = b""
        self._members: tuple[str, ...] = ()
        self._threshold = 0
        self._envelope_keys: dict[str, bytes] = {}
        # What each client, also this one, has sent to this client.
        self._parts: dict[str, bytes] = {}
        self._survivors: list[str] = []

    @property
    def _place(self) -> MaskPlace:
        return MaskPlace(self.client_id, encode(self.session, self.fit_digest))

    def advertise(self) -> AdvertisedKeys:
        """Return the public keys, signed."""
        keys = self._share_public + self._masks.public_key
        content = keys_content(self._settings, self.session, self.round, self.client_id, self.fit_digest, keys)
        return AdvertisedKeys(
            self.round,
            self.client_id,
            self.session,
            to_tensor(self.fit_digest),
            to_tensor(keys),
            to_tensor(self._credentials.identity.public_key),
            to_tensor(self._credentials.sign(content)),
        )

    def answer(self, request: Message) -> Message:
        """
        Answer a request of the session.

        Args:
            request ([`Message`]): One of `SECURE_REQUESTS`.

        Returns:
            [`Message`]: The reply, without a nonce.

        Raises:
            RefusedRequestError: If the client did not agree to the request. The session then ends for this client.
        """
        answers: dict[type[Message], tuple[Callable[[Any], Message], type[Message] | None]] = {
            ShareKeys: (self._share_keys, SubmitMasked),
            SubmitMasked: (self._submit, ConfirmSurvivors),
            ConfirmSurvivors: (self._confirm, Unmask),
            Unmask: (self._unmask, None),
        }
        expected, self._next = self._next, None
        if type(request) is not expected:
            agreed = (
                "no further request of this session" if expected is None else f"a request of kind {expected.kind!r}"
            )
            raise RefusedRequestError(request, "session", "has a request out of order", agreed)
        answer, following = answers[expected]
        try:
            reply = answer(request)
        except EncryptionError as error:
            raise RefusedRequestError(
                request, "session", f"cannot be used: {error}", "keys and shares of clients"
            ) from error
        self._next, self._is_complete = following, following is None
        return reply

    @property
    def is_complete(self) -> bool:
        """Whether the client has answered all requests of the session."""
        return self._is_complete

    def withdraw(self, values: torch.Tensor) -> None:
        """
        End the session, and remove the masks that it added to the encoded update.

        Args:
            values (`torch.Tensor` of shape `(num_values,)`): The update that `read` returned, changed in place.
        """
        self._next = None
        self._masks.remove(values)

    # ---- Phases

    def _share_keys(self, request: ShareKeys) -> KeyShares:
        agreed = "the keys of all clients of the session"
        keys = _read(request, "keys", 2 * KEY_BYTES, agreed)
        identities, signatures = _read(request, "identities", None, agreed), _read(request, "signatures", None, agreed)
        if keys.get(self.client_id) != self._share_public + self._masks.public_key:
            raise RefusedRequestError(request, "keys", "lacks the keys of this client", agreed)
        halves = [half for pair in keys.values() for half in (pair[:KEY_BYTES], pair[KEY_BYTES:])]
        if len(set(halves)) < len(halves):
            raise RefusedRequestError(request, "keys", "contains a key twice", "different keys of all clients")
        smallest = self._protocol.min_survivors
        if not smallest <= len(keys) <= self._num_clients:
            agreed = f"{smallest} (`min_survivors`) to {self._num_clients} clients"
            raise RefusedRequestError(request, "keys", f"contains {len(keys)} clients", agreed)
        self._keys, self._roster = keys, roster_digest(keys)
        try:
            self._threshold = self._protocol.threshold_of(len(keys))
        except ValueError as error:
            raise RefusedRequestError(request, "keys", str(error), "its own settings") from error
        neighbors = self._protocol.neighbors_of(self.client_id, sorted(keys), self._roster)
        self._members = tuple(sorted([*neighbors, self.client_id]))
        for name in neighbors:
            if name not in identities or name not in signatures:
                raise RefusedRequestError(request, "signatures", f"lacks client {name!r}", "signed keys")
            content = keys_content(self._settings, self.session, self.round, name, self.fit_digest, keys[name])
            problem = self._credentials.problem(name, identities[name], content, signatures[name])
            if problem is not None:
                agreed = "keys that the known clients signed for the same settings and the same local training"
                raise RefusedRequestError(request, "signatures", problem, agreed, is_of_peer=True)
        self._identities = {name: identities[name] for name in neighbors}
        parts = self._masks.split(self._place, self._members, self._threshold, self._num_values)
        self._parts = {self.client_id: bytes(parts.pop(self.client_id))}
        envelopes = {name: self._seal(name, part) for name, part in parts.items()}
        return KeyShares(self.round, self.client_id, self.session, envelopes, to_tensor(self._masks.commitment))

    def _submit(self, request: SubmitMasked) -> MaskedUpdate:
        agreed = "the envelopes of clients of the roster"
        try:
            envelopes = byte_views(request.envelopes)
        except ValueError as error:
            raise RefusedRequestError(request, "envelopes", f"cannot be read: {error}", agreed) from error
        if unknown := envelopes.keys() - set(self._members) or envelopes.keys() & {self.client_id}:
            raise RefusedRequestError(request, "envelopes", f"contains client {min(unknown)!r}", agreed)
        for name, envelope in envelopes.items():
            try:
                self._parts[name] = open_sealed(
                    self._envelope_key(name), envelope, encode(self.session, name, self.client_id)
                )
            except EncryptionError as error:
                found = f"contains an envelope of client {name!r} that is not authentic"
                raise RefusedRequestError(request, "envelopes", found, agreed, is_of_peer=True) from error
        if len(self._parts) < self._threshold:
            found = f"contains {len(envelopes)} clients"
            raise RefusedRequestError(request, "envelopes", found, f"at least {self._threshold - 1} clients")
        keys = {name: self._keys[name][KEY_BYTES:] for name in envelopes}
        values = self._read()
        self._masks.add(values, self._place, keys)
        return MaskedUpdate(self.round, self.client_id, self.session, values)

    def _confirm(self, request: ConfirmSurvivors) -> SurvivorsSignature:
        survivors = request.survivors
        agreed = f"a sorted list of at least {self._protocol.min_survivors} clients of the roster, with this client"
        if survivors != sorted(set(survivors)) or not set(survivors) <= self._keys.keys():
            raise RefusedRequestError(request, "survivors", "is no such list", agreed)
        if self.client_id not in survivors:
            raise RefusedRequestError(request, "survivors", "lacks this client", agreed)
        known = [name for name in survivors if name in self._members]
        if silent := [name for name in known if name not in self._parts]:
            found = f"contains client {silent[0]!r}, which has sent no shares"
            raise RefusedRequestError(request, "survivors", found, agreed)
        if len(survivors) < self._protocol.min_survivors or len(known) < self._threshold:
            found = f"has {len(survivors)} clients"
            agreed = f"at least {max(self._threshold, self._protocol.min_survivors)} clients"
            raise RefusedRequestError(request, "survivors", found, agreed)
        try:
            self._consent(survivors)
        except ValueError as error:
            raise RefusedRequestError(request, "survivors", f"is refused: {error}", "one sum of a round") from error
        self._survivors = survivors
        content = survivors_content(self.session, self.round, self.fit_digest, self._roster, survivors)
        return SurvivorsSignature(self.round, self.client_id, self.session, to_tensor(self._credentials.sign(content)))

    def _unmask(self, request: Unmask) -> UnmaskShares:
        agreed = f"the signatures of at least {self._threshold} survivors over the same clients"
        signatures = _read(request, "signatures", None, agreed)
        content = survivors_content(self.session, self.round, self.fit_digest, self._roster, self._survivors)
        signed = {self.client_id}
        for name, signature in signatures.items():
            if name not in self._identities or name not in self._survivors:
                continue
            problem = self._credentials.problem(name, self._identities[name], content, signature)
            if problem is not None:
                raise RefusedRequestError(request, "signatures", problem, agreed)
            signed.add(name)
        if len(signed) < self._threshold:
            raise RefusedRequestError(request, "signatures", f"has {len(signed)} valid signatures", agreed)
        survivors = [name for name in self._survivors if name in self._parts]
        lost = [name for name in self._parts if name not in self._survivors]
        fields = self._masks.reveal(survivors, lost, self._parts)
        return UnmaskShares(self.round, self.client_id, self.session, **_tensors(fields))

    def _seal(self, name: str, part: bytes | memoryview) -> torch.Tensor:
        return to_tensor(seal(self._envelope_key(name), part, encode(self.session, self.client_id, name)))

    def _envelope_key(self, name: str) -> bytes:
        # An envelope to a client and the envelope of the client have the same key.
        if name not in self._envelope_keys:
            secret = shared_secret(self._share_key, self._keys[name][:KEY_BYTES])
            self._envelope_keys[name] = derive_key(secret, "share", digest(self._roster, self.session))
        return self._envelope_keys[name]


def _read(request: Message, field: str, length: int | None, agreed: str) -> dict[str, bytes]:
    try:
        return byte_strings(getattr(request, field), length)
    except ValueError as error:
        raise RefusedRequestError(request, field, f"cannot be read: {error}", agreed) from error


def _tensors(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        field: value if isinstance(value, torch.Tensor) else {name: to_tensor(part) for name, part in value.items()}
        for field, value in fields.items()
    }
