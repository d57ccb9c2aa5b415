"""Generation of text with a split model: the supported generation modes, and the cache in every part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin

from .._compat import CACHE_NAME, prepare_generation_config
from .boundary import Boundary
from .cache import SplitCache
from .parts import Part


_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# What to change if another mode is requested.
_ADVICE = {
    "assisted_generation": "Remove the arguments of assisted generation",
    "constrained_beam_search": "Remove constraints and force_words_ids",
    "contrastive_search": "Remove penalty_alpha",
    "dola_generation": "Remove dola_layers",
    "group_beam_search": "Set num_beam_groups=1",
}


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
        Generate text with greedy search, sampling or beam search, and a cache in every part.

        The arguments are the arguments of `GenerationMixin.generate`. The text stays with the client. All prompts are
        one exchange with the server, and each further token of all sequences is one exchange. In beam search, the
        server also receives the beam that each sequence continues.

        Raises:
            ValueError: If another generation mode or a cache other than a dynamic cache is requested.
        """
        settings, _ = prepare_generation_config(self, generation_config, **kwargs)
        mode = settings.get_generation_mode(kwargs.get("assistant_model")).value
        if mode not in _MODES:
            raise ValueError(
                f"The generation mode is {mode}, but a split model supports only greedy search, sampling and "
                f"beam search. {_ADVICE.get(mode, 'Remove its arguments')}."
            )
        if settings.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={settings.cache_implementation!r}, but a split model supports only a dynamic "
                "cache. Remove it."
            )
        for name in ("past_key_values", "cache"):
            if name in kwargs:
                kwargs[CACHE_NAME] = kwargs.pop(name)
        if settings.use_cache and kwargs.get(CACHE_NAME) is None:
            kwargs[CACHE_NAME] = self.new_cache()
        output = super().generate(inputs, generation_config, **kwargs)
        # Without this reference the cache is deleted, and the server drops its part, unless the output has the cache.
        kwargs.pop(CACHE_NAME, None)
        self.boundary.flush()
        return output
