"""Messages of secure aggregation. The phases of a round follow each other in the order of the classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from ..utils.fields import MaxEntries, PositiveCount, TensorOf
from .base import Message
from .training import Fit


# Largest number of sessions of a round. A session that fails is repeated with new keys.
MAX_SESSIONS = 3
# Largest number of sessions of a round in which a client takes part. A server that resumes begins a new session.
MAX_ANSWERED_SESSIONS = 64

SessionId = Annotated[str, MaxEntries(64)]
# A byte string as a tensor.
Bytes = Annotated[torch.Tensor, TensorOf(torch.uint8, 1)]


@dataclass(frozen=True)
class SecureFit(Fit):
    """
    Message from the server to a client: train, and keep the update. The reply contains public keys.

    Args:
        session (`str`): Id of the session, random for each session.
        num_clients (`int`): Largest number of clients in the sum. It determines the number of bits of a value.
    """

    kind: ClassVar[str] = "secure_fit"
    answered_by: ClassVar[str] = "advertised_keys"
    max_per_round: ClassVar[int] = MAX_ANSWERED_SESSIONS

    session: SessionId = field(kw_only=True)
    num_clients: PositiveCount = field(kw_only=True)


@dataclass(frozen=True)
class OpenFit(SecureFit):
    """Like [`SecureFit`], but the reply is an encoded update without masks. For simulations (`masks=False`)."""

    kind: ClassVar[str] = "open_fit"
    answered_by: ClassVar[str] = "masked_update"


@dataclass(frozen=True)
class AdvertisedKeys(Message):
    """
    Message from a client to the server: its public keys of a session, after local training.

    Args:
        session (`str`): Id of the session.
        fit_digest (`torch.Tensor` of shape `(32,)`, uint8): SHA-256 of the request of local training, without the
            fields that differ between clients.
        keys (`torch.Tensor` of shape `(64,)`, uint8): The X25519 keys for the shares and for the masks.
        identity (`torch.Tensor`, uint8): Public key of the client's certificate, as DER.
        signature (`torch.Tensor`, uint8): Signature of the client over the other fields and the parameters of the
            protocol.
    """

    kind: ClassVar[str] = "advertised_keys"

    session: SessionId
    fit_digest: Bytes
    keys: Bytes
    identity: Bytes
    signature: Bytes


@dataclass(frozen=True)
class ShareKeys(Message):
    """
    Message from the server to a client: the keys of all clients of the session, the *roster*.

    Args:
        session (`str`): Id of the session.
        keys, identities, signatures (`dict[str, torch.Tensor]`): Fields of [`AdvertisedKeys`] by client id. Signatures
            and identities are those of the clients with which the recipient shares secrets.
    """

    kind: ClassVar[str] = "share_keys"
    answered_by: ClassVar[str] = "key_shares"
    max_per_round: ClassVar[int] = MAX_ANSWERED_SESSIONS

    session: SessionId
    keys: dict[str, torch.Tensor]
    identities: dict[str, torch.Tensor]
    signatures: dict[str, torch.Tensor]


@dataclass(frozen=True)
class KeyShares(Message):
    """
    Message from a client to the server: shares of its secrets, encrypted for other clients.

    Args:
        session (`str`): Id of the session.
        envelopes (`dict[str, torch.Tensor]`, uint8): Ciphertexts by the id of the recipient.
        commitment (`torch.Tensor` of shape `(32,)`, uint8): SHA-256 of the seed of the client's own mask. The server
            checks the seed that it reconstructs from shares. Zeros for LightSecAgg, whose masks have no such seed.
    """

    kind: ClassVar[str] = "key_shares"

    session: SessionId
    envelopes: dict[str, torch.Tensor]
    commitment: Bytes


@dataclass(frozen=True)
class SubmitMasked(Message):
    """
    Message from the server to a client: send the masked update.

    Args:
        session (`str`): Id of the session.
        envelopes (`dict[str, torch.Tensor]`, uint8): Ciphertexts for this client by the id of the sender.
    """

    kind: ClassVar[str] = "submit_masked"
    answered_by: ClassVar[str] = "masked_update"
    max_per_round: ClassVar[int] = MAX_ANSWERED_SESSIONS

    session: SessionId
    envelopes: dict[str, torch.Tensor]


@dataclass(frozen=True)
class MaskedUpdate(Message):
    """
    Message from a client to the server: its masked update.

    Args:
        session (`str`): Id of the session.
        masked (`torch.Tensor` of shape `(num_values,)`): Encoded values and statistics, as integers of the ring.
    """

    kind: ClassVar[str] = "masked_update"

    session: SessionId
    masked: torch.Tensor


@dataclass(frozen=True)
class ConfirmSurvivors(Message):
    """
    Message from the server to a client: sign the set of clients whose updates are summed.

    Args:
        session (`str`): Id of the session.
        survivors (`list[str]`): Ids of these clients, sorted.
    """

    kind: ClassVar[str] = "confirm_survivors"
    answered_by: ClassVar[str] = "survivors_signature"
    max_per_round: ClassVar[int] = MAX_ANSWERED_SESSIONS

    session: SessionId
    survivors: list[str]


@dataclass(frozen=True)
class SurvivorsSignature(Message):
    """
    Message from a client to the server: its signature of the survivors.

    Args:
        session (`str`): Id of the session.
        signature (`torch.Tensor`, uint8): Signature over the session, the round, the request of local training, the
            roster and the survivors.
    """

    kind: ClassVar[str] = "survivors_signature"

    session: SessionId
    signature: Bytes


@dataclass(frozen=True)
class Unmask(Message):
    """
    Message from the server to a client: send the shares that remove the masks from the sum.

    Args:
        session (`str`): Id of the session.
        signatures (`dict[str, torch.Tensor]`, uint8): Signatures of the survivors by client id.
    """

    kind: ClassVar[str] = "unmask"
    answered_by: ClassVar[str] = "unmask_shares"
    max_per_round: ClassVar[int] = MAX_ANSWERED_SESSIONS

    session: SessionId
    signatures: dict[str, torch.Tensor]


@dataclass(frozen=True)
class UnmaskShares(Message):
    """
    Message from a client to the server: its shares. For each client, it contains a share of one secret only.

    Args:
        session (`str`): Id of the session.
        seeds (`dict[str, torch.Tensor]`, *optional*, uint8): Shares of the seeds of survivors, by client id.
        mask_keys (`dict[str, torch.Tensor]`, *optional*, uint8): Shares of the mask keys of lost clients.
        mask_sum (`torch.Tensor`, *optional*, int32): For LightSecAgg, the sum of the survivors' shares of their masks
            modulo 2^31 - 1.
    """

    kind: ClassVar[str] = "unmask_shares"

    session: SessionId
    seeds: dict[str, torch.Tensor] = field(default_factory=dict)
    mask_keys: dict[str, torch.Tensor] = field(default_factory=dict)
    mask_sum: torch.Tensor | None = None


# Requests that follow the local training, and all messages of secure aggregation.
SECURE_REQUESTS: tuple[type[Message], ...] = (ShareKeys, SubmitMasked, ConfirmSurvivors, Unmask)
SECURE_MESSAGES: tuple[type[Message], ...] = (
    SecureFit,
    OpenFit,
    AdvertisedKeys,
    KeyShares,
    MaskedUpdate,
    SurvivorsSignature,
    UnmaskShares,
    *SECURE_REQUESTS,
)
