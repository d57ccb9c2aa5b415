"""The masks of a session: what a client adds to its update, and what the server removes from the sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ..messages.secure_aggregation import UnmaskShares


class UnmaskError(ValueError):
    """The masks cannot be removed from a sum. The session is repeated with new keys."""


@dataclass(frozen=True)
class MaskPlace:
    """
    Where a mask is used. It makes the masks of different sessions and requests different.

    Args:
        client_id (`str`): Id of the client.
        context (`bytes`): Session and digest of the request of local training.
    """

    client_id: str
    context: bytes


class ClientMasks(ABC):
    """The secrets of a client in one session. They are drawn from the operating system, and exist in memory only."""

    # Public key of 32 bytes for masks that clients derive in pairs.
    public_key: bytes
    # SHA-256 of a secret that the server reconstructs from shares, for a check. Zero if there is none.
    commitment: bytes

    @abstractmethod
    def split(
        self, place: MaskPlace, members: Collection[str], threshold: int, num_values: int
    ) -> dict[str, bytes | memoryview]:
        """
        Split the secrets into one part for each client.

        Args:
            place ([`MaskPlace`]): The client and the session.
            members (`Collection[str]`): Sorted ids of the clients that get a part, with this client.
            threshold (`int`): Number of clients whose parts reveal the mask.
            num_values (`int`): Number of values of an update.

        Returns:
            `dict[str, bytes | memoryview]`: The part of each client, by client id.
        """

    @abstractmethod
    def part_bytes(self, num_members: int, threshold: int, num_values: int) -> int:
        """Return the number of bytes of each part that `split` returns for this number of clients."""

    @abstractmethod
    def add(self, values: torch.Tensor, place: MaskPlace, keys: Mapping[str, bytes]) -> None:
        """
        Add the masks to an update, in place.

        Args:
            values (`torch.Tensor` of shape `(num_values,)`): Integers of the ring.
            place ([`MaskPlace`]): The client and the session.
            keys (`Mapping[str, bytes]`): Public keys of the other clients that have sent shares, by client id.
        """

    @abstractmethod
    def remove(self, values: torch.Tensor) -> None:
        """Remove the masks that `add` added, in place."""

    @abstractmethod
    def reveal(
        self, survivors: Collection[str], lost: Collection[str], parts: Mapping[str, bytes]
    ) -> dict[str, dict[str, bytes] | torch.Tensor]:
        """
        Return what the server needs to remove the masks.

        Args:
            survivors (`Collection[str]`): The clients in the sum.
            lost (`Collection[str]`): The clients that have sent shares, but no masked update.
            parts (`Mapping[str, bytes]`): What the clients, also this one, have sent to this client, by client id.

        Returns:
            `dict[str, ...]`: Fields of [`UnmaskShares`], byte strings in place of tensors.
        """


@dataclass(frozen=True)
class RosterView:
    """
    What the server knows of a session when it removes the masks.

    Args:
        context (`bytes`): Session and digest of the request of local training.
        keys (`Mapping[str, bytes]`): Public keys for masks, by client id.
        members (`Mapping[str, tuple[str, ...]]`): The clients that have a part of each client's secrets, sorted.
        threshold (`Mapping[str, int]`): Number of parts that reveal a secret of each client.
        commitments (`Mapping[str, bytes]`): Commitments of the clients.
        survivors (`tuple[str, ...]`): The clients in the sum, sorted.
        lost (`tuple[str, ...]`): The clients that have sent shares, but no masked update.
    """

    context: bytes
    keys: Mapping[str, bytes]
    members: Mapping[str, tuple[str, ...]]
    threshold: Mapping[str, int]
    commitments: Mapping[str, bytes]
    survivors: tuple[str, ...]
    lost: tuple[str, ...]


class ServerMasks(ABC):
    """The server side of the masks."""

    @abstractmethod
    def remove(self, total: torch.Tensor, view: RosterView, replies: Mapping[str, UnmaskShares]) -> None:
        """
        Remove the masks from a sum, in place.

        Args:
            total (`torch.Tensor` of shape `(num_values,)`): The sum of the masked updates.
            view ([`RosterView`]): The session.
            replies (`Mapping[str, UnmaskShares]`): Shares of the survivors, by client id.

        Raises:
            UnmaskError: If the shares do not give the masks.
        """
