"""A part of a split model: a model of the same class with a few of its blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cut import Cut, Role
from .families import layout_of
from .layouts import Layout, Past, Places, stand_in
from .prefix import Prefix


class Part(nn.Module):
    """
    The first, middle or last blocks of a decoder model, as a model of the same class.

    Head and body return hidden states in place of logits, body and tail take hidden states in place of token ids.
    Parameters are created empty (on the meta device); `take` fills them. Rotary frequencies are computed in float32,
    whatever the dtype of the weights.

    Args:
        config (`PretrainedConfig`): The whole model's.
        cut (`Cut`): Where it is cut.
        role (`str`): `"head"`, `"body"` or `"tail"`.
        layout (`Layout`, *optional*): Where its parts are; by default that of its model type.
        model_class (`type[PreTrainedModel]`, *optional*): By default the causal language model of this config.

    Attributes:
        model (`PreTrainedModel`): The blocks, numbered from 0, with what lies before or behind them.
        prefix ([`Prefix`], *optional*): Trained keys and values before those of the tokens (p-tuning v2).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        cut: Cut,
        role: Role,
        layout: Layout | None = None,
        model_class: type[PreTrainedModel] | None = None,
    ) -> None:
        super().__init__()
        self.cut = cut
        self.role = role
        self.layout = layout_of(config) if layout is None else layout
        self.blocks = cut.blocks(role)
        own_config = self._config(config)
        with init_empty_weights(include_buffers=False):
            if model_class is None:
                model = AutoModelForCausalLM.from_config(own_config)
            else:
                model = model_class(own_config)
        self.model: PreTrainedModel = model
        self.prefix: Prefix | None = None
        for owner, modules in (("head", self.layout.of_head), ("tail", self.layout.of_tail)):
            if role != owner:
                self._replace(modules)
        if role == "head" and self.layout.runner is not None:
            self.layout.runner.check_model(model)

    def _config(self, config: PretrainedConfig) -> PretrainedConfig:
        own = copy.deepcopy(config)
        setattr(own, self.layout.num_blocks, len(self.blocks))
        for name in self.layout.per_block:
            values = getattr(config, name, None)
            if values is not None:
                setattr(own, name, [values[number] for number in self.blocks])
        # A tied matrix is the client's; its two ends are tied by being the same parameter.
        own.tie_word_embeddings = False
        return own

    def _replace(self, modules: Mapping[str, Any]) -> None:
        for path, kind in modules.items():
            parent, _, name = path.rpartition(".")
            owner = self.model.get_submodule(parent)
            if owner._modules.get(name) is not None:
                setattr(owner, name, stand_in(kind))

    def original_name(self, name: str) -> str:
        """What the whole model calls a parameter or module of `model`."""
        return _renumber(name, self.layout.blocks, lambda number: self.blocks[number])

    def own_name(self, original: str) -> str | None:
        """The name in `model` of a parameter or module of the whole model; `None` of a block of another part."""
        try:
            return _renumber(original, self.layout.blocks, self.blocks.index)
        except ValueError:
            return None

    def owns(self, name: str) -> bool:
        """Whether `model` has a module of this name, and not one that stands in for another part's."""
        foreign = {"head": self.layout.of_tail, "tail": self.layout.of_head}
        others = foreign.get(self.role) or {**self.layout.of_head, **self.layout.of_tail}
        if any(name == path or name.startswith(f"{path}.") for path in others):
            return False
        return any(name == there for there, _ in self.model.named_modules())

    def take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """
        Use these parameters, without a copy.

        Args:
            parameters (`Mapping[str, torch.Tensor]`): By their names in the whole model. Those of other parts may be
                among them.

        Raises:
            ValueError: If one is missing or has another shape.
        """
        for name, own in list(self.model.state_dict(keep_vars=True).items()):
            original = self.original_name(name)
            if original not in parameters:
                raise ValueError(f"{original} of the {self.role} is missing in these weights.")
            given = parameters[original]
            if given.shape != own.shape:
                raise ValueError(
                    f"{original} has shape {tuple(given.shape)} in these weights, {tuple(own.shape)} in the model: "
                    "weights and config are of different models."
                )
            parent, _, attribute = name.rpartition(".")
            owner = self.model.get_submodule(parent)
            if isinstance(own, nn.Parameter) and not isinstance(given, nn.Parameter):
                given = nn.Parameter(given, requires_grad=own.requires_grad)
            elif not isinstance(own, nn.Parameter):
                given = given.detach()
            setattr(owner, attribute, given)

    def originals(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of `model` with their names in the whole model."""
        for name, parameter in self.model.named_parameters():
            yield self.original_name(name), parameter

    def new_cache(self) -> DynamicCache:
        """An empty key/value cache. With a prefix it has no windows, as PEFT's: one would drop the prefix."""
        plain = self.prefix is not None or self.layout.runner is not None
        return DynamicCache(config=None if plain else self.model.config)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, a shared one counted once."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(
        self,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        context_lengths: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Run the part.

        Args:
            states (`torch.Tensor`):
                Token ids of shape `(batch, sequence)` where they are integers, else hidden states of shape
                `(batch, sequence, hidden)`.
            attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`, 1 for tokens.
            position_ids (`torch.Tensor`, *optional*): Shape `(batch or 1, sequence)`; by default the model's own.
            past_key_values (`Cache`, *optional*): This part's cache.
            context_lengths (`torch.Tensor`, *optional*): Shape `(batch,)`, where the layout has a runner that asks.
            kwargs: As the model's `forward` takes them (`labels`, `use_cache`, …).

        Returns:
            `CausalLMOutputWithPast`: `logits` are hidden states of head and body.
        """
        if self.layout.runner is not None:
            places = Places(attention_mask, position_ids, context_lengths)
            return self._run(states, places, past_key_values, **kwargs)
        kwargs["input_ids" if not states.is_floating_point() else "inputs_embeds"] = states
        if self.prefix is not None:
            if past_key_values is None or past_key_values.get_seq_length() == 0:
                past_key_values = self.prefix.fill(past_key_values, states.shape[0], self.dtype)
            attention_mask, position_ids = self.prefix.shift(attention_mask, position_ids)
        return self.model(
            attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values, **kwargs
        )

    def _run(
        self,
        states: torch.Tensor,
        places: Places,
        cache: DynamicCache | None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """What the model's class would do, block by block."""
        layout, model = self.layout, self.model
        assert layout.runner is not None
        if self.prefix is not None and (cache is None or cache.get_seq_length() == 0):
            cache = self.prefix.fill(cache, states.shape[0], self.dtype)
        prefix_length = 0 if self.prefix is None else self.prefix.length
        past = None if cache is None else Past(cache, prefix_length, grows=use_cache)
        if not states.is_floating_point():
            states = model.get_submodule(layout.embedding)(states)
        states = layout.runner.run(model, self.blocks, states, places, past)
        if self.role != "tail":
            return CausalLMOutputWithPast(logits=states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states = model.get_submodule(layout.norm)(states)[:, kept]
        logits = model.get_submodule(layout.output)(states)
        loss = None if labels is None else ForCausalLMLoss(logits, labels, logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def enable_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """
        `activation_checkpointing_enable` of its blocks.

        Raises:
            ValueError: If it has prefixes, which go into a cache, or checkpointing is to be reentrant.
        """
        settings = kwargs.get("activation_checkpointing_kwargs", args[0] if args else None) or {}
        if settings.get("use_reentrant"):
            raise ValueError(
                "Reentrant checkpointing cannot go through the boundary between parts: set use_reentrant=False."
            )
        if self.prefix is not None:
            raise ValueError(
                "Blocks whose activations are computed again take no cache, in which prefixes lie: set "
                "activation_checkpointing=False, or use LoRA."
            )
        self.model.activation_checkpointing_enable(*args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())


def _renumber(name: str, blocks: str, number_of: Callable[[int], int]) -> str:
    """A name with its block's number replaced."""
    if not name.startswith(f"{blocks}."):
        return name
    number, separator, rest = name[len(blocks) + 1 :].partition(".")
    return f"{blocks}.{number_of(int(number))}{separator}{rest}"
