"""Key/value cache of the blocks of a part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache


class BlockCache(DynamicCache):
    """
    A cache for blocks that keep their numbers in the full model.

    A block writes its keys and values under its number. All other methods count the blocks of the part from 0, as the
    model class does, which reads the number of cached tokens from the first block.

    Args:
        first_block (`int`): Number of the part's first block in the full model.
        kwargs: Arguments of `DynamicCache`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.split.block_cache import BlockCache

    >>> cache = BlockCache(first_block=3)
    >>> keys, values = cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), layer_idx=3)
    >>> cache.get_seq_length()
    5
    ```
    """

    def __init__(self, first_block: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first_block = first_block

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
        return super().update(key_states, value_states, layer_idx - self.first_block, *args, **kwargs)
