"""Layout of a decoder model: the module paths that splitting needs to know about an architecture.

A part is a model of the same class with some of the blocks (see `parts.py`), so `transformers` provides its masks,
rotary embeddings, sliding windows and caches. A layout lists the modules of the client's head, the modules of the
client's tail, and the placeholder that replaces each of these modules in the other parts. To support a new
architecture, add one entry to `LAYOUTS` in `families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig


# The page that describes how to write a layout.
PAGE = "docs/how-to/write-a-split-layout.md"

# Placeholder for a module that a part does not have: "identity" returns its input, "zero" returns a zero that changes
# no sum, and "none" is `None`.
Placeholder = Literal["identity", "zero", "none"]


@dataclass(frozen=True)
class AttentionInputs:
    """
    Inputs that the blocks need in addition to the hidden states of a batch.

    Args:
        attention_mask (`torch.Tensor`, *optional*): Shape `(batch, sequence)`, 1 for tokens and 0 for padding.
        position_ids (`torch.Tensor`, *optional*): Shape `(batch or 1, sequence)`, or `(batch, 2, sequence)`.
        context_lengths (`torch.Tensor`, *optional*):
            Shape `(batch,)`. Number of first tokens that attend to each other in both directions.
    """

    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    context_lengths: torch.Tensor | None = None


@dataclass(frozen=True)
class PastKeyValues:
    """
    Keys and values that precede the keys and values of the current hidden states.

    Args:
        cache (`DynamicCache`): The cache of a part's blocks.
        prefix_length (`int`, *optional*, defaults to `0`):
            Number of positions in the cache that are a trained prefix and not tokens.
        update_cache (`bool`, *optional*, defaults to `False`):
            Whether to append the keys and values of the current hidden states to the cache.
    """

    cache: DynamicCache
    prefix_length: int = 0
    update_cache: bool = False


class BlockRunner(Protocol):
    """Runs the blocks of a model whose class does not accept hidden states in place of token ids."""

    def check_model(self, model: nn.Module) -> None:
        """
        Check properties of a model that its config does not define.

        Args:
            model (`torch.nn.Module`): The head, possibly on the meta device.

        Raises:
            ValueError: If the runner does not support the class of the model.
        """

    def attention_inputs(
        self, config: PretrainedConfig, input_ids: torch.Tensor, inputs: AttentionInputs, seen: int = 0
    ) -> AttentionInputs:
        """
        Compute the inputs of all blocks from the token ids, which only the client has. By default, return `inputs`.

        Args:
            config (`PretrainedConfig`): The config of the full model.
            input_ids (`torch.Tensor`): Shape `(batch, seen + sequence)`. The cached and the new tokens.
            inputs ([`AttentionInputs`]): The inputs that the caller passed.
            seen (`int`, *optional*, defaults to `0`): Number of tokens that a cache holds.
        """
        return inputs

    def key_value_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        """
        Return the number of key/value heads of a block, and the size of a head.

        Args:
            config (`PretrainedConfig`): The config of the full model.
        """

    def check(self, inputs: AttentionInputs) -> None:
        """
        Check that the blocks can use these inputs.

        Raises:
            ValueError: If a required input is missing, or the blocks do not support an input.
        """

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[int],
        states: torch.Tensor,
        inputs: AttentionInputs,
        past: PastKeyValues | None = None,
    ) -> torch.Tensor:
        """
        Run the blocks of a part.

        Args:
            model (`torch.nn.Module`): The part's model.
            blocks (`Sequence[int]`): Indices of the part's blocks in the full model.
            states (`torch.Tensor`): Hidden states of shape `(batch, sequence, hidden)`.
            inputs ([`AttentionInputs`]):
                Attention inputs of the batch. The attention mask also covers the tokens in the cache.
            past ([`PastKeyValues`], *optional*): Keys and values of previous tokens, of a prefix, or of both.

        Returns:
            `torch.Tensor`: Hidden states of shape `(batch, sequence, hidden)`.
        """


@dataclass(frozen=True)
class Layout:
    """
    Module paths of a decoder model in its `...ForCausalLM` class.

    Args:
        blocks (`str`): Path of the list of blocks.
        embedding (`str`): Path of the word embeddings.
        output (`str`): Path of the linear layer that maps hidden states to the vocabulary.
        head_modules (`Mapping[str, Placeholder]`):
            Modules before the first block, and their placeholder in the other parts: `"identity"`, `"zero"` (a module
            whose output changes no sum) or `"none"`. Paths that a model does not have, or that are `None`, are
            ignored.
        tail_modules (`Mapping[str, Placeholder]`):
            Modules after the last block, and their placeholder in the other parts.
        num_blocks (`str`, *optional*, defaults to `"num_hidden_layers"`):
            Name of the config setting that holds the number of blocks.
        head_settings (`Mapping[str, Any]`, *optional*):
            Config settings that change the hidden states between the embedding and the first block, such as the
            embedding multiplier of Granite, with the value that changes nothing. Body and tail get this value.
        max_positions (`str`, *optional*, defaults to `"max_position_embeddings"`):
            Name of the config setting that holds the maximum number of positions. The config may lack it.
        supports_prefixes (`bool`, *optional*, defaults to `True`):
            Whether all blocks have keys and values of one shape, as the prefixes of PEFT.
        norm (`str`, *optional*): Path of the norm after the last block. Required only with a `runner`.
        runner ([`BlockRunner`], *optional*):
            Runs the blocks of a model class that does not accept `inputs_embeds`, such as ChatGLM's own classes.

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
    head_modules: Mapping[str, Placeholder]
    tail_modules: Mapping[str, Placeholder]
    num_blocks: str = "num_hidden_layers"
    head_settings: Mapping[str, Any] = field(default_factory=dict)
    max_positions: str = "max_position_embeddings"
    supports_prefixes: bool = True
    norm: str = ""
    runner: BlockRunner | None = None


class ZeroModule(nn.Module):
    """Placeholder for a position embedding: returns a scalar zero for any input."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Return a zero.

        Returns:
            `torch.Tensor`: Shape `()`. Adding it changes neither the values nor the dtype of a sum.
        """
        return torch.zeros(())


def check_paths(model: nn.Module, layout: Layout, num_blocks: int) -> None:
    """
    Check that a model has the modules that its layout names.

    Args:
        model (`torch.nn.Module`): The full model, possibly on the meta device.
        layout ([`Layout`]): The layout.
        num_blocks (`int`): Number of blocks that the config defines.

    Raises:
        ValueError: If a module is missing, or the number of blocks differs.
    """
    parents = [path.rpartition(".")[0] for path in (*layout.head_modules, *layout.tail_modules)]
    for path in (layout.blocks, layout.embedding, layout.output, *parents):
        owner, found = model, ""
        for name in path.split(".") if path else ():
            children = dict(owner.named_children())
            if name not in children:
                raise ValueError(
                    f"{type(model).__name__} has no module {path!r}, which its layout names. The modules of "
                    f"{found or 'the model'} are {', '.join(children)}. Correct the layout, see {PAGE}."
                )
            owner, found = children[name], f"{found}.{name}".lstrip(".")
    blocks = model.get_submodule(layout.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != num_blocks:
        size = len(blocks) if isinstance(blocks, nn.ModuleList) else type(blocks).__name__
        raise ValueError(
            f"{layout.blocks!r} of {type(model).__name__} must be a ModuleList of {num_blocks} blocks "
            f"(config.{layout.num_blocks}), but is {size}. Correct blocks or num_blocks of the layout, see {PAGE}."
        )


def placeholder(kind: Placeholder) -> nn.Module | None:
    """Create the placeholder for a module that a part does not have."""
    return {"identity": nn.Identity(), "zero": ZeroModule(), "none": None}[kind]
