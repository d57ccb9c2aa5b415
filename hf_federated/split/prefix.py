"""p-tuning v2 in a part: trained keys and values of its own blocks, before those of the tokens.

Liu et al. 2021 (P-Tuning v2) as FL-GLM uses it (appendix A): in block i, `K' = [prefix_key_i : K]` and
`V' = [prefix_value_i : V]`. Each part owns the prefixes of its blocks, so none of them travels. The encoder is PEFT's,
with the same layout, and parts' prefixes side by side are those of PEFT's prefix tuning on the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PrefixEncoder, PrefixTuningConfig
from torch import nn
from transformers import DynamicCache


class Prefix(nn.Module):
    """
    The prefixes of one part's blocks.

    Args:
        config (`PrefixTuningConfig`): With `num_layers`, `token_dim` and `num_attention_heads` of this part.

    Example:

    ```python
    >>> import torch
    >>> from peft import PrefixTuningConfig
    >>> from hf_federated.split import Prefix

    >>> prefix = Prefix(PrefixTuningConfig(num_virtual_tokens=3, num_layers=2, token_dim=8, num_attention_heads=4))
    >>> prefix.fill(None, batch_size=5, dtype=torch.float32).layers[1].keys.shape
    torch.Size([5, 4, 3, 2])
    ```
    """

    def __init__(self, config: PrefixTuningConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = PrefixEncoder(config)

    @property
    def length(self) -> int:
        """Positions that the prefix takes."""
        return self.config.num_virtual_tokens

    def embeddings(self) -> torch.Tensor:
        """Shape `(length, 2 · blocks · token_dim)`: key and value of block 0, of block 1, …"""
        return self.encoder(torch.arange(self.length, device=self.encoder.embedding.weight.device))

    def fill(self, cache: Any, batch_size: int, dtype: torch.dtype) -> Any:
        """
        A cache that holds the prefixes.

        Args:
            cache (`Cache`, *optional*): An empty one to fill; by default a new one.
            batch_size (`int`): Rows.
            dtype (`torch.dtype`): The model's.
        """
        heads = self.config.num_attention_heads
        states = self.embeddings().to(dtype)
        # (length, blocks, key or value, heads, head size)
        states = states.view(self.length, self.config.num_layers, 2, heads, self.config.token_dim // heads)
        states = states.permute(1, 2, 3, 0, 4)  # (blocks, key or value, heads, length, head size)
        cache = DynamicCache() if cache is None else cache
        for block, (key, value) in enumerate(states):
            shape = (batch_size, *key.shape)
            cache.update(key.expand(shape), value.expand(shape), block)
        return cache

    def shift(
        self, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Mask and positions with the prefix before the tokens.

        Raises:
            ValueError: If a row is of several sequences, which are kept apart only where nothing is cached.
        """
        if attention_mask is None and position_ids is not None and (position_ids.diff(dim=-1) != 1).any():
            raise ValueError(
                "Sequences packed into one row would see each other behind a prefix: pack nothing, or use LoRA."
            )
        if attention_mask is not None:
            ones = attention_mask.new_ones(attention_mask.shape[0], self.length)
            attention_mask = torch.cat((ones, attention_mask), dim=1)
        if position_ids is not None:
            position_ids = position_ids + self.length
        return attention_mask, position_ids
