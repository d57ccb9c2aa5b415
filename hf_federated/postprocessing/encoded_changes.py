"""Changes of a state, encoded tensor by tensor, so that a step needs the memory of one tensor."""

from __future__ import annotations

import functools
import zlib

import torch

from ..codecs import Codec
from ..messages.serialization import PackedPieces
from ..utils.weighted_mean import State, Tensors, wide_dtype
from .base import Memory


def encode_changes(
    codec: Codec, state: Tensors, known: Tensors, memory: Memory, has_feedback: bool = False
) -> tuple[State, Memory]:
    """
    Encode the changes of the floating tensors of a state. The other tensors are copied.

    Args:
        codec ([`Codec`]): The codec.
        state, known (`Mapping[str, torch.Tensor]`): The state, and the state whose changes are encoded.
        memory (`dict`): What the codec kept of each tensor at the last call, by the name of the tensor.
        has_feedback (`bool`, *optional*, defaults to `False`): Whether the codec also sends what the last call lost.

    Returns:
        `tuple`: The encoded tensors on the CPU, and the new memory.
    """
    encoded: State = {}
    kept: Memory = {}
    for name, value in state.items():
        if not value.is_floating_point() or name not in known:
            # A copy, because the value may be part of a model that will change.
            encoded[name] = value.detach().clone() if value.is_meta else value.detach().to("cpu", copy=True)
            continue
        if value.is_meta:
            encoded |= codec.empty({name: value.shape})
            continue
        wide = value.detach().to(wide_dtype(value.dtype))
        change, of_tensor = {name: (wide - known[name].to(wide.device)).cpu()}, dict(memory.get(name, {}))
        encoded |= codec.encode(change, of_tensor) if has_feedback else codec.compress_next(change, of_tensor)
        if of_tensor:
            kept[name] = of_tensor
    return encoded, kept


def add_changes(codec: Codec, encoded: Tensors, known: Tensors) -> State:
    """
    Decode changes and add them to a state.

    Args:
        codec ([`Codec`]): The codec.
        encoded (`Mapping[str, torch.Tensor]`): What `encode_changes` returned. It is untrusted input.
        known (`Mapping[str, torch.Tensor]`): The state to which the changes belong.

    Returns:
        `dict[str, torch.Tensor]`: The state, with the dtypes and devices of `known`. Tensors that are not floating, or
            unknown, are those of `encoded`.

    Raises:
        ValueError: If a floating tensor of `known` is missing, or has another size than the codec sends. The sizes are
            compared before memory is allocated.
    """
    state: State = {}
    remaining = dict(encoded)
    for name, value in known.items():
        if not value.is_floating_point():
            continue
        shapes = {name: value.shape}
        sent = {key: remaining.pop(key) for key in codec.layout(shapes) if key in remaining}
        codec.check(sent, shapes)
        if any(each.is_meta for each in sent.values()):
            state[name] = torch.empty_like(value, device="meta")
            continue
        change = codec.decode(sent, {name: value})[name]
        wide = value.to(wide_dtype(value.dtype))
        state[name] = (wide + change.to(wide.device)).to(value.dtype)
    return {**remaining, **state}


def checksum(state: Tensors) -> str:
    """Return a checksum of a state: a text, so that all messages have the same size."""
    if any(value.is_meta for value in state.values()):
        return f"{0:08x}"
    # The order of the names depends on how the state was received.
    pieces = PackedPieces(dict(sorted(state.items())))
    return f"{functools.reduce(lambda found, piece: zlib.crc32(piece, found), pieces, 0):08x}"
