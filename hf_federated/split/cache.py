"""Key/value cache for generation with a split model. Each part of the model holds the cache of its blocks."""

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
    The cache that `generate` passes from token to token.

    This object holds the caches of head and tail. The server holds the cache of the body. After this object is
    deleted, the client notifies the server at the end of `generate` or with the next call of the model, and the server
    drops the cache of the body. The length of the cache is the number of tokens, without prefixes.

    Args:
        head ([`Part`]): The client's first part.
        tail ([`Part`]): The client's last part.
        boundary ([`Boundary`]): The client's side of the cut layer.
    """

    def __init__(self, head: Part, tail: Part, boundary: Boundary) -> None:
        super().__init__()
        self.head = head.new_cache()
        self.tail = tail.new_cache()
        # The id is random, because a counter would repeat the ids of old caches after a restart of the client.
        self.cache_id = secrets.randbits(62)
        self.length = 0
        self.num_sequences: int | None = None
        # Whether a call failed, so that the parts may hold different tokens.
        self.is_broken = False
        # All tokens, if the layout's runner computes positions from the tokens. The tokens stay with the client.
        self.tokens: torch.Tensor | None = None
        # The order of the sequences since the last call, which the next call sends to the server.
        self._reorder: torch.Tensor | None = None
        weakref.finalize(self, boundary.drop, self.cache_id)

    def begin_call(self, num_sequences: int) -> None:
        """
        Prepare for a call that appends to the cache. Call `end_call` afterwards.

        Args:
            num_sequences (`int`): Number of sequences of the call.

        Raises:
            ValueError: If the previous call failed or had a different number of sequences, or gradients are enabled.
        """
        if self.is_broken:
            raise ValueError(
                "A previous call with this cache failed, so client and server may have cached different tokens. "
                "Create a new cache and generate from the beginning."
            )
        if self.num_sequences not in (None, num_sequences):
            raise ValueError(
                f"The call has {num_sequences} sequences, but the cache has {self.num_sequences} sequences. Create a "
                "new cache and generate from the beginning."
            )
        if torch.is_grad_enabled():
            raise ValueError(
                "A cache is for generation, but gradients are enabled. Call the model under torch.no_grad()."
            )
        self.is_broken = True

    def end_call(self, num_sequences: int, length: int, tokens: torch.Tensor | None) -> None:
        """
        Record the content of all parts after a successful call.

        Args:
            num_sequences (`int`): Number of sequences.
            length (`int`): Number of tokens of each sequence, including previous tokens.
            tokens (`torch.Tensor`, *optional*):
                Token ids of shape `(num_sequences, length)`, if the layout's runner needs them.
        """
        self.num_sequences, self.length, self.tokens, self.is_broken = num_sequences, length, tokens, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in the cache."""
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """
        Reorder the sequences, for beam search. The server reorders its part with the next call of the model.

        Args:
            beam_idx (`torch.Tensor`):
                Integer tensor of shape `(num_sequences,)`. Sequence `i` becomes a copy of sequence `beam_idx[i]`.

        Raises:
            ValueError: If the shape differs.
        """
        if self.num_sequences is None:
            return
        if beam_idx.shape != (self.num_sequences,):
            raise ValueError(
                f"beam_idx has shape {tuple(beam_idx.shape)}, but the cache has {self.num_sequences} sequences. Pass "
                f"a tensor of shape ({self.num_sequences},)."
            )
        self.head.reorder_cache(beam_idx)
        self.tail.reorder_cache(beam_idx)
        if self.tokens is not None:
            self.tokens = self.tokens[beam_idx]
        self._reorder = beam_idx if self._reorder is None else self._reorder[beam_idx]

    @property
    def is_linear(self) -> list[bool]:
        """Whether the layers have linear attention. Without layers, `generate` would run cached tokens again."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """Whether the cache can be cut. If so, `generate` runs a step that it removes from the cache."""
        return False

    def take_reorder(self) -> torch.Tensor | None:
        """Return the order that the server has not received yet, and forget it."""
        reorder, self._reorder = self._reorder, None
        return reorder

    def _raise_unsupported(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raise an error for operations that copy or cut the cache.

        Raises:
            ValueError: Always. The server cannot copy or cut its part of the cache.
        """
        raise ValueError(
            "The cache of a split model cannot be copied or cut, because the server holds a part of it. Generate "
            "from the beginning."
        )

    crop = reset = batch_repeat_interleave = batch_select_indices = __deepcopy__ = _raise_unsupported
