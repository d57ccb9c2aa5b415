"""What crosses a client's boundary, and its bytes.

Every exchange between server and client is one of the frozen dataclasses below. A message serialises to a single blob:
a safetensors file whose metadata holds the JSON of everything that is not a tensor. Nothing is ever pickled, so a blob
from the network or from a file can be read without trusting it.

`pack` and `unpack` are the codec: they take any tree of dictionaries, lists, tuples, scalars and tensors, and serve
messages, client stores and checkpoints alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import safetensors
import safetensors.torch
import torch


TREE_KEY = "tree"

M = TypeVar("M", bound="Message")


def _flatten(value: Any, tensors: dict[str, torch.Tensor], names: dict[int, str], path: str) -> Any:
    """Replace every tensor of a tree by a reference, and every value that JSON would change by a tagged form."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in _LAYOUT:
            raise TypeError(f"{path or 'the value'} is a tensor of {value.dtype}, which cannot be serialised.")
        # The same tensor object in two places travels once, which is what keeps tied weights cheap.
        if id(value) not in names:
            names[id(value)] = str(len(tensors))
            tensors[names[id(value)]] = value
        return {"$tensor": names[id(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # Of one width, so that the size of a message tells nothing of its numbers.
        return {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _flatten(item, tensors, names, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [_flatten(key, tensors, names, path), _flatten(item, tensors, names, f"{path}.{key}")]
            for key, item in value.items()
        ]
        return {"$pairs": pairs}
    if isinstance(value, (list, tuple)):
        items = [_flatten(item, tensors, names, f"{path}[{i}]") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    raise TypeError(
        f"{path or 'the value'} is a {type(value).__name__}, which cannot be serialised: a message holds tensors, "
        "None, bool, int, float, str and dictionaries, lists and tuples of them."
    )


def _unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag == "$tensor":
            return tensors[content]
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if tag == "$tuple":
            return tuple(_unflatten(item, tensors) for item in content)
        if tag == "$pairs":
            return {_unflatten(key, tensors): _unflatten(item, tensors) for key, item in content}
    return {key: _unflatten(item, tensors) for key, item in value.items()}


def _split(tree: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a tree, ready for safetensors, and the metadata that holds the rest."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _flatten(tree, tensors, {}, "")
    metadata = {TREE_KEY: json.dumps(skeleton, separators=(",", ":"), allow_nan=False)}
    return tensors, metadata


def pack(tree: Any) -> bytes:
    """
    Serialise a tree of dictionaries, lists, tuples, scalars and tensors into one blob.

    Args:
        tree (`Any`):
            Tensors of any shape and dtype that safetensors knows, on any device; `None`, `bool`, `int`, `float`
            (also infinite and NaN), `str`; dictionaries with keys of these scalar types, lists and tuples of all that.

    Returns:
        `bytes`: A safetensors file.

    Raises:
        TypeError: If the tree holds anything else. The message names the place.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages import pack, unpack

    >>> unpack(pack({"step": 3, "betas": (0.9, 0.999), "state": {0: torch.ones(2)}}))
    {'step': 3, 'betas': (0.9, 0.999), 'state': {0: tensor([1., 1.])}}
    ```
    """
    tensors, metadata = _split(tree)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors refuses two names over one storage; a view of a shared storage becomes a copy of its own here.
    seen: set[int] = set()
    for name, tensor in own.items():
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.numel() and (pointer in seen or tensor.untyped_storage().nbytes() != tensor.nbytes):
            own[name] = tensor.clone()
        seen.add(pointer)
    return safetensors.torch.save(own, metadata)


def unpack(blob: bytes) -> Any:
    """
    The tree that [`pack`] serialised.

    Args:
        blob (`bytes`): What `pack` returned.

    Returns:
        `Any`: The tree; tensors are on the CPU.

    Raises:
        ValueError: If the blob is not one of ours or is cut short.
    """
    try:
        tensors = safetensors.torch.load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        return _unflatten(json.loads(header["__metadata__"][TREE_KEY]), tensors)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise ValueError(f"Not a packed tree: {error}. The file or message is damaged or of another kind.") from error


def packed_size(tree: Any) -> int:
    """
    `len(pack(tree))` in bytes, computed from shapes without copying a tensor.

    It follows the safetensors layout: eight bytes of length, a JSON header padded to a multiple of eight, the tensors
    ordered by dtype, widest first, and then by name.
    """
    tensors, metadata = _split(tree)
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_LAYOUT[item[1].dtype][0], item[0])):
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _LAYOUT[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + math.ceil(len(header_bytes) / 8) * 8 + offset


# safetensors' name of each dtype, and its place in the file.
_LAYOUT: dict[torch.dtype, tuple[int, str]] = {
    dtype: (place, name)
    for place, (dtype, name) in enumerate(
        [
            (torch.uint64, "U64"),
            (torch.int64, "I64"),
            (torch.float64, "F64"),
            (torch.complex64, "C64"),
            (torch.float32, "F32"),
            (torch.uint32, "U32"),
            (torch.int32, "I32"),
            (torch.bfloat16, "BF16"),
            (torch.float16, "F16"),
            (torch.uint16, "U16"),
            (torch.int16, "I16"),
            (torch.float8_e4m3fn, "F8_E4M3"),
            (torch.float8_e5m2, "F8_E5M2"),
            (torch.int8, "I8"),
            (torch.uint8, "U8"),
            (torch.bool, "BOOL"),
        ]
    )
}


@dataclass(frozen=True)
class Message:
    """
    Base of everything that crosses a client's boundary.

    A subclass declares its fields and nothing else travels: [`~Message.to_bytes`] serialises exactly these, and
    [`~Message.from_bytes`] refuses a blob that holds others.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): The client at the other end.
    """

    kind: ClassVar[str] = ""

    round: int
    client_id: str

    def _tree(self) -> dict[str, Any]:
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {"kind": self.kind, "fields": fields}

    def to_bytes(self) -> bytes:
        """One blob of bytes: safetensors with a JSON header."""
        return pack(self._tree())

    @property
    def num_bytes(self) -> int:
        """`len(self.to_bytes())`, without serialising."""
        return packed_size(self._tree())

    @classmethod
    def from_bytes(cls: type[M], blob: bytes) -> M:
        """
        The message that `to_bytes` wrote.

        Raises:
            ValueError: If the blob is damaged, of another kind, or has other fields than this message declares.
        """
        return cls._from_tree(unpack(blob))

    @classmethod
    def _from_tree(cls: type[M], tree: Any) -> M:
        kind = tree.get("kind") if isinstance(tree, dict) else type(tree).__name__
        if kind != cls.kind:
            raise ValueError(f"Expected a message of kind {cls.kind!r}, got {kind!r}.")
        expected = {item.name for item in dataclasses.fields(cls)}
        fields = tree.get("fields")
        if not isinstance(fields, dict) or set(fields) != expected:
            given = list(fields) if isinstance(fields, dict) else fields
            raise ValueError(f"A {cls.kind!r} message has the fields {sorted(expected)}, got {given!r}.")
        return cls(**fields)


@dataclass(frozen=True)
class Fit(Message):
    """
    Server to client: train on your data from this state.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): To whom it goes.
        seed (`int`): What the client draws its randomness from, except for shuffling. Below 2**32.
        state (`dict[str, torch.Tensor]`): The global values of what is exchanged, by parameter name.
        extra (`dict[str, torch.Tensor]`): What the algorithm sends beside it, by parameter name (Scaffold: the server
            control variate). Empty for most.
        settings (`dict[str, Any]`): The algorithm's numbers for this round, JSON scalars only.
    """

    kind: ClassVar[str] = "fit"

    seed: int
    state: dict[str, torch.Tensor]
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate(Message):
    """
    Client to server: what local training made of the state.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        state (`dict[str, torch.Tensor]`): The trained values, with the keys, shapes and dtypes of the state received.
        num_examples (`int`): Rows of the client's training data; of a stream, rows seen this round.
        num_tokens (`int`): Input tokens seen this round without padding; 0 when not counted.
        num_steps (`int`): Optimizer steps taken this round.
        metrics (`dict[str, float]`): Mean training loss, last gradient norm and learning rate, floating point
            operations, samples seen.
        extra (`dict[str, torch.Tensor]`): What the algorithm asks for beside the state (Scaffold: the change of the
            client's control variate).
    """

    kind: ClassVar[str] = "client_update"

    state: dict[str, torch.Tensor]
    num_examples: int
    num_tokens: int
    num_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluate(Message):
    """
    Server to client: evaluate this state on your evaluation data.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): To whom it goes.
        state (`dict[str, torch.Tensor]`): The global values of what is exchanged, by parameter name.
    """

    kind: ClassVar[str] = "evaluate"

    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Metrics(Message):
    """
    Client to server: how the state did on the client's evaluation data.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        num_examples (`int`): Rows evaluated.
        metrics (`dict[str, float]`): The client's metrics, named as `compute_metrics` names them, with `eval_` before.
    """

    kind: ClassVar[str] = "metrics"

    num_examples: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ClientFailure(Message):
    """
    Client to server: the work asked for could not be done.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        error (`str`): The error's class and text. It may name rows of the client's data only if the error did.
    """

    kind: ClassVar[str] = "client_failure"

    error: str


KINDS: dict[str, type[Message]] = {cls.kind: cls for cls in (Fit, ClientUpdate, Evaluate, Metrics, ClientFailure)}


def read_message(blob: bytes) -> Message:
    """
    The message of whatever kind a blob holds.

    Raises:
        ValueError: If the blob is damaged or its kind is unknown.
    """
    tree = unpack(blob)
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"Unknown kind of message {kind!r}; known are {sorted(KINDS)}.")
    return KINDS[kind]._from_tree(tree)
