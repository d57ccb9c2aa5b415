"""The key/value cache of a generation, a part of it with each part of the model."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

import torch
from transformers import DynamicCache

from .boundary import Boundary
from .parts import Part


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
        # Not counted: a client that was started again must not meet what it left behind.
        self.number = secrets.randbits(62)
        self.length = 0
        # All tokens, where a layout's runner makes positions of them. They stay here.
        self.tokens: torch.Tensor | None = None
        weakref.finalize(self, boundary.forget, self.number)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        return self.length

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            ValueError: Always: the server keeps its part of the rows where they are.
        """
        raise ValueError(
            "The rows of a split model's cache cannot be copied, cut or put into another order: the server has its "
            "part of them. Generate greedily or by sampling, from the beginning."
        )

    reorder_cache = crop = reset = batch_repeat_interleave = batch_select_indices = __deepcopy__ = _refuse
