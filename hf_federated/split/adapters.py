"""Adapters of a split model: each part owns, trains and saves those of its own blocks.

An adapter is described once, by PEFT's config for the whole model. What it means for a part follows from the names of
the modules that it would adapt there, so `layers_to_transform`, patterns and regular expressions keep their meaning
although a part's blocks are numbered from 0. Parts' adapters together are one PEFT adapter of the whole model.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping

import torch
from accelerate import init_empty_weights
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import cast_adapter_dtype
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from .layouts import Layout
from .parts import Part
from .prefix import Prefix


# What PEFT puts before a name of the model that it adapts.
_PEFT_PREFIX = "base_model.model."
_PROMPT = "prompt_embeddings"
_DEFAULT = "default"
# Settings of a LoraConfig that mean for a part what they mean for the whole model, and those that only describe it.
_LORA_SETTINGS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
# Ways to begin that look at nothing but the shapes of the weights.
_INITS = (True, False, "gaussian", "orthogonal")


def add_adapter(parts: Iterable[Part], config: PretrainedConfig, peft_config: PeftConfig) -> None:
    """
    Give every part the adapters of its blocks, and freeze everything else.

    Args:
        parts (`Iterable[Part]`): Of one model: all of them, or those that a party holds.
        config (`PretrainedConfig`): The whole model's.
        peft_config (`PeftConfig`): For the whole model: a `LoraConfig` or a `PrefixTuningConfig`. It is not changed.

    Raises:
        ValueError: If the method is another one, trains more than adapters of blocks, or begins with values that are
            computed from the whole model's weights or from data.
    """
    parts = list(parts)
    check_adapter(peft_config)
    init = getattr(peft_config, "init_lora_weights", True)
    if init not in _INITS:
        raise ValueError(
            f"init_lora_weights={init!r} changes the weights that the adapters are for, or looks at data: make the "
            "whole model's adapter with get_peft_model, and split that."
        )
    _add_adapter(parts, config, peft_config)


def _add_adapter(parts: list[Part], config: PretrainedConfig, peft_config: PeftConfig) -> None:
    if isinstance(peft_config, PrefixTuningConfig):
        if parts[0].cut.head_blocks == 0 and "zero" in parts[0].layout.of_head.values():
            raise ValueError(
                f"Positions of {config.model_type} are looked up before the first block, and begin behind the prefix, "
                "of which a head without blocks knows nothing: set head_blocks to 1 or more, or use LoRA."
            )
        for part in parts:
            part.requires_grad_(False)
            if len(part.blocks):
                prefix = Prefix(_prefix_config(peft_config, config, len(part.blocks), part.layout))
                part.prefix = prefix.to(next(part.model.parameters()).device)
        return
    assert isinstance(peft_config, LoraConfig)
    with init_empty_weights():
        whole = get_peft_model(type(parts[0].model)(config), copy.deepcopy(peft_config))
    layers = [(name, module) for name, module in whole.named_modules() if isinstance(module, LoraLayer)]
    adapted = {name.removeprefix(_PEFT_PREFIX): layer for name, layer in layers}
    for part in parts:
        part.requires_grad_(False)
        _inject(part, peft_config, adapted)


def check_adapter(peft_config: PeftConfig) -> None:
    """
    Refuse what the parts of a split model cannot have.

    Raises:
        ValueError: If the method is neither LoRA nor prefix tuning, or has settings that would mean something else in
            the parts, or nothing.
    """
    if not isinstance(peft_config, (LoraConfig, PrefixTuningConfig)):
        raise ValueError(
            f"{type(peft_config).__name__}: the parts of a split model take LoRA or prefix tuning (p-tuning v2)."
        )
    if isinstance(peft_config, PrefixTuningConfig):
        if peft_config.modules_to_save:
            raise ValueError("modules_to_save of a PrefixTuningConfig is not supported in a split: leave it out.")
        return
    plain = LoraConfig()
    for field in dataclasses.fields(peft_config):
        value, default = getattr(peft_config, field.name), getattr(plain, field.name, None)
        if field.name not in _LORA_SETTINGS and value and value != default:
            raise ValueError(f"{field.name}={value!r} of a LoraConfig is not supported in a split: leave it out.")


def check_peft_model(model: PeftModel) -> None:
    """
    Refuse a PEFT model whose adapter the parts could not have as it is.

    Raises:
        ValueError: If it has no one active adapter, or that one is merged, disabled or of another kind.
    """
    if len(model.active_adapters) != 1:
        raise ValueError(f"A PEFT model with one active adapter can be split, this one has {model.active_adapters}.")
    check_adapter(model.active_peft_config)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if any(layer.merged or layer.disable_adapters for layer in layers):
        raise ValueError("The adapter is merged or disabled: call unmerge_adapter() or enable_adapter_layers() first.")


def take_adapter(parts: Iterable[Part], model: PeftModel) -> None:
    """
    Give every part the adapters of its blocks with the weights that they have in a PEFT model.

    Args:
        parts (`Iterable[Part]`): Of the model that `model` adapts.
        model (`PeftModel`): With LoRA or prefix tuning.
    """
    check_peft_model(model)
    parts = list(parts)
    config = copy.deepcopy(model.active_peft_config)
    if isinstance(config, LoraConfig):
        # Others look at the weights of the base, and change them.
        config.init_lora_weights = True
    add_adapter(parts, model.get_base_model().config, config)
    state = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    load_adapter(parts, state)
    # One that was not cast for its base, as it was asked for, is trained in the base's dtype here too.
    dtype = next(iter(state.values())).dtype
    for part in parts:
        for own in part.parameters():
            if own.requires_grad:
                own.data = own.data.to(dtype)


def adapter_state(part: Part) -> dict[str, torch.Tensor]:
    """
    The adapters of a part, by the names that PEFT gives them in an adapter of the whole model.

    Args:
        part ([`Part`]): The part.

    Returns:
        `dict[str, torch.Tensor]`: Copies. Prefixes have one name each block, `prompt_embeddings.<number>`, of shape
        `(length, 2 · token_dim)`: PEFT has them side by side in one matrix.
    """
    if part.prefix is not None:
        columns = part.prefix.embeddings().detach().chunk(len(part.blocks), dim=1)
        return {f"{_PROMPT}.{number}": own.clone() for number, own in zip(part.blocks, columns, strict=True)}
    if not any(isinstance(module, LoraLayer) for module in part.model.modules()):
        return {}
    state = get_peft_model_state_dict(part.model)
    return {_PEFT_PREFIX + part.original_name(name): value.detach().clone() for name, value in state.items()}


def load_adapter(parts: Iterable[Part], state: Mapping[str, torch.Tensor]) -> None:
    """
    Take adapters' weights from an adapter of the whole model.

    Args:
        parts (`Iterable[Part]`): With adapters.
        state (`Mapping[str, torch.Tensor]`): As PEFT names it, or as `adapter_state` does.

    Raises:
        ValueError: If a weight is missing or has another shape, or prefixes come from an encoder that is shared.
    """
    state = dict(state)
    with torch.no_grad():
        for part in parts:
            if part.prefix is not None:
                _load_prefix(part, state)
                continue
            for name, parameter in part.model.named_parameters():
                original = _PEFT_PREFIX + part.original_name(name.replace(f".{_DEFAULT}", ""))
                if "lora_" in name:
                    if original not in state or state[original].shape != parameter.shape:
                        raise ValueError(f"{original} of shape {tuple(parameter.shape)} is missing in this adapter.")
                    parameter.copy_(state[original])


def merge_adapters(states: Iterable[Mapping[str, torch.Tensor]], num_blocks: int) -> dict[str, torch.Tensor]:
    """
    One ordinary PEFT adapter from those of all parts.

    Args:
        states (`Iterable[Mapping[str, torch.Tensor]]`): What `adapter_state` gave for each part.
        num_blocks (`int`): Blocks of the whole model.

    Returns:
        `dict[str, torch.Tensor]`: As PEFT saves it.

    Raises:
        ValueError: If a block's prefix is missing or two parts have the same weight.
    """
    merged: dict[str, torch.Tensor] = {}
    for state in states:
        twice = sorted(merged.keys() & state.keys())
        if twice:
            raise ValueError(f"Two parts have {twice[0]}: these are not the parts of one cut.")
        merged.update(state)
    if not any(name.startswith(_PROMPT) for name in merged):
        return merged
    missing = [number for number in range(num_blocks) if f"{_PROMPT}.{number}" not in merged]
    if missing:
        raise ValueError(f"The prefix of block {missing[0]} is missing: give the adapters of all parts.")
    return {_PROMPT: torch.cat([merged[f"{_PROMPT}.{number}"] for number in range(num_blocks)], dim=1)}


def save_adapter(
    parts: Iterable[Part], config: PretrainedConfig, peft_config: PeftConfig, directory: str | os.PathLike[str]
) -> None:
    """
    Write the parts' adapters as one that `PeftModel.from_pretrained` loads onto the whole model.

    Args:
        parts (`Iterable[Part]`): All parts.
        config (`PretrainedConfig`): The whole model's.
        peft_config (`PeftConfig`): The one that the adapters were made from.
        directory (`str` or `os.PathLike`): Where to. It is created.
    """
    parts = list(parts)
    os.makedirs(directory, exist_ok=True)
    merged = merge_adapters([adapter_state(part) for part in parts], parts[0].cut.num_blocks)
    save_file(
        {name: value.contiguous().cpu() for name, value in merged.items()},
        os.path.join(directory, SAFETENSORS_WEIGHTS_NAME),
        metadata={"format": "pt"},
    )
    whole_peft_config(peft_config, config, parts[0]).save_pretrained(os.fspath(directory))


def whole_peft_config(peft_config: PeftConfig, config: PretrainedConfig, part: Part) -> PeftConfig:
    """
    The config that belongs to a saved adapter of the whole model.

    Args:
        peft_config (`PeftConfig`): The one that the adapters were made from. It is not changed.
        config (`PretrainedConfig`): The whole model's.
        part ([`Part`]): One of its parts.
    """
    saved = copy.deepcopy(peft_config)
    if isinstance(saved, PrefixTuningConfig):
        saved = _prefix_config(saved, config, part.cut.num_blocks, part.layout)
    saved.inference_mode = True
    return saved


def _inject(part: Part, peft_config: LoraConfig, adapted: Mapping[str, LoraLayer]) -> None:
    """LoRA on those modules of a part that the whole model's adapter adapts, each with its own rank."""
    own: dict[str, LoraLayer] = {}
    for original, layer in adapted.items():
        name = part.own_name(original)
        if name is not None and part.owns(name):
            own[name] = layer
    if not own:
        return
    config = copy.deepcopy(peft_config)
    config.layers_to_transform = config.layers_pattern = None
    config.exclude_modules = None
    # Whole names, so that PEFT matches nothing else.
    config.target_modules = set(own)
    config.rank_pattern = {f"^{re.escape(name)}": layer.r[_DEFAULT] for name, layer in own.items()}
    config.alpha_pattern = {f"^{re.escape(name)}": layer.lora_alpha[_DEFAULT] for name, layer in own.items()}
    inject_adapter_in_model(config, part.model)
    # As in a PeftModel: over a base of half precision adapters are trained in float32.
    cast_adapter_dtype(part.model, _DEFAULT)


def _prefix_config(
    peft_config: PrefixTuningConfig, config: PretrainedConfig, num_blocks: int, layout: Layout
) -> PrefixTuningConfig:
    """PEFT's config for the prefixes of so many blocks of this model."""
    if layout.runner is not None:  # of a class that PEFT does not know
        own = copy.deepcopy(peft_config)
        heads, size = layout.runner.key_value_heads(config)
        own.num_layers, own.num_attention_heads, own.token_dim = num_blocks, heads, heads * size
        own.encoder_hidden_size = own.encoder_hidden_size or own.token_dim
        own.num_transformer_submodules = 1
        own.inference_mode = False
        return own
    with init_empty_weights():
        # PEFT derives the sizes of keys and values, also of grouped queries.
        whole: PeftModel = get_peft_model(AutoModelForCausalLM.from_config(config), copy.deepcopy(peft_config))
    own = copy.deepcopy(whole.active_peft_config)
    own.num_layers = num_blocks
    own.inference_mode = False
    return own


def _load_prefix(part: Part, state: dict[str, torch.Tensor]) -> None:
    assert part.prefix is not None
    if part.prefix.config.prefix_projection:
        raise ValueError(
            "Prefixes that one encoder makes for all blocks (prefix_projection=True) have no parts: set "
            "prefix_projection=False, or call add_adapter of a SplitModel, whose parts have an encoder each."
        )
    if _PROMPT in state:
        columns = state[_PROMPT].chunk(part.cut.num_blocks, dim=1)
        state = {f"{_PROMPT}.{number}": own for number, own in enumerate(columns)}
    missing = [number for number in part.blocks if f"{_PROMPT}.{number}" not in state]
    if missing:
        raise ValueError(f"The prefix of block {missing[0]} is missing in this adapter.")
    weight = part.prefix.encoder.embedding.weight
    values = torch.cat([state[f"{_PROMPT}.{number}"] for number in part.blocks], dim=1)
    if values.shape != weight.shape:
        raise ValueError(f"Prefixes of shape {tuple(values.shape)} came for blocks that take {tuple(weight.shape)}.")
    weight.copy_(values)
