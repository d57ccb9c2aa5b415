"""A part of a split model: a model of the same class with some of the blocks of the full model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.quantizers.quantizers_utils import get_module_from_name

from .._compat import cache_argument, enable_activation_checkpointing, has_module
from .block_cache import BlockCache
from .cut import Cut, Role
from .families import layout_of
from .layouts import AttentionInputs, BlockRunner, Layout, PastKeyValues, check_paths, placeholder
from .prefix import Prefix


# Names of the functions of `torch.nn.init`, which `transformers` wraps, and of the methods of tensors.
_RANDOM_INITIALIZATIONS = ("kaiming_uniform_", "normal_", "uniform_")


class Part(nn.Module):
    """
    The first, middle or last blocks of a decoder model, as a model of the same class.

    Head and body return hidden states in place of logits. Body and tail take hidden states in place of token ids. The
    constructor creates empty parameters on the meta device, and `assign_parameters` sets them. Rotary frequencies are
    computed in float32, independently of the dtype of the weights.

    Every block is created with the config of the full model and its number in the full model, because a block may
    depend on both, for example by a window in every second block. The part then keeps its blocks, and the lists of
    the config with one entry for each block keep the entries of these blocks. Only the names of parameters and
    modules count the blocks from 0.

    Args:
        config (`PretrainedConfig`): The config of the full model.
        cut ([`Cut`]): The cuts of the model.
        role (`str`): `"head"`, `"body"` or `"tail"`.
        layout ([`Layout`], *optional*): The layout of the model. Defaults to the layout of its model type.
        model_class (`type[PreTrainedModel]`, *optional*):
            The model class. Defaults to the class that `AutoModelForCausalLM` uses for the config.

    Raises:
        ValueError: If the loss contains router losses (`output_router_logits=True`), the model lacks a module that the
            layout names, or the layout's runner does not support the model class.

    Attributes:
        full_config (`PretrainedConfig`): The config of the full model.
        model (`PreTrainedModel`): The part's blocks, with the modules before the first or after the last block.
        prefix ([`Prefix`], *optional*):
            Trained keys and values before the keys and values of the tokens (p-tuning v2).
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
        self.full_config = config
        if getattr(config, "output_router_logits", False):
            # They are computed from the routers of all blocks.
            raise ValueError(
                "output_router_logits=True adds the losses of all routers to the loss, but the client of a split "
                "model has only the routers of its blocks. Set output_router_logits=False in the config."
            )
        part_config = copy.deepcopy(config)
        # Tied embeddings belong to the client. Head and tail share the parameter, so the model must not tie it again.
        part_config.tie_word_embeddings = False
        if role != "head":
            for name, value in self.layout.head_settings.items():
                setattr(part_config, name, value)
        with init_empty_weights(include_buffers=False), _SkippedInitialization():
            if model_class is None:
                model = AutoModelForCausalLM.from_config(part_config)
            else:
                model = model_class(part_config)
        self.model: PreTrainedModel = model
        check_paths(model, self.layout, cut.num_blocks)
        self._keep_blocks()
        self.prefix: Prefix | None = None
        head, tail = self.layout.head_modules, self.layout.tail_modules
        # Placeholders of the modules of other parts, by path.
        self._placeholders = {"head": tail, "body": {**head, **tail}, "tail": head}[role]
        self._replace_modules()
        if role == "head" and self.layout.runner is not None:
            self.layout.runner.check_model(model)

    def _keep_blocks(self) -> None:
        """Remove the blocks of the other parts. The model counts its blocks from 0, and a block keeps its number."""
        blocks = cast(nn.ModuleList, self.model.get_submodule(self.layout.blocks))
        self.model.set_submodule(self.layout.blocks, nn.ModuleList(blocks[number] for number in self.blocks))
        config = self.model.config
        for setting, values in list(vars(config).items()):
            if isinstance(values, (list, tuple)) and len(values) == self.cut.num_blocks:
                setattr(config, setting, [values[number] for number in self.blocks])
        setattr(config, self.layout.num_blocks, len(self.blocks))

    def _replace_modules(self) -> None:
        for path, kind in self._placeholders.items():
            owner, name = get_module_from_name(self.model, path)
            if has_module(owner, name):
                setattr(owner, name, placeholder(kind))

    def empty_full_model(self) -> PreTrainedModel:
        """Create the full model with empty parameters on the meta device."""
        with init_empty_weights(), _SkippedInitialization():
            return type(self.model)(copy.deepcopy(self.full_config))

    def original_name(self, name: str) -> str:
        """Return the full model's name of a parameter or module of `model`."""
        return _renumber(name, self.layout.blocks, lambda number: self.blocks[number])

    def part_name(self, original: str) -> str | None:
        """Return the part's name of a parameter or module of the full model, or `None` for a block of another part."""
        try:
            return _renumber(original, self.layout.blocks, self.blocks.index)
        except ValueError:
            return None

    def owns(self, name: str) -> bool:
        """Whether `model` has a module of this name that is not a placeholder for another part's module."""
        if any(name == path or name.startswith(f"{path}.") for path in self._placeholders):
            return False
        return any(name == module_name for module_name, _ in self.model.named_modules())

    def assign_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """
        Set the parameters and buffers of the part to these tensors, without copying them.

        Args:
            parameters (`Mapping[str, torch.Tensor]`):
                Tensors by name in the full model. Additional names, such as the names of other parts, are ignored.

        Raises:
            ValueError: If a tensor is missing or its shape differs.
        """
        for name, current in list(self.model.state_dict(keep_vars=True).items()):
            original = self.original_name(name)
            if original not in parameters:
                raise ValueError(
                    f"The weights have no {original}, which the {self.role} needs. Pass the weights of the same model."
                )
            given = parameters[original]
            if given.shape != current.shape:
                raise ValueError(
                    f"{original} has shape {tuple(given.shape)} in the weights and shape {tuple(current.shape)} in "
                    "the model. The weights and the config belong to different models."
                )
            if isinstance(current, nn.Parameter) and not isinstance(given, nn.Parameter):
                given = nn.Parameter(given, requires_grad=current.requires_grad)
            elif not isinstance(current, nn.Parameter):
                given = given.detach()
            owner, attribute = get_module_from_name(self.model, name)
            setattr(owner, attribute, given)

    def named_original_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of `model` with their names in the full model."""
        for name, parameter in self.model.named_parameters():
            yield self.original_name(name), parameter

    def new_cache(self) -> DynamicCache:
        """
        Create an empty key/value cache.

        With a prefix the cache has no sliding windows, as in PEFT, because a sliding window would drop the prefix.
        """
        if self.layout.runner is not None:
            return DynamicCache()
        return BlockCache(self.blocks, config=None if self.prefix is not None else self.model.config)

    @property
    def prefix_positions(self) -> int:
        """Number of positions that the prefix takes. In models with a runner, a prefix takes no positions."""
        return 0 if self.prefix is None or self.layout.runner is not None else self.prefix.length

    @property
    def max_positions(self) -> int | None:
        """Number of positions for tokens, after the prefix. `None` if the config defines no maximum."""
        positions: int | None = getattr(self.model.config, self.layout.max_positions, None)
        return None if positions is None else positions - self.prefix_positions

    def check_length(self, length: int) -> None:
        """
        Check that the model has enough positions for a sequence.

        Args:
            length (`int`): Number of tokens, including the tokens in a cache.

        Raises:
            ValueError: If the sequence is too long.
        """
        if self.max_positions is not None and length > self.max_positions:
            prefix = f" after a prefix of {self.prefix_positions}" if self.prefix_positions else ""
            raise ValueError(
                f"A sequence has {length} positions, but the model supports at most {self.max_positions}{prefix}. "
                "Shorten the sequence."
            )

    @property
    def num_bytes(self) -> int:
        """Size of all parameters in bytes. A shared parameter counts once."""
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
                Token ids of shape `(batch, sequence)` and an integer dtype, or hidden states of shape
                `(batch, sequence, hidden)` and a floating-point dtype.
            attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`, 1 for tokens.
            position_ids (`torch.Tensor`, *optional*):
                Shape `(batch or 1, sequence)`. Defaults to the positions that the model computes.
            past_key_values (`Cache`, *optional*):
                The cache of this part, from `new_cache`. By default no cache is used, unless `use_cache=True` is
                passed.
            context_lengths (`torch.Tensor`, *optional*): Shape `(batch,)`, if the layout's runner requires them.
            kwargs: Further arguments of the model's `forward` (`labels`, `use_cache`, …).

        Returns:
            `CausalLMOutputWithPast`: The output. `logits` of head and body contain hidden states.
        """
        if self.layout.runner is not None:
            inputs = AttentionInputs(attention_mask, position_ids, context_lengths)
            return self._run_blocks(self.layout.runner, states, inputs, past_key_values, **kwargs)
        kwargs["input_ids" if not states.is_floating_point() else "inputs_embeds"] = states
        # The model class would create a cache that does not know the numbers of the blocks.
        kwargs.setdefault("use_cache", past_key_values is not None)
        if kwargs["use_cache"] and past_key_values is None:
            past_key_values = self.new_cache()
        if self.prefix is not None:
            past_key_values = self.new_cache() if past_key_values is None else past_key_values
            if past_key_values.get_seq_length() == 0:
                self.prefix.fill(past_key_values, states.shape[0], self.dtype, self.blocks.start)
            attention_mask, position_ids = self.prefix.shift(attention_mask, position_ids)
        # What the class computes after the last block, such as a scale of the logits, is only for the tail.
        model = self.model if self.role == "tail" else self.model.base_model
        if past_key_values is not None:
            kwargs[cache_argument(model)] = past_key_values
        output = model(attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        if isinstance(past_key_values, BlockCache) and not past_key_values.has_keys:
            past_key_values.count_tokens(states.shape[1])
        return output if self.role == "tail" else CausalLMOutputWithPast(logits=output.last_hidden_state)

    def _run_blocks(
        self,
        runner: BlockRunner,
        states: torch.Tensor,
        inputs: AttentionInputs,
        cache: DynamicCache | None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the part with the layout's runner, in place of the `forward` of the model class."""
        layout, model = self.layout, self.model
        if self.prefix is not None and (cache is None or cache.get_seq_length() == 0):
            cache = self.prefix.fill(cache, states.shape[0], self.dtype)
        prefix_length = 0 if self.prefix is None else self.prefix.length
        past = None if cache is None else PastKeyValues(cache, prefix_length, update_cache=use_cache)
        if not states.is_floating_point():
            states = model.get_submodule(layout.embedding)(states)
        states = runner.run(model, self.blocks, states, inputs, past)
        if self.role != "tail":
            return CausalLMOutputWithPast(logits=states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states = model.get_submodule(layout.norm)(states)[:, kept]
        logits = model.get_submodule(layout.output)(states)
        loss = None if labels is None else ForCausalLMLoss(logits, labels, logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def enable_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """
        Enable activation checkpointing of the part's blocks.

        The arguments are the arguments of `activation_checkpointing_enable`.

        Raises:
            ValueError: If the part has prefixes, which are in a cache, or reentrant checkpointing is requested.
        """
        settings = kwargs.get("activation_checkpointing_kwargs", args[0] if args else None) or {}
        if settings.get("use_reentrant"):
            raise ValueError(
                "Reentrant activation checkpointing does not work across the parts of a split model: set "
                "use_reentrant=False."
            )
        if self.prefix is not None:
            raise ValueError(
                "Activation checkpointing does not work with prefix tuning, because blocks that recompute their "
                "activations use no cache, and the prefixes are in a cache: set activation_checkpointing=False, or "
                "use LoRA."
            )
        enable_activation_checkpointing(self.model, *args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floating-point weights."""
        return next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())


class _SkippedInitialization(TorchFunctionMode):
    """Skips the random initialization of parameters on the meta device, which takes longer than creating them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM_INITIALIZATIONS:
            tensor: torch.Tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def _renumber(name: str, blocks: str, number_of: Callable[[int], int]) -> str:
    """Replace the block index in a parameter or module name."""
    if not name.startswith(f"{blocks}."):
        return name
    number, separator, rest = name[len(blocks) + 1 :].partition(".")
    return f"{blocks}.{number_of(int(number))}{separator}{rest}"
