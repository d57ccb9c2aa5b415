"""Where the parts of a decoder model are: the one thing that splitting must know of an architecture.

A part is built as a model of the same class with fewer blocks (`parts.py`), so masks, rotary embeddings, windows and
caches are those of `transformers`. What a layout says is only which modules the client's first part owns, which its
last part owns, and what stands in their place elsewhere. A new architecture is one entry of [`LAYOUTS`].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig


# What stands where a part has no module: one that returns what it gets, one that adds nothing, or nothing at all.
StandIn = Literal["identity", "zero", "none"]


@dataclass(frozen=True)
class Layout:
    """
    Where the parts of a decoder model are, by the paths of modules in its `...ForCausalLM` class.

    Args:
        blocks (`str`): The list of blocks.
        embedding (`str`): The word embeddings.
        output (`str`): The linear layer onto the vocabulary.
        of_head (`Mapping[str, StandIn]`):
            Modules before the first block, and what stands there in the other parts: `"identity"`, `"zero"` (a module
            whose result adds nothing) or `"none"`. A path that a model does not have, or has as `None`, is passed
            over.
        of_tail (`Mapping[str, StandIn]`): Modules behind the last block, likewise.
        num_blocks (`str`, *optional*, defaults to `"num_hidden_layers"`): What the config calls the number of blocks.
        per_block (`tuple[str, ...]`, *optional*): Lists in the config with one entry a block, which are cut with it.
        by_number (`tuple[str, ...]`, *optional*):
            Settings that make a block depend on its own number, which changes when a model is cut: they must be off.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> from hf_federated.split import layout_of

    >>> layout_of(LlamaConfig()).blocks
    'model.layers'
    ```
    """

    blocks: str
    embedding: str
    output: str
    of_head: Mapping[str, StandIn]
    of_tail: Mapping[str, StandIn]
    num_blocks: str = "num_hidden_layers"
    per_block: tuple[str, ...] = ("layer_types",)
    by_number: tuple[str, ...] = ()


_LLAMA = Layout(
    blocks="model.layers",
    embedding="model.embed_tokens",
    output="lm_head",
    of_head={"model.embed_tokens": "identity"},
    of_tail={"model.norm": "identity", "lm_head": "identity"},
)

LAYOUTS: dict[str, Layout] = {
    "glm": _LLAMA,
    "glm4": _LLAMA,
    "gpt2": Layout(
        blocks="transformer.h",
        embedding="transformer.wte",
        output="lm_head",
        of_head={"transformer.wte": "identity", "transformer.wpe": "zero", "transformer.drop": "identity"},
        of_tail={"transformer.ln_f": "identity", "lm_head": "identity"},
        by_number=("scale_attn_by_inverse_layer_idx",),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "opt": Layout(
        blocks="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        output="lm_head",
        of_head={
            "model.decoder.embed_tokens": "identity",
            "model.decoder.embed_positions": "zero",
            "model.decoder.project_in": "none",
        },
        of_tail={
            "model.decoder.final_layer_norm": "none",
            "model.decoder.project_out": "none",
            "lm_head": "identity",
        },
    ),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def layout_of(config: PretrainedConfig) -> Layout:
    """
    The layout of a model.

    Args:
        config (`PretrainedConfig`): The model's.

    Raises:
        ValueError: If no entry of `LAYOUTS` has this model type, or a setting of the config makes its blocks depend
            on their numbers.
    """
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise ValueError(
            f"No layout for models of type {config.model_type!r}: known are {sorted(LAYOUTS)}. Add one to "
            "hf_federated.split.LAYOUTS, or give it: SplitModel.from_model(..., layout=Layout(...))."
        )
    for name in layout.by_number:
        if getattr(config, name):
            raise ValueError(
                f"{name}=True makes a block of {config.model_type!r} depend on its own number, which splitting "
                f"changes: this model cannot be split. Set {name}=False."
            )
    return layout


class AddsNothing(nn.Module):
    """In place of a table of positions: a scalar zero, whatever is asked."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Returns:
            `torch.Tensor`: Shape `()`, zero: no sum changes with it, neither in value nor in dtype.
        """
        return torch.zeros(())


def stand_in(kind: StandIn) -> nn.Module | None:
    """The module that stands where a part has none of its own."""
    return {"identity": nn.Identity(), "zero": AddsNothing(), "none": None}[kind]
