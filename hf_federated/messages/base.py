"""Base class of all messages: a frozen dataclass that serializes to one blob of bytes.

A blob is a safetensors file with a JSON header (`serialization.py`), never a pickle.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from .fields import Count, check_fields
from .serialization import PackedPieces, pack, packed_size, unpack


M = TypeVar("M", bound="Serializable")


@dataclass(frozen=True)
class Serializable:
    """
    Frozen dataclass that serializes its fields and its kind to bytes.

    A subclass declares its fields. [`~Serializable.to_bytes`] serializes only these fields, and
    [`~Serializable.from_bytes`] rejects a blob with different fields, or with values that the annotations of the
    fields do not allow (`fields.py`).
    """

    kind: ClassVar[str] = ""

    def to_tree(self) -> dict[str, Any]:
        """Return the kind and the fields as a tree for [`~hf_federated.messages.serialization.pack`]."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {"kind": self.kind, "fields": fields}

    def to_bytes(self) -> bytes:
        """Serialize to one blob of bytes: a safetensors file with a JSON header."""
        return pack(self.to_tree())

    def to_pieces(self) -> PackedPieces:
        """Serialize to the bytes of [`~Serializable.to_bytes`] in pieces, without a copy of the tensors."""
        return PackedPieces(self.to_tree())

    @property
    def num_bytes(self) -> int:
        """Length of [`~Serializable.to_bytes`] in bytes, computed without serializing."""
        return packed_size(self.to_tree())

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
        kind = tree.get("kind") if isinstance(tree, dict) else type(tree).__name__
        if kind != cls.kind:
            raise ValueError(f"Expected a message of kind {cls.kind!r}, got kind {kind!r}.")
        expected = {item.name for item in dataclasses.fields(cls)}
        fields = tree.get("fields")
        if not isinstance(fields, dict) or set(fields) != expected:
            given = list(fields) if isinstance(fields, dict) else fields
            raise ValueError(f"A message of kind {cls.kind!r} has the fields {sorted(expected)}, got {given!r}.")
        read = cls(**fields)
        try:
            check_fields(read)
        except ValueError as error:
            raise ValueError(f"A message of kind {cls.kind!r} has an invalid field: {error}") from error
        return read


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

    round: Count
    client_id: str
    nonce: str = field(default="", kw_only=True)
