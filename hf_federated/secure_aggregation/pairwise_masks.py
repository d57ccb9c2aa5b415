"""Pairwise masks of SecAgg and SecAgg+, with Shamir shares of the secrets behind them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..messages.secure_aggregation import UnmaskShares
from ..security.keys import EncryptionError
from ..security.masks import add_mask, derive_key, generate_exchange_key, public_of, shared_secret
from ..security.shamir import SHARE_BYTES, combine_with, lagrange_weights, split_secret
from .content import byte_strings
from .masks import ClientMasks, MaskPlace, RosterView, ServerMasks, UnmaskError


SECRET_BYTES = 32
# Largest number of sets of shares that the server tries if a client has sent a wrong share.
MAX_TRIES = 256


@dataclass(frozen=True)
class _Mask:
    key: bytes
    is_subtracted: bool


def _pair_mask(own: str, other: str, secret: bytes, context: bytes) -> _Mask:
    """Return the mask that a client shares with another one. One of the two subtracts it."""
    return _Mask(derive_key(secret, "pair", context), own > other)


class PairwiseMasks(ClientMasks):
    """A seed for the mask of the client, and a key for the masks that it shares with each other client."""

    def __init__(self) -> None:
        self._seed = os.urandom(SECRET_BYTES)
        self._key, self.public_key = generate_exchange_key()
        self.commitment = _commitment_of(self._seed)
        self._masks: list[_Mask] = []

    def split(
        self, place: MaskPlace, members: Collection[str], threshold: int, num_values: int
    ) -> dict[str, bytes | memoryview]:
        points = range(1, len(members) + 1)
        seeds, keys = (split_secret(secret, threshold, points) for secret in (self._seed, self._key))
        return {name: seeds[point] + keys[point] for point, name in zip(points, members, strict=True)}

    def part_bytes(self, num_members: int, threshold: int, num_values: int) -> int:
        return 2 * SHARE_BYTES

    def add(self, values: torch.Tensor, place: MaskPlace, keys: Mapping[str, bytes]) -> None:
        masks = [_Mask(derive_key(self._seed, "self", place.context), False)]
        for name, key in keys.items():
            # An invalid key raises an error. `remove` then removes nothing.
            masks.append(_pair_mask(place.client_id, name, shared_secret(self._key, key), place.context))
        self._masks = masks
        for mask in masks:
            add_mask(values, mask.key, subtract=mask.is_subtracted)

    def remove(self, values: torch.Tensor) -> None:
        for mask in self._masks:
            add_mask(values, mask.key, subtract=not mask.is_subtracted)
        self._masks = []

    def reveal(
        self, survivors: Collection[str], lost: Collection[str], parts: Mapping[str, bytes]
    ) -> dict[str, dict[str, bytes] | torch.Tensor]:
        return {
            "seeds": {name: parts[name][:SHARE_BYTES] for name in survivors if name in parts},
            "mask_keys": {name: parts[name][SHARE_BYTES:] for name in lost if name in parts},
        }


class PairwiseUnmasking(ServerMasks):
    """Removes the masks of the survivors, and the masks that they share with lost clients."""

    def remove(self, total: torch.Tensor, view: RosterView, replies: Mapping[str, UnmaskShares]) -> None:
        seeds = {name: _readable(reply.seeds) for name, reply in replies.items()}
        keys = {name: _readable(reply.mask_keys) for name, reply in replies.items()}
        for survivor in view.survivors:
            seed = _reconstructed(survivor, seeds, view, _commitment_of, view.commitments[survivor])
            add_mask(total, derive_key(seed, "self", view.context), subtract=True)
        for name in view.lost:
            key = _reconstructed(name, keys, view, public_of, view.keys[name])
            for survivor in view.survivors:
                if survivor in view.members[name]:
                    mask = _pair_mask(survivor, name, shared_secret(key, view.keys[survivor]), view.context)
                    add_mask(total, mask.key, subtract=not mask.is_subtracted)


def _commitment_of(seed: bytes) -> bytes:
    return hashlib.sha256(seed).digest()


def _readable(shares: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    try:
        return byte_strings(shares, SHARE_BYTES)
    except ValueError:
        return {}


def _reconstructed(
    name: str,
    replies: Mapping[str, Mapping[str, bytes]],
    view: RosterView,
    publish: Callable[[bytes], bytes],
    published: bytes,
) -> bytes:
    """
    Return a secret of a client from the shares of others.

    Args:
        name (`str`): Id of the client.
        replies (`Mapping[str, Mapping[str, bytes]]`): The shares that each client sent, by the id of their owner.
        view ([`RosterView`]): The session.
        publish (`Callable[[bytes], bytes]`): Returns what a client publishes of a secret.
        published (`bytes`): What the client has published.

    Raises:
        UnmaskError: If there are too few shares, or if they are wrong.
    """
    points = {member: number for number, member in enumerate(view.members[name], 1)}
    shares = {points[who]: sent[name] for who, sent in replies.items() if who in points and name in sent}
    threshold = view.threshold[name]
    if len(shares) < threshold:
        raise UnmaskError(f"{len(shares)} clients sent a share of a secret of client {name!r}, {threshold} are needed")
    for chosen in _subsets(sorted(shares), threshold):
        try:
            secret = combine_with(_weights(chosen), {point: shares[point] for point in chosen}, SECRET_BYTES)
        except EncryptionError:
            continue
        if publish(secret) == published:
            return secret
    raise UnmaskError(f"the shares of a secret of client {name!r} do not belong together: a client sent a wrong share")


# The secrets of many clients are combined from shares of the same points.
@functools.lru_cache(maxsize=64)
def _weights(points: tuple[int, ...]) -> dict[int, int]:
    return lagrange_weights(points)


def _subsets(points: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of points. Each point is missing in one of the first sets if a point can be missing."""
    for start in range(len(points)):
        yield tuple(sorted([*points[start:], *points[:start]][:size]))
    yield from itertools.islice(itertools.combinations(points, size), MAX_TRIES)
