"""P-tuning v2 in a part: trained keys and values of its blocks, placed before the keys and values of the tokens.

The method is P-Tuning v2 (Liu et al. 2021) as FL-GLM uses it (appendix A): in block i, `K' = [prefix_key_i : K]` and
`V' = [prefix_value_i : V]`. Each part owns the prefixes of its blocks, so prefixes are never sent. The encoder and its
weight layout are PEFT's. The prefixes of all parts, concatenated, are the prefixes of PEFT's prefix tuning on the full
model.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PrefixEncoder, PrefixTuningConfig
from torch import nn
from transformers import DynamicCache


class Prefix(nn.Module):
    """
    Trained prefixes of one part's blocks.

    Args:
        config (`PrefixTuningConfig`):
            The config with `num_layers`, `token_dim` and `num_attention_heads` set for this part.

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
        """Number of positions of the prefix."""
        return self.config.num_virtual_tokens

    def embeddings(self) -> torch.Tensor:
        """Return the prefixes, shape `(length, 2 · blocks · token_dim)`: key and value of block 0, of block 1, …"""
        return self.encoder(torch.arange(self.length, device=self.encoder.embedding.weight.device))

    def fill(self, cache: Any, batch_size: int, dtype: torch.dtype, first_block: int = 0) -> Any:
        """
        Write the prefixes to a key/value cache.

        Args:
            cache (`Cache`, *optional*): An empty cache. By default a new `DynamicCache` is created.
            batch_size (`int`): Number of sequences in the batch.
            dtype (`torch.dtype`): The dtype of the model.
            first_block (`int`, *optional*, defaults to `0`): Number under which the cache expects the first block.

        Returns:
            `Cache`: The filled cache.
        """
        heads = self.config.num_attention_heads
        states = self.embeddings().to(dtype)
        # (length, blocks, key or value, heads, head size)
        states = states.view(self.length, self.config.num_layers, 2, heads, self.config.token_dim // heads)
        states = states.permute(1, 2, 3, 0, 4)  # (blocks, key or value, heads, length, head size)
        cache = DynamicCache() if cache is None else cache
        for block, (key, value) in enumerate(states):
            shape = (batch_size, *key.shape)
            cache.update(key.expand(shape), value.expand(shape), first_block + block)
        return cache

    def shift(
        self, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Extend the attention mask by the prefix, and shift the positions by the length of the prefix.

        Raises:
            ValueError: If several sequences are packed into one row. Attention separates packed sequences only if
                there is no cache, and the prefix is in a cache.
        """
        if attention_mask is None and position_ids is not None and (position_ids.diff(dim=-1) != 1).any():
            raise ValueError(
                "Several sequences are packed into one row. With prefix tuning they would attend to each other. "
                "Disable packing, or use LoRA."
            )
        if attention_mask is not None:
            ones = attention_mask.new_ones(attention_mask.shape[0], self.length)
            attention_mask = torch.cat((ones, attention_mask), dim=1)
        if position_ids is not None:
            position_ids = position_ids + self.length
        return attention_mask, position_ids
