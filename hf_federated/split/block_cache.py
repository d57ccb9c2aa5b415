"""Key/value cache of the blocks of a part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin


class BlockCache(DynamicCache):
    """
    A cache for blocks that keep their numbers in the full model.

    A block reads and writes its states under its number. All other methods count the blocks of the part from 0, as the
    model class does, which reads the number of cached tokens from the first block with attention. A part without such
    a block counts its tokens with `count_tokens`, because its model class computes positions and masks from the number
    of cached tokens.

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

    @property
    def has_keys(self) -> bool:
        """Whether a block of the part has keys and values. Blocks with linear attention have not."""
        # Without a config, as with a prefix, the layers are created by the first call.
        return len(self.blocks) > 0 and (not self.layers or any(isinstance(x, CacheLayerMixin) for x in self.layers))

    def count_tokens(self, num_tokens: int) -> None:
        """Count the tokens of a call of a part in which no block has keys and values."""
        self._num_tokens += num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens, including the tokens of a prefix."""
        return super().get_seq_length(layer_idx) if self.has_keys else self._num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and the offset of the keys for a mask."""
        if self.has_keys:
            return super().get_mask_sizes(query_length, layer_idx)
        return self._num_tokens + query_length, 0

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

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return the state of a block's convolution."""
        return super().get_conv_state(layer_idx - self.blocks.start, *args, **kwargs)

    def update_conv_state(self, states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Set the state of a block's convolution."""
        return super().update_conv_state(states, layer_idx - self.blocks.start, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return the recurrent state of a block."""
        return super().get_recurrent_state(layer_idx - self.blocks.start, *args, **kwargs)

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Set the recurrent state of a block."""
        return super().update_recurrent_state(states, layer_idx - self.blocks.start, *args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a block keeps previous states."""
        return super().is_recording_past(layer_idx - self.blocks.start)
