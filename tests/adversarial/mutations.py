"""Random mutations of messages, in their fields and in their serialized bytes."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch

from hf_federated.messages import Message, read_message


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    10**12,
    2**70,
    10**400,
    -(2**63),
    0.5,
    math.nan,
    math.inf,
    -1e300,
    1e30,
    "",
    "100",
    "\ud800",
    "x" * 10**5,
    b"\0",
    [],
    [[]],
    {},
    {"a": {"b": [None]}},
    {1: 2},
    (),
    object(),
    torch.tensor(math.nan),
    torch.zeros(0),
    torch.zeros(3, dtype=torch.bool),
    torch.full((2, 2), 1e30),
    torch.ones(2, 2).to_sparse(),
    torch.ones(1, dtype=torch.complex64),
]


def mutate_value(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """Replace a value, or one value inside it, by junk or by a distorted value."""
    choice = draw.random()
    if isinstance(value, dict) and value and choice < 0.8 and depth < 3:
        changed = dict(value)
        key = draw.choice(list(changed))
        action = draw.randrange(4)
        if action == 0:
            del changed[key]
        elif action == 1:
            changed[draw.choice(["", "x", "w", "\ud800", "n" * 2000])] = draw.choice(JUNK)
        else:
            changed[key] = mutate_value(changed[key], draw, depth + 1)
        return changed
    if isinstance(value, torch.Tensor) and choice < 0.8:
        return draw.choice(
            [
                lambda tensor: tensor.double() * draw.choice([math.nan, math.inf, 1e30, 1e300, -1e5]),
                lambda tensor: tensor * draw.choice([math.nan, math.inf, -math.inf, 1e30, -1e5, 0.0]),
                lambda tensor: tensor.flatten()[:-1],
                lambda tensor: tensor.unsqueeze(0),
                lambda tensor: tensor.to(draw.choice([torch.int64, torch.bool, torch.bfloat16, torch.complex64])),
                lambda tensor: tensor.new_zeros(1).expand(10**6),
            ]
        )(value)
    if isinstance(value, str) and choice < 0.5:
        return draw.choice([value[:-1], value + "x", value[::-1], value.upper()])
    if isinstance(value, int) and choice < 0.5:
        return draw.choice([value + 1, -value, value * 10**6, float(value), str(value)])
    return draw.choice(JUNK)


def mutate(message: Message, draw: random.Random) -> Any:
    """Change one field of a message, or the bytes of the message."""
    if draw.random() < 0.7:
        field = draw.choice(dataclasses.fields(message)).name
        return dataclasses.replace(message, **{field: mutate_value(getattr(message, field), draw)})
    blob = bytearray(message.to_bytes())
    for _ in range(draw.choice([1, 1, 2, 8])):
        position = draw.randrange(len(blob))
        blob[position] = draw.randrange(256)
    if draw.random() < 0.2:
        del blob[draw.randrange(len(blob)) :]
    try:
        return read_message(bytes(blob))
    except ValueError:
        return bytes(blob)  # An engine that cannot read a reply hands on what it received.
