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
    object is gone: at the end of `generate`, or before the next passage. Its length is that of the tokens, without
    prefixes.

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
        self.num_rows: int | None = None
        # Whether some parts hold what others do not: a call with it did not come to its end.
        self.is_broken = False
        # All tokens, where a layout's runner makes positions of them. They stay here.
        self.tokens: torch.Tensor | None = None
        weakref.finalize(self, boundary.drop, self.number)

    def begin(self, num_rows: int) -> None:
        """
        Before a call that adds to it; `end` comes after.

        Args:
            num_rows (`int`): Rows of the call.

        Raises:
            ValueError: If the call before did not come to its end, was of other rows, or gradients are on.
        """
        if self.is_broken:
            raise ValueError("A call with this cache failed, so its parts differ: generate from the beginning.")
        if self.num_rows not in (None, num_rows):
            raise ValueError(f"{num_rows} rows came to a cache of {self.num_rows}: generate from the beginning.")
        if torch.is_grad_enabled():
            raise ValueError("A cache is for generation, without gradients: call the model under torch.no_grad().")
        self.is_broken = True

    def end(self, num_rows: int, length: int, tokens: torch.Tensor | None) -> None:
        """
        After a call: what all parts hold now.

        Args:
            num_rows (`int`): Rows.
            length (`int`): Tokens of each, with those before.
            tokens (`torch.Tensor`, *optional*): Shape `(num_rows, length)`, where a layout's runner asks for them.
        """
        self.num_rows, self.length, self.tokens, self.is_broken = num_rows, length, tokens, False

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
