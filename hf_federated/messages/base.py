"""Base class of all messages: a frozen dataclass that serializes to one blob of bytes.

A blob is a safetensors file with a JSON header (`serialization.py`), never a pickle.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch

from ..utils.fields import Count, check_values, describe
from ..utils.printable import printable
from ..utils.shards import ACTIVE, with_whole_shapes
from .serialization import FlatTree, PackedPieces, pack, packed_size, unpack


M = TypeVar("M", bound="Serializable")
R = TypeVar("R", bound="Message")
# Number of characters of received names that an error contains.
_MAX_SHOWN = 500


@dataclass(frozen=True)
class Serializable:
    """
    Frozen dataclass that serializes its fields and its kind to bytes.

    A subclass declares its fields. [`~Serializable.to_bytes`] serializes only these fields, and
    [`~Serializable.from_bytes`] rejects a blob with different fields, or with values that the annotations of the
    fields do not allow (`utils/fields.py`).
    """

    kind: ClassVar[str] = ""
    # Whether the constructor checks the fields, so that a reader does not repeat the check.
    checks_fields: ClassVar[bool] = False
    # Fields that are not sent with their default value. A message then has the bytes that it had before the field was
    # added.
    optional_fields: ClassVar[tuple[str, ...]] = ()

    def to_tree(self) -> dict[str, Any]:
        """Return the kind and the fields as a tree for [`~hf_federated.messages.serialization.pack`]."""
        defaults = _defaults(cast(Any, type(self)))
        fields = {name: getattr(self, name) for name in defaults}
        for name in self.optional_fields:
            if fields[name] == defaults[name]:
                del fields[name]
        return {"kind": self.kind, "fields": fields}

    def to_bytes(self) -> bytes:
        """Serialize to one blob of bytes: a safetensors file with a JSON header."""
        return pack(self.to_tree())

    def to_pieces(self) -> PackedPieces:
        """Serialize to the bytes of [`~Serializable.to_bytes`] in pieces, without a copy of the tensors."""
        return PackedPieces(self.to_tree())

    @property
    def num_bytes(self) -> int:
        """
        Length of [`~Serializable.to_bytes`] in bytes, computed without serializing.

        A message with shards has the length of the message with whole tensors.
        """
        tree = self.to_tree()
        return packed_size(with_whole_shapes(tree) if ACTIVE else tree)

    @classmethod
    def from_bytes(cls: type[M], blob: bytes | memoryview) -> M:
        """
        Read an object that [`~Serializable.to_bytes`] serialized.

        Args:
            blob (`bytes` or `memoryview`): Serialized object, as for [`~hf_federated.messages.serialization.unpack`].

        Raises:
            ValueError: If the blob is damaged, is of another kind, has other fields than this class declares, or a
                field has a value of another type or out of range.
        """
        return cls._from_tree(unpack(blob))

    @classmethod
    def _from_tree(cls: type[M], tree: Any) -> M:
        if (kind := kind_of(tree)) != cls.kind:
            raise ValueError(f"Expected a message of kind {cls.kind!r}, got kind {describe(kind)}.")
        expected = _defaults(cast(Any, cls))
        fields = cls._fields_of(tree)
        if not isinstance(fields, dict) or fields.keys() != expected.keys():
            raise ValueError(
                f"A message of kind {cls.kind!r} has the fields {sorted(expected)}, got {_shown(fields)}."
            )
        if not cls.checks_fields:
            check_values(cls, fields, f"A message of kind {cls.kind!r} has an invalid field: ")
        return cls(**fields)

    @classmethod
    def _fields_of(cls, tree: dict[str, Any]) -> Any:
        """Return the fields in a tree that `to_tree` returned. The tree is untrusted input."""
        fields, defaults = tree.get("fields"), _defaults(cast(Any, cls))
        return {name: defaults[name] for name in cls.optional_fields} | fields if isinstance(fields, dict) else fields


def kind_of(tree: Any) -> str:
    """Return the kind of a message in an untrusted tree, or the name of a type in brackets if it has no kind."""
    if not isinstance(tree, dict):
        return f"<{type(tree).__name__}>"
    kind = tree.get("kind")
    return kind if isinstance(kind, str) else f"<{type(kind).__name__}>"


def _shown(received: Any) -> str:
    """Describe received names of fields for an error, which must be short."""
    return printable(list(received), _MAX_SHOWN) if isinstance(received, (dict, set)) else describe(received)


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass by name, `dataclasses.MISSING` if a field has none."""
    return {item.name: item.default for item in dataclasses.fields(cls)}


@dataclass(frozen=True)
class FlatMessage(Serializable):
    """
    A message with a short header. Its fields are scalars, tensors and dictionaries of tensors.

    A field that has its default value is not sent. The tensors of a dictionary are sent as `field.key`. A dictionary
    must not be empty.
    """

    def to_tree(self) -> FlatTree:
        """Return the kind and the fields as a flat tree for [`~hf_federated.messages.serialization.pack`]."""
        tree = FlatTree(kind=self.kind)
        for name, default in _defaults(cast(Any, type(self))).items():
            value = getattr(self, name)
            if isinstance(value, dict):
                for key, tensor in value.items():
                    tree[f"{name}.{key}"] = tensor
            elif isinstance(value, torch.Tensor) or value != default:
                tree[name] = value
        return tree

    @classmethod
    def _fields_of(cls, tree: dict[str, Any]) -> Any:
        if not isinstance(tree, FlatTree):
            raise ValueError(
                f"A message of kind {cls.kind!r} must be a flat tree. Use the same version of hf_federated for all "
                "parties."
            )
        sent: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for key, value in tree.items():
            name, dot, part = key.partition(".")
            if dot:
                parts.setdefault(name, {})[part] = value
            elif key != "kind":
                sent[key] = value
        if twice := sent.keys() & parts.keys():
            raise ValueError(f"A message of kind {cls.kind!r} has two values of the fields {_shown(twice)}.")
        missing = {
            name: default
            for name, default in _defaults(cast(Any, cls)).items()
            if default is not dataclasses.MISSING and name not in sent
        }
        return missing | sent | parts


@dataclass(frozen=True)
class Message(Serializable):
    """
    Base class of the messages between the server and a client in a round.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the client that sends or receives the message.
        nonce (`str`, *optional*): Random text that the engine adds to a request. The reply contains the same text, so
            a reply to an earlier request is refused.
    """

    # Kind of the reply of a client that succeeds. Empty for a reply, and for a request that any message may answer.
    answered_by: ClassVar[str] = ""
    # Largest number of requests of this kind that a client answers in a round.
    max_per_round: ClassVar[int] = 1
    # Phase of a round: 0 is local training, and 1 are the messages about public examples. In a round, a client refuses
    # requests of an earlier phase than its last request. `None` is any time.
    phase: ClassVar[int | None] = None

    round: Count
    client_id: str
    nonce: str = field(default="", kw_only=True)

    def with_nonce(self: R, nonce: str) -> R:
        """Return a copy with another nonce. It shares the values of the other fields, which are already checked."""
        if vars(self).keys() != _defaults(cast(Any, type(self))).keys():
            # A class with slots, or with cached properties.
            return dataclasses.replace(self, nonce=nonce)
        message = object.__new__(type(self))
        vars(message).update(vars(self), nonce=nonce)
        return message
