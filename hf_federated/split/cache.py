"""The key/value cache of a generation, a part of it with each part of the model."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from transformers import DynamicCache

from .boundary import Boundary
from .parts import Part


_NUMBERS = itertools.count()


class SplitCache(DynamicCache):
    """
    What `generate` passes from token to token of a split model.

    Head and tail have caches of their own here; the server's lies with the server, which is told to drop it when this
    object is gone. Its length is that of the tokens, without prefixes.

    Args:
        head ([`Part`]): The client's first part.
        tail ([`Part`]): The client's last part.
        boundary ([`Boundary`]): To the server.
    """

    def __init__(self, head: Part, tail: Part, boundary: Boundary) -> None:
        super().__init__()
        self.head = head.new_cache()
        self.tail = tail.new_cache()
        self.number = next(_NUMBERS)
        self.length = 0
        weakref.finalize(self, boundary.forget, self.number)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        return self.length

    def reorder_cache(self, beam_idx: Any) -> None:
        """Refused: the server's rows would have to change places too."""
        raise ValueError("Beam search does not work through a split: its server keeps the rows' caches in place.")
