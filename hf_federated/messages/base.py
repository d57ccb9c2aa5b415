"""The base of all messages: a frozen dataclass whose fields serialise to one blob of bytes.

A blob is a safetensors file with a JSON header (`serialization.py`), never a pickle.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from .serialization import pack, packed_size, unpack


M = TypeVar("M", bound="Serializable")


@dataclass(frozen=True)
class Serializable:
    """
    A frozen dataclass that serialises to bytes: exactly its fields, and its kind.

    A subclass declares its fields and nothing else travels: [`~Serializable.to_bytes`] serialises exactly these, and
    [`~Serializable.from_bytes`] refuses a blob that holds others.
    """

    kind: ClassVar[str] = ""

    def to_tree(self) -> dict[str, Any]:
        """What is serialised: the kind and the fields, as a tree that `pack` takes."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {"kind": self.kind, "fields": fields}

    def to_bytes(self) -> bytes:
        """One blob of bytes: safetensors with a JSON header."""
        return pack(self.to_tree())

    @property
    def num_bytes(self) -> int:
        """`len(self.to_bytes())`, without serialising."""
        return packed_size(self.to_tree())

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
class Message(Serializable):
    """
    Base of what crosses a client's boundary in a round.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): The client at the other end.
    """

    round: int
    client_id: str
