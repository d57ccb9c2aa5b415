"""Serialization of messages and stored state: a tree of scalars and tensors as one blob of bytes.

A blob is a safetensors file. Its metadata contains, as JSON, all values that are not tensors. Nothing is pickled, so
it is safe to read a blob from an untrusted file or network.

A [`FlatTree`] has the shortest header: each scalar is an entry of the metadata, and each tensor has its key as its
name. The metadata of any other tree has one entry, `"tree"`, which refers to the tensors by number.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..utils.fields import MAX_NAME_LENGTH
from ..utils.printable import printable
from ..utils.untrusted_json import MAX_BYTES, MAX_DEPTH, MAX_TEXT, MAX_VALUES, parse_json
from .narrowed_state import NarrowedState, NarrowedTensor
from .stored_tensors import DTYPES, METADATA_KEY, read_tensors


_quoted = json.encoder.encode_basestring_ascii
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_to_utf8_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

TREE_KEY = "tree"
# Length of the field that contains the length of the header.
_LENGTH_BYTES = 8
# Number of tensors of a message, if the reader expects no other number. A model with 384 experts in each of 60 layers
# has about 70,000 tensors of experts.
MAX_TENSORS = 100_000
# Number of tensors of a file of a checkpoint, which has the states of optimizers.
MAX_FILE_TENSORS = 1_000_000
# For messages between the processes of a launch.
UNLIMITED_TENSORS = 10**12
# Limits of a header without tensors, and what each tensor adds. A tensor has about 10 values.
_BASE_BYTES, _TENSOR_BYTES = 8 * 1024**2, 2048
_BASE_VALUES, _TENSOR_VALUES = 300_000, 32
# Number of characters of a received text in an error.
_MAX_SHOWN = 300


# Tensors of a tree. The values of some are converted when they are written.
Stored = torch.Tensor | NarrowedTensor


def _flatten(value: Any, tensors: dict[str, Stored], names: dict[int, str], path: str) -> Any:
    """Replace each tensor of a tree by a reference, and each value that JSON cannot represent by a tagged value."""
    if isinstance(value, NarrowedState):
        value = value.unread
    if isinstance(value, (torch.Tensor, NarrowedTensor)):
        # A tensor object that occurs twice is serialized once, so tied weights need no additional bytes.
        if id(value) not in names:
            names[id(value)] = str(len(tensors))
            tensors[names[id(value)]] = _checked(value, path)
        return {"$tensor": names[id(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # A fixed width, so that the size of a message reveals nothing about its numbers.
        return {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, Mapping):
        if all(map(_is_plain_key, value)):
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
        f"{path or 'the value'} is a {type(value).__name__}, which cannot be serialized: a message holds tensors, "
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
    content = {key: _unflatten(item, tensors) for key, item in value.items()}
    return FlatTree(content) if isinstance(value, FlatTree) else content


class FlatTree(dict[str, Any]):
    """
    A dictionary of tensors and scalars: `None`, `bool`, `int`, `float` and `str`.

    No key may be `"tree"` or `"__metadata__"`. A tensor that occurs twice is serialized twice.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages.serialization import FlatTree, pack, unpack

    >>> message = {"kind": "metrics", "step": 3, "values": torch.ones(2)}
    >>> len(pack(FlatTree(message))) < len(pack(message))
    True
    >>> unpack(pack(FlatTree(message)))
    {'kind': 'metrics', 'step': 3, 'values': tensor([1., 1.])}
    ```
    """


def _split(tree: Any) -> tuple[dict[str, Stored], dict[str, str]]:
    """Split a tree into its tensors by name, in the order of the file, and the metadata with all other values."""
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    if isinstance(tree, FlatTree):
        for key, value in tree.items():
            if not _is_plain_key(key) or key in (TREE_KEY, METADATA_KEY) or isinstance(value, (Mapping, list, tuple)):
                raise TypeError(f"A flat tree cannot contain the {type(value).__name__} {key!r}.")
            if isinstance(value, torch.Tensor):
                tensors[key] = _checked(value, key)
            else:
                metadata[key] = _to_json(_flatten(value, {}, {}, key))
    else:
        metadata[TREE_KEY] = _to_json(_flatten(tree, tensors, {}, ""))
    # As safetensors sorts tensors: by dtype, widest first, and then by name.
    in_file_order = sorted(tensors.items(), key=lambda item: (_LAYOUT[item[1].dtype][0], item[0]))
    return dict(in_file_order), metadata


def _checked(tensor: Stored, path: str) -> Stored:
    if tensor.dtype not in _LAYOUT:
        raise TypeError(f"{path or 'the value'} is a tensor of {tensor.dtype}, which cannot be serialized.")
    return tensor


def pack(tree: Any) -> bytes:
    """
    Serialize a tree of dictionaries, lists, tuples, scalars and tensors into one blob.

    Args:
        tree (`Any`):
            Tree of dictionaries, lists and tuples. Its values are tensors of any shape, on any device and of any dtype
            that safetensors supports, or `None`, `bool`, `int`, `float` (including infinite values and NaN) or `str`.
            Keys of dictionaries are of these scalar types.

    Returns:
        `bytes`: A safetensors file.

    Raises:
        TypeError: If the tree contains a value of another type. The message contains the path of the value.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages.serialization import pack, unpack

    >>> unpack(pack({"step": 3, "betas": (0.9, 0.999), "state": {0: torch.ones(2)}}))
    {'step': 3, 'betas': (0.9, 0.999), 'state': {0: tensor([1., 1.])}}
    ```
    """
    return b"".join(PackedPieces(tree))


class PackedPieces:
    """
    A serialized tree in pieces, without a copy of its tensors. The joined pieces equal the return value of [`pack`].

    The pieces are views of the tensors, so the tensors must not change while the pieces are read. A tensor on an
    accelerator is copied when its piece is read.

    Args:
        tree (`Any`): The tree, as for `pack`.

    Raises:
        TypeError: As `pack`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages.serialization import PackedPieces, pack

    >>> tree = {"state": torch.ones(2), "step": 3}
    >>> b"".join(PackedPieces(tree)) == pack(tree)
    True
    ```
    """

    def __init__(self, tree: Any) -> None:
        self._tensors, metadata = _split(tree)
        header, num_data_bytes = _encode_header(self._tensors, metadata)
        padded = header.ljust(math.ceil(len(header) / 8) * 8)
        self._head = len(padded).to_bytes(8, "little") + padded
        self._num_bytes = len(self._head) + num_data_bytes

    def __len__(self) -> int:
        return self._num_bytes

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._head
        for stored in self._tensors.values():
            if stored.nbytes:
                tensor = stored.read() if isinstance(stored, NarrowedTensor) else stored
                yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def unpack(blob: bytes | memoryview, max_tensors: int = MAX_TENSORS) -> Any:
    """
    Restore a tree that [`pack`] serialized.

    Args:
        blob (`bytes` or `memoryview`):
            Return value of `pack`. The tensors share the memory of a `memoryview` that can be written to, which can be
            read only once: the tensors are moved to aligned addresses. Otherwise they are copies.
        max_tensors (`int`, *optional*):
            Largest number of tensors. It also limits the size of the header.

    Returns:
        `Any`: The tree, with its tensors on the CPU. Floating-point tensors are at multiples of 16 bytes, so that
        matrix products with them give the same bytes for each address of the blob.

    Raises:
        ValueError: If the blob is damaged, is incomplete or was not written by `pack`.
    """
    try:
        header, data = _read_header(blob, max_tensors)
        skeleton = _skeleton(header, max_tensors)
        return _unflatten(skeleton, read_tensors(blob, header, data))
    # A recursion that is too deep is a `RuntimeError`.
    except (struct.error, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        text = printable(error, _MAX_SHOWN)
        raise ValueError(f"Not a packed tree: {text}. The file or message is damaged or of another kind.") from error


def packed_kind(blob: bytes | memoryview, max_tensors: int = MAX_TENSORS) -> str | None:
    """Return the value of the key `kind` in a serialized tree, without reading the tensors, or `None` if missing."""
    try:
        skeleton = _skeleton(_read_header(blob, max_tensors)[0], max_tensors)
        if isinstance(skeleton, dict) and skeleton.keys() == {"$pairs"}:
            skeleton = {key: value for key, value in skeleton["$pairs"] if isinstance(key, str)}
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    kind = skeleton.get("kind") if isinstance(skeleton, dict) else None
    return kind if isinstance(kind, str) else None


def _read_header(blob: bytes | memoryview, max_tensors: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position of the byte after the header."""
    stop = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "little")
    if stop > len(blob):
        raise ValueError(f"the header of {len(blob)} bytes ends at byte {stop}")
    # The metadata can be one long text, and all levels are checked below.
    limits: dict[str, Any] = {**_limits(max_tensors), "max_text": None}
    header = parse_json(memoryview(blob)[_LENGTH_BYTES:stop], **limits)
    if not isinstance(header, dict):
        raise ValueError("the header is not a dictionary")
    if len(header) - 1 > max_tensors:
        raise ValueError(f"the header has {len(header) - 1} tensors, and at most {max_tensors} are allowed")
    if (longest := max(map(len, header), default=0)) > 2 * MAX_NAME_LENGTH:
        raise ValueError(f"a tensor has a name of {longest} characters, at most {2 * MAX_NAME_LENGTH} are allowed")
    return header, stop


@functools.cache
def _limits(max_tensors: int) -> dict[str, int | None]:
    """Return the limits of the header of a blob with at most this number of tensors, for `parse_json`."""
    # Only a file has more tensors than a message.
    factor = max(max_tensors // MAX_TENSORS, 1)
    return {
        "max_bytes": min(_BASE_BYTES + _TENSOR_BYTES * max_tensors, MAX_BYTES * factor),
        "max_values": min(_BASE_VALUES + _TENSOR_VALUES * max_tensors, MAX_VALUES * factor),
        "max_text": MAX_TEXT * factor,
        # `_unflatten` limits the depth.
        "max_depth": None,
    }


def _skeleton(header: Mapping[str, Any], max_tensors: int) -> Any:
    """
    Return a serialized tree with references instead of tensors.

    Args:
        header (`Mapping[str, Any]`): The header of the safetensors file.
        max_tensors (`int`): Largest number of tensors.
    """
    metadata = header[METADATA_KEY]
    if not isinstance(metadata, dict):
        raise ValueError("the metadata is not a dictionary")
    # A text of the header can contain more values than the limits of the header allow, as escaped characters.
    limits: dict[str, Any] = _limits(max_tensors)
    if TREE_KEY in metadata:
        return parse_json(metadata[TREE_KEY], **limits)
    skeleton = FlatTree(
        # A short text exceeds no limit.
        (key, json.loads(value) if len(value) <= MAX_DEPTH else parse_json(value, **limits))
        for key, value in metadata.items()
    )
    for name in header:
        if name in skeleton:
            raise ValueError(f"{name!r} is a tensor and another value")
        if name != METADATA_KEY:
            skeleton[name] = {"$tensor": name}
    return skeleton


def packed_size(tree: Any) -> int:
    """
    Return `len(pack(tree))` in bytes, computed from the shapes without copying tensors.

    The length of the header is computed once for all trees with the same names, shapes and dtypes, such as the updates
    of a round. Trees with other numbers and texts differ only by the lengths of these.
    """
    structure, length = _structure(tree)
    sizes = _SIZES.get(structure)
    if sizes is None:
        header, num_data_bytes = _encode_header(*_split(tree))
        sizes = (len(header) - length, num_data_bytes)
        if len(_SIZES) >= _MAX_SIZES:
            _SIZES.clear()
        _SIZES[structure] = sizes
    return 8 + math.ceil((sizes[0] + length) / 8) * 8 + sizes[1]


# Header length without scalars, and bytes of tensors, by structure.
_SIZES: dict[Any, tuple[int, int]] = {}
_MAX_SIZES = 256
_dtype_of, _shape_of = operator.attrgetter("dtype"), operator.attrgetter("shape")


def _structure(tree: Any) -> tuple[Any, int]:
    """
    Describe the names, shapes, dtypes and shared tensors of a tree, and count the bytes of its scalars.

    Both together determine the size of the packed tree. The function runs for every message, so it calls no Python
    function for an entry of the tree, and reads the tensors of a state with functions in C.

    Args:
        tree (`Any`): The tree.

    Returns:
        `tuple`: A hashable description, and the number of bytes of the scalars in the header, up to a constant that
            depends on the description.
    """
    # The tree in depth-first order. The entry of a mapping or a list states how many entries follow.
    parts: list[Any] = []
    ids: list[int] = []
    length = 0
    pending = [tree]
    while pending:
        value = pending.pop()
        kind: Any = type(value)
        form = _form_of(kind)
        if form is NarrowedState:
            value, form = value.unread, Mapping
        if form is str:
            parts.append(str)
            # The text of the tree is itself a text in the JSON header.
            length += len(_quoted(_quoted(value)))
        elif form is int:
            parts.append(int)
            length += len(int.__repr__(value))
        elif form is torch.Tensor:
            parts.append((value.dtype, value.shape))
            ids.append(id(value))
        elif form is float:
            parts.append(float)  # All floats have one length.
        elif form is bool:
            parts.append(value)
        elif form is Mapping:
            items = list(value.values())
            kinds = set(map(type, value))
            if kinds <= _TEXT or all(issubclass(kind, str) for kind in kinds):
                parts.append((kind is FlatTree, *value))
            else:
                parts.append((kind is FlatTree, len(value)))
                items = [entry for pair in value.items() for entry in pair]
            if set(map(type, items)) <= _TENSORS:
                # A state is the most frequent case and has the most entries.
                parts.append((*map(_dtype_of, items), *map(_shape_of, items)))
                ids.extend(map(id, items))
            else:
                pending.extend(reversed(items))
        elif form is list or form is tuple:
            parts.append((form, len(value)))
            pending.extend(reversed(value))
        else:
            parts.append(object())  # `_split` raises an error with the path of the value.
    # A shared tensor is serialized once. For each tensor, the position of its first occurrence.
    places: dict[int, int] = {}
    shared = tuple(map(places.setdefault, ids, range(len(ids)))) if len(set(ids)) < len(ids) else ()
    return (tuple(parts), shared), length


@functools.lru_cache(256)
def _form_of(kind: Any) -> Any:
    """Return how values of a type are serialized: `bool` for booleans and `None`, `None` for unknown types."""
    if issubclass(kind, NarrowedState):
        return NarrowedState
    if issubclass(kind, (torch.Tensor, NarrowedTensor)):
        return torch.Tensor
    forms = (float, bool, int, str, Mapping, list, tuple)
    return bool if kind is type(None) else next((form for form in forms if issubclass(kind, form)), None)


_TEXT = {str}
_TENSORS = {torch.Tensor, torch.nn.Parameter, NarrowedTensor}


def _is_plain_key(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("$")


def _encode_header(tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """
    Encode the JSON header of a safetensors file, and count the bytes of the tensors.

    The file consists of eight bytes with the length of the header, the header padded with spaces to a multiple of
    eight, and the tensors in the given order.
    """
    header: dict[str, Any] = {METADATA_KEY: metadata}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _LAYOUT[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    return _to_utf8_json(header).encode(), offset


# Rank and name of each dtype.
_LAYOUT = {dtype: (rank, name) for rank, (name, dtype) in enumerate(DTYPES.items())}
