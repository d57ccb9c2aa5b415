"""Coded masks of LightSecAgg: each client has a coded share of the mask of each client."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from ..messages.secure_aggregation import UnmaskShares
from ..security.keys import EncryptionError
from ..security.masks import generate_exchange_key
from ..security.prime_field import PRIME, add_elements, check_elements, decode_sum, encode_mask, field_mask
from .masks import ClientMasks, MaskPlace, RosterView, ServerMasks, UnmaskError


_ELEMENT_BYTES = 4


class CodedMasks(ClientMasks):
    """
    A mask of uniform elements modulo 2^31 - 1.

    Clients derive no masks in pairs, so `public_key` has no use. The server reconstructs the sum of the masks and no
    secret of a client, so `commitment` is zero.

    Args:
        num_private_of (`Callable[[int], int]`): Returns the number of shares that reveal nothing about a mask, for a
            number of clients.
    """

    def __init__(self, num_private_of: Callable[[int], int]) -> None:
        # The key takes less memory than the mask.
        self._key = os.urandom(32)
        _, self.public_key = generate_exchange_key()
        self.commitment = bytes(32)
        self._num_private_of = num_private_of
        self._num_elements = 0
        self._is_added = False

    def split(
        self, place: MaskPlace, members: Collection[str], threshold: int, num_values: int
    ) -> dict[str, bytes | memoryview]:
        self._num_elements = self.part_bytes(len(members), threshold, num_values) // _ELEMENT_BYTES
        mask, points = field_mask(self._key, num_values), range(1, len(members) + 1)
        shares = encode_mask(mask, threshold, self._num_private_of(len(members)), points).numpy()
        rows = shares.astype("<i4", copy=False).view(np.uint8)
        return {name: row.data for name, row in zip(members, rows, strict=True)}

    def part_bytes(self, num_members: int, threshold: int, num_values: int) -> int:
        return -(-num_values // (threshold - self._num_private_of(num_members))) * _ELEMENT_BYTES

    def add(self, values: torch.Tensor, place: MaskPlace, keys: Mapping[str, bytes]) -> None:
        add_elements(values, field_mask(self._key, len(values)))
        self._is_added = True

    def remove(self, values: torch.Tensor) -> None:
        if self._is_added:
            add_elements(values, field_mask(self._key, len(values)), subtract=True)
        self._is_added = False

    def reveal(
        self, survivors: Collection[str], lost: Collection[str], parts: Mapping[str, bytes]
    ) -> dict[str, dict[str, bytes] | torch.Tensor]:
        total = torch.zeros(self._num_elements, dtype=torch.int32)
        for name in survivors:
            add_elements(total, _elements(parts[name], self._num_elements, name))
        return {"mask_sum": total}


class CodedUnmasking(ServerMasks):
    """
    Removes the sum of the masks of the survivors, which it decodes from sums of shares.

    A wrong sum of shares changes the decoded sum. The server cannot name the client that sent it.

    Args:
        num_private_of (`Callable[[int], int]`): As in [`CodedMasks`].
    """

    def __init__(self, num_private_of: Callable[[int], int]) -> None:
        self._num_private_of = num_private_of

    def remove(self, total: torch.Tensor, view: RosterView, replies: Mapping[str, UnmaskShares]) -> None:
        members, threshold = view.members[view.survivors[0]], view.threshold[view.survivors[0]]
        num_private = self._num_private_of(len(members))
        num_elements = -(-len(total) // (threshold - num_private))
        sums: dict[int, torch.Tensor] = {}
        problems: list[str] = []
        for point, name in enumerate(members, 1):
            if name not in replies or name not in view.survivors or len(sums) == threshold:
                continue
            mask_sum, text = replies[name].mask_sum, f"The sum of shares of client {name!r}"
            try:
                if mask_sum is None:
                    raise EncryptionError(f"{text} is missing.")
                check_elements(mask_sum, num_elements, text)
            except EncryptionError as error:
                problems.append(str(error))
            else:
                sums[point] = mask_sum
        if len(sums) < threshold:
            found = f"{len(sums)} clients sent a sum of shares of masks, {threshold} are needed"
            raise UnmaskError(". ".join([found, *problems[:1]]))
        total.sub_(decode_sum(sums, threshold, num_private, len(total))).remainder_(PRIME)


def _elements(part: bytes, num_elements: int, name: str) -> torch.Tensor:
    """Return the elements of a share that another client sent."""
    text = f"The share of the mask of client {name!r}"
    if len(part) != num_elements * _ELEMENT_BYTES:
        raise EncryptionError(f"{text} has {len(part)} bytes, but it must have {num_elements * _ELEMENT_BYTES} bytes.")
    elements = torch.from_numpy(np.frombuffer(part, "<i4").astype(np.int32))
    check_elements(elements, num_elements, text)
    return elements
