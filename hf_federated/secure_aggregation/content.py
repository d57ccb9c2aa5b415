"""What the parties of secure aggregation hash, sign and encrypt: byte strings without ambiguity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..messages.secure_aggregation import SecureFit


def encode(*parts: str | bytes | int) -> bytes:
    """Join parts so that different parts give different bytes: each part follows its length."""
    pieces = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(piece).to_bytes(8, "big") + piece for piece in pieces)


def digest(*parts: str | bytes | int) -> bytes:
    """Return the SHA-256 digest of parts."""
    return hashlib.sha256(encode(*parts)).digest()


def settings_digest(settings: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 digest of the settings of a protocol."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()


def roster_digest(keys: Mapping[str, bytes]) -> bytes:
    """Return the SHA-256 digest of the keys of all clients, by client id."""
    return digest(*(part for client_id in sorted(keys) for part in (client_id, keys[client_id])))


def survivors_digest(survivors: Iterable[str]) -> str:
    """Return the SHA-256 digest of a set of clients, in hexadecimal digits."""
    return digest(*sorted(survivors)).hex()


def fit_digest(request: SecureFit) -> bytes:
    """
    Return the SHA-256 digest of what a client trains on.

    The digest is the same for all clients of a round. A server that sends different models to the clients gets masks
    that do not cancel, and signatures that do not match.

    Args:
        request ([`SecureFit`]): The request, after the postprocessors have decoded it.
    """
    # Without what differs between clients.
    common = replace(request, client_id="", nonce="", seed=0, accepted_round=None, session="")
    computed = hashlib.sha256()
    for piece in common.to_pieces():
        computed.update(piece)
    return computed.digest()


def to_tensor(content: bytes | bytearray) -> torch.Tensor:
    """Return a byte string as a tensor of uint8. The tensor shares the memory of a `bytearray`."""
    values = np.frombuffer(content, np.uint8)
    return torch.from_numpy(values if isinstance(content, bytearray) else values.copy())


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of uint8."""
    return tensor.contiguous().numpy().tobytes()


def check_byte_strings(tensors: Mapping[str, Any], length: int | None = None) -> None:
    """Raise the error of [`byte_strings`] if a value is no byte string. The contents are not read."""
    for name, value in tensors.items():
        is_bytes = isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1
        if not is_bytes or length not in (None, len(value)):
            raise ValueError(f"the entry of {name!r} is no byte string" + (f" of {length} bytes" if length else ""))


def byte_views(tensors: Mapping[str, Any], length: int | None = None) -> dict[str, memoryview]:
    """Return the byte strings of a field of a message as [`byte_strings`] does, without copying them."""
    check_byte_strings(tensors, length)
    return {name: value.contiguous().numpy().data for name, value in tensors.items()}


def byte_strings(tensors: Mapping[str, Any], length: int | None = None) -> dict[str, bytes]:
    """
    Return the byte strings of a field of a message.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): The field, which another party sent.
        length (`int`, *optional*): Length of each byte string. By default any length is allowed.

    Raises:
        ValueError: If a value is no byte string of this length.
    """
    return {name: view.tobytes() for name, view in byte_views(tensors, length).items()}
