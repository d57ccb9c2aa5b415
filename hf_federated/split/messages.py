"""Messages between the client and the server of a split model. Nothing else is sent.

The messages contain hidden states, their gradients, the attention mask as bits, positions if the server cannot derive
them, the order of the sequences in beam search, and the header fields that each class declares. No field contains
token ids, labels or a loss. A message with an undeclared field raises an error that names the field. A tensor whose
dtype or shape does not fit its field also raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

import torch

from ..codecs.row_bytes import ROW_DTYPES
from ..messages import FlatMessage, Serializable
from ..messages.base import kind_of
from ..messages.serialization import unpack
from ..utils.fields import MAX_COUNT, Count, PositiveCount, Range, Requirement, TensorOf, describe, problems_of


M = TypeVar("M", bound=Serializable)
# Largest number of tensors of a message to the server.
_MAX_TENSORS = 1000

# Client id, optimizer step and micro-step.
MicroBatchId = tuple[str, int, int]

ClientId = Annotated[str, Requirement("must be str")]
# A negative step has another error.
Step = Annotated[int, Range(-MAX_COUNT, MAX_COUNT), Requirement("must be int")]
NumPositions = Annotated[int, Range(0, MAX_COUNT), Requirement("must be an int of at least 0")]
CacheId = Annotated[int, Requirement("must be an int")]
Flag = Annotated[bool, Requirement("must be True or False")]
Int32Tensor = Annotated[torch.Tensor, TensorOf(torch.int32)]


@dataclass(frozen=True)
class SplitMessage(FlatMessage):
    """
    Base class of the messages about one micro-batch.

    Client, step and micro-step identify the micro-batch, so that a receiver can detect a repeated message.

    Args:
        client_id (`str`): The client that sends or receives the message.
        step (`int`): Number of optimizer steps before this micro-batch.
        micro_step (`int`): Number of micro-batches of this client in the current step before this micro-batch.
    """

    checks_fields: ClassVar[bool] = True
    # The field that contains encoded hidden states or gradients.
    states_field: ClassVar[str] = "hidden"

    client_id: ClientId
    step: Step
    micro_step: Step

    def __post_init__(self) -> None:
        problems = problems_of(self)
        states = getattr(self, self.states_field)
        _check_states(self, states, problems)
        self._check(problems, len(rows_of(states)))

    def _check(self, problems: dict[str, str], num_states: int) -> None:
        """
        Raise `ValueError` if a field is invalid. The hidden states are already checked.

        Args:
            problems (`dict[str, str]`): What is wrong with the fields that their annotations do not allow, by field.
            num_states (`int`): Number of hidden states or gradients.
        """
        raise_problem(self.kind, problems)
        if self.step < 0 or self.micro_step < 0:
            raise ValueError(
                f"{self.kind}: step={self.step} and micro_step={self.micro_step}, but both must be at least 0."
            )

    @property
    def micro_batch_id(self) -> MicroBatchId:
        """Identifier that a request, its answer and the messages of the backward pass share."""
        return self.client_id, self.step, self.micro_step


@dataclass(frozen=True)
class Forward(SplitMessage):
    """
    Client to server: hidden states after the client's first blocks.

    Args:
        hidden (`dict[str, torch.Tensor]`):
            Hidden states of `batch · sequence` positions, encoded by [`~split.Wire`].
        batch_size (`int`): Number of sequences in the batch.
        mask (`torch.Tensor`, *optional*): Attention mask packed by `pack_mask`. `None` if there is no padding.
        mask_width (`int`): Number of positions of the mask, including the positions in the cache. 0 without a mask.
        seen (`int`):
            Number of positions in the cache, without the prefix. 0 starts a new cache.
        position_ids (`torch.Tensor`, *optional*):
            int32 tensor of shape `(batch or 1, sequence)` if the user passed positions, or `(batch, 2, sequence)` for
            a model with two-dimensional positions.
        context_lengths (`torch.Tensor`, *optional*):
            int32 tensor of shape `(batch,)`, for models that require context lengths.
        training (`bool`): Whether dropout is active.
        grad (`bool`): Whether the client will send the gradient.
        autocast (`str`, *optional*): The client's autocast dtype.
        cache_id (`int`, *optional*): The server's key/value cache to use, during generation.
        reorder (`torch.Tensor`, *optional*):
            int32 tensor of shape `(batch,)`, for beam search: sequence `i` of the batch continues sequence
            `reorder[i]` of the cache.
    """

    kind: ClassVar[str] = "split_forward"

    hidden: dict[str, torch.Tensor]
    batch_size: PositiveCount
    mask: Annotated[torch.Tensor, TensorOf(torch.uint8)] | None = None
    mask_width: NumPositions = 0
    seen: NumPositions = 0
    position_ids: Int32Tensor | None = None
    context_lengths: Int32Tensor | None = None
    training: Flag = False
    grad: Flag = False
    autocast: Literal["bfloat16", "float16"] | None = None
    cache_id: CacheId | None = None
    reorder: Int32Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """
        Number of sequences. Sequences that are packed into one row count separately.

        Without packing, the number is the batch size. In a packed row a new sequence starts where the positions
        restart.
        """
        positions = self.position_ids
        if self.mask is not None or positions is None or positions.ndim != 2:
            return self.batch_size
        return self.batch_size + int((positions.diff(dim=1) != 1).sum()) * (self.batch_size // len(positions))

    def _check(self, problems: dict[str, str], num_states: int) -> None:
        if problems.pop("batch_size", None) or num_states % self.batch_size:
            raise ValueError(
                f"{self.kind}: {num_states} hidden states cannot be divided into batch_size={self.batch_size!r} "
                "sequences of equal length."
            )
        super()._check(problems, num_states)
        batch_size, length = self.batch_size, num_states // self.batch_size
        self._check_shape("mask", [(batch_size, -(-self.mask_width // 8))], f" with mask_width={self.mask_width}")
        if self.mask is not None and self.mask_width != self.seen + length:
            raise ValueError(
                f"{self.kind}: mask_width={self.mask_width}, but the mask must cover {self.seen} cached and {length} "
                "new positions."
            )
        if self.cache_id is None and self.seen or self.cache_id is not None and self.grad:
            raise ValueError(
                f"{self.kind}: cache_id={self.cache_id}, seen={self.seen} and grad={self.grad}. seen > 0 requires a "
                "cache, and a cache requires grad=False, because caches are for generation."
            )
        shapes = [(1, length), (batch_size, length), (batch_size, 2, length)]
        self._check_shape("position_ids", shapes, f" of length {length}")
        self._check_shape("context_lengths", [(batch_size,)])
        if self.reorder is not None:
            self._check_reorder(self.reorder)

    def _check_shape(self, name: str, allowed: Sequence[tuple[int, ...]], remark: str = "") -> None:
        value = getattr(self, name)
        if value is not None and tuple(value.shape) not in allowed:
            raise ValueError(
                f"{self.kind}: {name} has shape {tuple(value.shape)}, but {self.batch_size} sequences{remark} need "
                f"shape {' or '.join(map(str, dict.fromkeys(allowed)))}."
            )

    def _check_reorder(self, reorder: torch.Tensor) -> None:
        if reorder.shape != (self.batch_size,) or reorder.min() < 0 or reorder.max() >= self.batch_size:
            raise ValueError(
                f"{self.kind}: reorder must have shape ({self.batch_size},) and values from 0 to "
                f"{self.batch_size - 1}, but is {describe(reorder)}, values {reorder.flatten()[:8].tolist()}."
            )
        if not self.seen:
            raise ValueError(f"{self.kind}: reorder was sent for a cache without positions. Send it with seen > 0.")


@dataclass(frozen=True)
class Hidden(SplitMessage):
    """
    Server to client: hidden states after the server's blocks.

    Args:
        hidden (`dict[str, torch.Tensor]`):
            Hidden states of `batch · sequence` positions, encoded by [`~split.Wire`].
    """

    kind: ClassVar[str] = "split_hidden"

    hidden: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Backward(SplitMessage):
    """
    Client to server: gradient of the loss with respect to the hidden states that the server sent.

    Args:
        gradient (`dict[str, torch.Tensor]`):
            Gradient of `batch · sequence` positions, encoded by [`~split.Wire`].
        num_targets (`int`, *optional*):
            Number of target tokens of the micro-batch, if the gradient is the gradient of the summed loss. `None` for
            the gradient of the mean loss, for which the server does not need the number.
    """

    kind: ClassVar[str] = "split_backward"
    states_field: ClassVar[str] = "gradient"

    gradient: dict[str, torch.Tensor]
    num_targets: Count | None = None

    def _check(self, problems: dict[str, str], num_states: int) -> None:
        if problems.pop("num_targets", None) or (self.num_targets or 0) > num_states:
            raise ValueError(
                f"{self.kind}: num_targets must be an int from 0 to the number of positions, {num_states}, but is "
                f"{describe(self.num_targets)}."
            )
        super()._check(problems, num_states)


@dataclass(frozen=True)
class Gradient(SplitMessage):
    """
    Server to client: gradient of the loss with respect to the hidden states that the client sent.

    Args:
        gradient (`dict[str, torch.Tensor]`):
            Gradient of `batch · sequence` positions, encoded by [`~split.Wire`].
        squared_norm (`float`, *optional*):
            Squared norm of the gradients of the server's blocks, in the answer to the last gradient of a step. The
            client then knows the norm by which all parties clip. It is `None` if other parties contribute to the norm.
    """

    kind: ClassVar[str] = "split_gradient"
    states_field: ClassVar[str] = "gradient"

    gradient: dict[str, torch.Tensor]
    squared_norm: float | None = None


@dataclass(frozen=True)
class Forget(FlatMessage):
    """
    Client to server: the client no longer needs a key/value cache.

    Args:
        client_id (`str`): The client.
        cache_id (`int`): The cache.
    """

    kind: ClassVar[str] = "split_forget"

    checks_fields: ClassVar[bool] = True

    client_id: ClientId
    cache_id: CacheId

    def __post_init__(self) -> None:
        raise_problem(self.kind, problems_of(self))


def raise_problem(kind: str, problems: Mapping[str, str]) -> None:
    """
    Raise the error of the first invalid field of a message.

    Args:
        kind (`str`): Kind of the message.
        problems (`Mapping[str, str]`): What is wrong with each invalid field, as the predicate of a sentence.

    Raises:
        ValueError: If a field is invalid.
    """
    for name, problem in problems.items():
        raise ValueError(f"{kind}: {name} {problem}.")


# Encoded hidden states and gradients: allowed dtypes of the tensor that has a row for each position, and of the tensor
# that a gradient may add.
_ROWS: dict[str, tuple[torch.dtype, ...]] = {
    "values": (torch.float32, torch.float16, torch.bfloat16),
    **dict.fromkeys(ROW_DTYPES, (torch.uint8,)),
}
_ADDED: dict[str, tuple[torch.dtype, ...]] = {"mean_error": (torch.float32,)}


def _check_states(message: SplitMessage, encoded: Mapping[str, torch.Tensor], problems: Mapping[str, str]) -> None:
    name = message.states_field
    if name in problems or len(encoded.keys() & _ROWS.keys()) != 1 or encoded.keys() - _ROWS.keys() - _ADDED.keys():
        raise ValueError(
            f"{message.kind}: {name} must be a dictionary with one of the keys {list(_ROWS)} and optionally "
            f"{list(_ADDED)}, but is {describe(encoded)}."
        )
    for part, tensor in encoded.items():
        allowed = _ROWS.get(part) or _ADDED[part]
        if tensor.dtype not in allowed:
            raise ValueError(
                f"{message.kind}: {name}[{part!r}] must be a tensor with one of the dtypes {allowed}, but is "
                f"{describe(tensor)}."
            )
    rows = rows_of(encoded)
    if rows.ndim != 2 or not rows.numel():
        raise ValueError(
            f"{message.kind}: {name} must have the shape (batch · sequence, hidden) without empty dimensions, but is "
            f"{describe(rows)}."
        )


def rows_of(encoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor of encoded hidden states or gradients that has a row for each position."""
    return next(tensor for name, tensor in encoded.items() if name in _ROWS)


# The messages that a server accepts.
Request = Forward | Backward | Forget
REQUESTS: dict[str, type[Request]] = {Forward.kind: Forward, Backward.kind: Backward, Forget.kind: Forget}


def read_request(blob: bytes | memoryview) -> Request:
    """
    Deserialize the message of a client.

    Args:
        blob (`bytes`): A serialized `Forward`, `Backward` or `Forget`.

    Raises:
        ValueError: If the message is damaged, has an unknown kind, or has an undeclared field.
    """
    return read_one_of(blob, REQUESTS)


def read_one_of(blob: bytes | memoryview, kinds: Mapping[str, type[M]]) -> M:
    """
    Deserialize a message of one of several kinds.

    Args:
        blob (`bytes`): A serialized message.
        kinds (`Mapping[str, type]`): The class of each accepted kind.

    Raises:
        ValueError: If the message is damaged, has an unknown kind, or has an undeclared field.
    """
    tree = unpack(blob, _MAX_TENSORS)
    kind = kind_of(tree)
    if kind not in kinds:
        raise ValueError(f"The server accepts messages of the kinds {sorted(kinds)}, but got kind {describe(kind)}.")
    return kinds[kind]._from_tree(tree)
