"""Generation of text with a split model: the supported generation modes, and the cache in every part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import GenerationMode

from .._compat import prepare_generation_config
from .boundary import Boundary
from .cache import SplitCache
from .parts import Part


class SplitGenerationMixin(GenerationMixin):
    """`GenerationMixin` of `transformers` for [`SplitModel`], with a [`SplitCache`]."""

    client_head: Part
    client_tail: Part
    boundary: Boundary

    def new_cache(self) -> SplitCache:
        """Create an empty cache for all three parts."""
        return SplitCache(self.client_head, self.client_tail, self.boundary)

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """
        Generate text with greedy search or sampling, and a cache in every part. The text stays with the client.

        The arguments are the arguments of `GenerationMixin.generate`.

        Raises:
            ValueError: If another generation mode or a cache other than a dynamic cache is requested.
        """
        settings, _ = prepare_generation_config(self, generation_config, **kwargs)
        mode = settings.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            advice = (
                "Remove the arguments of assisted generation"
                if mode == GenerationMode.ASSISTED_GENERATION
                else "Set num_beams=1"
            )
            raise ValueError(
                f"The generation mode is {mode.value}, but a split model supports only greedy search and sampling. "
                f"{advice}."
            )
        if settings.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={settings.cache_implementation!r}, but a split model supports only a dynamic "
                "cache. Remove it."
            )
        if settings.use_cache and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = self.new_cache()
        output = super().generate(inputs, generation_config, **kwargs)
        # Without this reference the cache is deleted, and the server drops its part, unless the output has the cache.
        kwargs.pop("past_key_values", None)
        self.boundary.flush()
        return output
