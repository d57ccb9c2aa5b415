"""Key/value cache of the blocks of a part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache


class BlockCache(DynamicCache):
    """
    A cache for blocks that keep their numbers in the full model.

    A block writes its keys and values under its number. All other methods count the blocks of the part from 0, as the
    model class does, which reads the number of cached tokens from the first block. A part without blocks counts its
    tokens with `count_tokens`, because its model class may compute positions from the number of cached tokens.

    Args:
        blocks (`range`): Numbers of the part's blocks in the full model.
        kwargs: Arguments of `DynamicCache`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.split.block_cache import BlockCache

    >>> cache = BlockCache(range(3, 5))
    >>> keys, values = cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), layer_idx=3)
    >>> cache.get_seq_length()
    5
    ```
    """

    def __init__(self, blocks: range, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = blocks
        self._num_tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Count the tokens of a call of a part without blocks."""
        self._num_tokens += num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens, including the tokens of a prefix."""
        return super().get_seq_length(layer_idx) if self.blocks else self._num_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Append keys and values of a block.

        Args:
            key_states (`torch.Tensor`): Keys of shape `(batch, heads, sequence, size)`.
            value_states (`torch.Tensor`): Values of the same shape.
            layer_idx (`int`): Number of the block in the full model.
            args: Further arguments of `DynamicCache.update`.
            kwargs: Further arguments of `DynamicCache.update`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: All keys and values of the block.
        """
        return super().update(key_states, value_states, layer_idx - self.blocks.start, *args, **kwargs)
