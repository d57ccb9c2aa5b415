"""Where the parts of a decoder model are: the one thing that splitting must know of an architecture.

A part is built as a model of the same class with fewer blocks (`parts.py`), so masks, rotary embeddings, windows and
caches are those of `transformers`. What a layout says is only which modules the client's first part owns, which its
last part owns, and what stands in their place elsewhere. A new architecture is one entry of
`LAYOUTS` in `families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig


# What stands where a part has no module: one that returns what it gets, one that adds nothing, or nothing at all.
StandIn = Literal["identity", "zero", "none"]


@dataclass(frozen=True)
class Places:
    """
    What blocks must know of a batch beside its hidden states.

    Args:
        attention_mask (`torch.Tensor`, *optional*): Shape `(batch, sequence)`, 1 for tokens.
        position_ids (`torch.Tensor`, *optional*): Shape `(batch or 1, sequence)`, or `(batch, 2, sequence)`.
        context_lengths (`torch.Tensor`, *optional*): Shape `(batch,)`: how many first tokens see one another.
    """

    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    context_lengths: torch.Tensor | None = None


@dataclass(frozen=True)
class Past:
    """
    Keys and values that lie before those of the states.

    Args:
        cache (`DynamicCache`): Of a part's blocks.
        prefix_length (`int`, *optional*, defaults to `0`): How many of its positions are a prefix and no tokens.
        grows (`bool`, *optional*, defaults to `False`): Whether keys and values of the states go into it.
    """

    cache: DynamicCache
    prefix_length: int = 0
    grows: bool = False


class BlockRunner(Protocol):
    """How the blocks of a model are run whose class takes no hidden states in place of token ids."""

    def check_model(self, model: nn.Module) -> None:
        """
        Refuse a model whose blocks these are not, for what its config does not say.

        Args:
            model (`torch.nn.Module`): The head, possibly on the meta device.

        Raises:
            ValueError: If it is of another class than the runner is for.
        """

    def places(self, config: PretrainedConfig, input_ids: torch.Tensor, places: Places, seen: int = 0) -> Places:
        """
        What the blocks of every part must know, from what only the client has.

        Args:
            config (`PretrainedConfig`): The whole model's.
            input_ids (`torch.Tensor`): Shape `(batch, seen + sequence)`: all tokens from the first on.
            places ([`Places`]): What the caller gave.
            seen (`int`, *optional*, defaults to `0`): Tokens that a cache holds.
        """

    def key_value_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        """
        How many heads the keys of a block have, and their size.

        Args:
            config (`PretrainedConfig`): The whole model's.
        """

    def check(self, places: Places) -> None:
        """
        Refuse places that these blocks cannot use.

        Raises:
            ValueError: If something is missing that they need.
        """

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[int],
        states: torch.Tensor,
        places: Places,
        past: Past | None = None,
    ) -> torch.Tensor:
        """
        Run the blocks of a part.

        Args:
            model (`torch.nn.Module`): The part's model.
            blocks (`Sequence[int]`): The numbers of its blocks in the whole model.
            states (`torch.Tensor`): Shape `(batch, sequence, hidden)`.
            places ([`Places`]): Of the batch; a mask is of the tokens before, too.
            past ([`Past`], *optional*): Of tokens before, or a prefix.

        Returns:
            `torch.Tensor`: Shape `(batch, sequence, hidden)`.
        """


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
        max_positions (`str`, *optional*, defaults to `"max_position_embeddings"`):
            What the config calls the number of positions that the model has. A config may be without one.
        norm (`str`, *optional*): The norm behind the last block. Only a `runner` needs it.
        runner ([`BlockRunner`], *optional*):
            Runs the blocks where the model's class takes no `inputs_embeds`, as ChatGLM's own does not.

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
    max_positions: str = "max_position_embeddings"
    norm: str = ""
    runner: BlockRunner | None = None


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
