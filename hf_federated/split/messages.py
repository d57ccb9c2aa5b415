"""What crosses between a split model's client and server, and nothing else.

Hidden states, their gradients, the mask as bits, positions where they cannot be derived, and the header that each
class below declares. No token id, label or loss is among the fields; a blob with another field is refused by name, and
so is a tensor whose dtype or shape is not that of what its field may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..messages import Packed
from ..messages.serialization import unpack


def pack_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """
    An attention mask as bits.

    Args:
        attention_mask (`torch.Tensor`): Shape `(batch, width)`, non-zero for tokens.

    Returns:
        `torch.Tensor`: Shape `(batch, ceil(width / 8))`, uint8; the first position is the highest bit.
    """
    batch, width = attention_mask.shape
    bits = torch.zeros(batch, -(-width // 8) * 8, dtype=torch.uint8)
    bits[:, :width] = (attention_mask != 0).cpu()
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)
    return (bits.view(batch, -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(bits: torch.Tensor, width: int) -> torch.Tensor:
    """
    The mask that `pack_mask` packed.

    Args:
        bits (`torch.Tensor`): Shape `(batch, ceil(width / 8))`, uint8.
        width (`int`): Positions.

    Returns:
        `torch.Tensor`: Shape `(batch, width)`, int64, of zeros and ones.
    """
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :width].long()


@dataclass(frozen=True)
class Crossing(Packed):
    """
    Base of what crosses. Step and micro-step name a passage, so that a repeated message is known as one.

    Args:
        client_id (`str`): The client at one end.
        step (`int`): Optimizer steps done before it.
        micro_step (`int`): Passages of this client since then.
    """

    client_id: str
    step: int
    micro_step: int

    def __post_init__(self) -> None:
        for name, kind in (("client_id", str), ("step", int), ("micro_step", int)):
            if type(getattr(self, name)) is not kind:
                raise ValueError(
                    f"{self.kind}: {name} must be {kind.__name__}, got {_described(getattr(self, name))}."
                )
        if self.step < 0 or self.micro_step < 0:
            raise ValueError(f"{self.kind}: steps are counted from 0, got {self.step} and {self.micro_step}.")

    @property
    def passage(self) -> tuple[str, int, int]:
        """What a reply, or the way back, belongs to."""
        return self.client_id, self.step, self.micro_step


@dataclass(frozen=True)
class Forward(Crossing):
    """
    Client to server: hidden states behind the client's first blocks.

    Args:
        hidden (`dict[str, torch.Tensor]`): As the wire encodes `(batch · sequence, hidden)`.
        batch_size (`int`): Rows of the batch.
        mask (`torch.Tensor`, *optional*): As `pack_mask` packs it; `None` where nothing is padded.
        mask_width (`int`): Positions of the mask, those of the cache included; 0 without one.
        seen (`int`): Positions that the cache holds already, without a prefix; 0 begins one.
        position_ids (`torch.Tensor`, *optional*): int32 of shape `(batch or 1, sequence)` where the user gave some, or
            `(batch, 2, sequence)` of a model that counts in two ways.
        context_lengths (`torch.Tensor`, *optional*): int32 of shape `(batch,)`, of a model that asks for them.
        training (`bool`): Whether dropout is on.
        grad (`bool`): Whether the gradient will come.
        autocast (`str`, *optional*): The client's autocast dtype.
        cache_id (`int`, *optional*): The server's key/value cache to go on with, in generation.
    """

    kind: ClassVar[str] = "split_forward"

    hidden: dict[str, torch.Tensor]
    batch_size: int
    mask: torch.Tensor | None = None
    mask_width: int = 0
    seen: int = 0
    position_ids: torch.Tensor | None = None
    context_lengths: torch.Tensor | None = None
    training: bool = False
    grad: bool = False
    autocast: str | None = None
    cache_id: int | None = None

    @property
    def num_sequences(self) -> int:
        """Rows, or of rows into which several were packed, whose positions begin anew, the sequences in them."""
        given = self.position_ids
        if self.mask is not None or given is None or given.ndim != 2:
            return self.batch_size
        return self.batch_size + int((given.diff(dim=1) != 1).sum()) * (self.batch_size // len(given))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_states(self, "hidden", self.hidden)
        rows = _rows(self.hidden)
        if type(self.batch_size) is not int or self.batch_size < 1 or rows % self.batch_size:
            raise ValueError(f"{self.kind}: {rows} hidden states do not make {self.batch_size!r} rows.")
        for name in ("mask_width", "seen"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{self.kind}: {name} is a count, got {getattr(self, name)!r}.")
        for name in ("training", "grad"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{self.kind}: {name} is True or False, got {getattr(self, name)!r}.")
        if self.cache_id is not None and type(self.cache_id) is not int:
            raise ValueError(f"{self.kind}: cache_id is a number, got {self.cache_id!r}.")
        for name, tensor, dtype in (
            ("mask", self.mask, torch.uint8),
            ("position_ids", self.position_ids, torch.int32),
            ("context_lengths", self.context_lengths, torch.int32),
        ):
            if tensor is not None and not (isinstance(tensor, torch.Tensor) and tensor.dtype == dtype):
                raise ValueError(f"{self.kind}: {name} must be {dtype}, got {_described(tensor)}.")
        if self.mask is not None and self.mask.shape != (self.batch_size, -(-self.mask_width // 8)):
            raise ValueError(
                f"{self.kind}: a mask of {self.mask_width} positions for {self.batch_size} rows has shape "
                f"{(self.batch_size, -(-self.mask_width // 8))}, got {tuple(self.mask.shape)}."
            )
        if self.autocast not in (None, "bfloat16", "float16"):
            raise ValueError(f"{self.kind}: autocast is bfloat16 or float16, got {self.autocast!r}.")
        length = rows // self.batch_size
        if self.mask is not None and self.mask_width != self.seen + length:
            raise ValueError(
                f"{self.kind}: a mask of {self.mask_width} positions came with {length} behind {self.seen} others."
            )
        if self.cache_id is None and self.seen or self.cache_id is not None and self.grad:
            raise ValueError(f"{self.kind}: a cache is for generation, without gradients, and alone holds positions.")
        allowed = {(1, length), (self.batch_size, length), (self.batch_size, 2, length)}
        if self.position_ids is not None and tuple(self.position_ids.shape) not in allowed:
            raise ValueError(
                f"{self.kind}: position_ids of {self.batch_size} rows of {length} have one of the shapes "
                f"{sorted(allowed)}, got {tuple(self.position_ids.shape)}."
            )
        if self.context_lengths is not None and self.context_lengths.shape != (self.batch_size,):
            raise ValueError(
                f"{self.kind}: context_lengths of {self.batch_size} rows have shape ({self.batch_size},), got "
                f"{tuple(self.context_lengths.shape)}."
            )


@dataclass(frozen=True)
class Hidden(Crossing):
    """
    Server to client: hidden states behind the server's blocks.

    Args:
        hidden (`dict[str, torch.Tensor]`): As the wire encodes `(batch · sequence, hidden)`.
    """

    kind: ClassVar[str] = "split_hidden"

    hidden: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_states(self, "hidden", self.hidden)


@dataclass(frozen=True)
class Backward(Crossing):
    """
    Client to server: the gradient of the loss by the hidden states that the server sent.

    Args:
        gradient (`dict[str, torch.Tensor]`): As the wire encodes `(batch · sequence, hidden)`.
        num_targets (`int`, *optional*):
            Target tokens of this passage, where the gradient is that of the loss summed over them. `None` where it is
            that of the mean: then the server has no need of the number.
    """

    kind: ClassVar[str] = "split_backward"

    gradient: dict[str, torch.Tensor]
    num_targets: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_states(self, "gradient", self.gradient)
        rows = _rows(self.gradient)
        if self.num_targets is not None and not (type(self.num_targets) is int and 0 <= self.num_targets <= rows):
            raise ValueError(f"{self.kind}: num_targets counts targets of {rows} positions, got another number.")


@dataclass(frozen=True)
class Gradient(Crossing):
    """
    Server to client: the gradient of the loss by the hidden states that the client sent.

    Args:
        gradient (`dict[str, torch.Tensor]`): As the wire encodes `(batch · sequence, hidden)`.
    """

    kind: ClassVar[str] = "split_gradient"

    gradient: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_states(self, "gradient", self.gradient)


@dataclass(frozen=True)
class Forget(Packed):
    """
    Client to server: a key/value cache is not needed any more.

    Args:
        client_id (`str`): The client.
        cache_id (`int`): The cache.
    """

    kind: ClassVar[str] = "split_forget"

    client_id: str
    cache_id: int

    def __post_init__(self) -> None:
        if type(self.client_id) is not str or type(self.cache_id) is not int:
            raise ValueError(f"{self.kind}: names a client and the number of a cache.")


# What may stand in the place of hidden states or gradients: floats, or 8-bit steps with a scale for every position.
_ENCODED: dict[str, tuple[torch.dtype, ...]] = {
    "values": (torch.float32, torch.float16, torch.bfloat16, torch.int8),
    "scale": (torch.float32,),
    "zero_point": (torch.float32,),
}


def _check_states(message: Packed, name: str, encoded: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(encoded, dict) or "values" not in encoded or not encoded.keys() <= _ENCODED.keys():
        raise ValueError(f"{message.kind}: {name} holds {sorted(_ENCODED)} at most, got {_described(encoded)}.")
    for part, tensor in encoded.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _ENCODED[part]:
            raise ValueError(f"{message.kind}: {name}[{part!r}] is no such tensor: {_described(tensor)}.")
    if encoded["values"].ndim != 2 or not encoded["values"].numel():
        raise ValueError(f"{message.kind}: {name} is (batch · sequence, hidden), got {_described(encoded['values'])}.")


def _rows(encoded: Mapping[str, torch.Tensor]) -> int:
    return len(encoded["values"])


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"{sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


# What a server reads.
Request = Forward | Backward | Forget
REQUESTS: dict[str, type[Request]] = {Forward.kind: Forward, Backward.kind: Backward, Forget.kind: Forget}


def read_request(blob: bytes) -> Request:
    """
    What a client sent.

    Args:
        blob (`bytes`): A serialised `Forward`, `Backward` or `Forget`.

    Raises:
        ValueError: If it is damaged, of another kind, or holds a field that is not declared.
    """
    tree = unpack(blob)
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind not in REQUESTS:
        raise ValueError(f"A server takes messages of the kinds {sorted(REQUESTS)}, got {kind!r}.")
    return REQUESTS[kind]._from_tree(tree)
