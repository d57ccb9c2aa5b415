"""Adapters of a split model. Each part owns, trains and saves the adapters of its blocks.

One PEFT config describes the adapter of the full model. `layers_to_transform`, patterns and regular expressions refer
to the module names of the full model, although a part numbers its blocks from 0. The adapters of all parts together
form one PEFT adapter of the full model.
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


# The prefix that PEFT adds to the parameter names of the adapted model.
_PEFT_PREFIX = "base_model.model."
_PROMPT = "prompt_embeddings"
_DEFAULT = "default"
# Fields of a LoraConfig that apply to a part as they apply to the full model, and fields that are only descriptive.
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
# Initializations that depend only on the shapes of the weights.
_INITS = (True, False, "gaussian", "orthogonal")


def add_adapter(parts: Iterable[Part], config: PretrainedConfig, peft_config: PeftConfig) -> None:
    """
    Add an adapter to the blocks of every part, and freeze all other parameters.

    Args:
        parts (`Iterable[Part]`): All parts of a model, or the parts of one party.
        config (`PretrainedConfig`): The config of the full model.
        peft_config (`PeftConfig`):
            The adapter config for the full model: a `LoraConfig` or a `PrefixTuningConfig`. It is not modified.

    Raises:
        ValueError: If the method is neither LoRA nor prefix tuning, trains parameters outside the adapters of blocks,
            or initializes the adapters from the weights of the full model or from data.
    """
    supported = check_adapter(peft_config)
    if isinstance(supported, PrefixTuningConfig):
        _add_prefixes(list(parts), config, supported)
    else:
        _add_lora(list(parts), config, supported)


def _add_prefixes(parts: list[Part], config: PretrainedConfig, peft_config: PrefixTuningConfig) -> None:
    if parts[0].cut.head_blocks == 0 and "zero" in parts[0].layout.head_modules.values():
        raise ValueError(
            f"Prefix tuning with head_blocks=0 is not supported for {config.model_type}: the head embeds the "
            "positions, which start after the prefix, but a head without blocks has no prefix. Set head_blocks to "
            "at least 1, or use LoRA."
        )
    if config.model_type == "falcon" and config.multi_query and not config.new_decoder_architecture:
        raise ValueError(
            "PEFT creates prefixes for every query head, but the query heads of this Falcon model share one key/value "
            "head. Use LoRA."
        )
    if not parts[0].layout.supports_prefixes:
        raise ValueError(
            f"Prefix tuning is not supported for {config.model_type}: PEFT creates keys and values of one shape for "
            "all blocks, but in this family they have several shapes, or some blocks have none. Use LoRA."
        )
    for part in parts:
        part.requires_grad_(False)
        if len(part.blocks):
            prefix = Prefix(_prefix_config(peft_config, config, len(part.blocks), part.layout))
            part.prefix = prefix.to(next(part.model.parameters()).device)


def _add_lora(parts: list[Part], config: PretrainedConfig, peft_config: LoraConfig) -> None:
    init = peft_config.init_lora_weights
    if init not in _INITS:
        raise ValueError(
            f"init_lora_weights={init!r} changes the base weights or uses data, which the parts of a split model do "
            f"not support (supported: {', '.join(map(repr, _INITS))}). Create the adapter of the full model with "
            "get_peft_model, and split the PEFT model."
        )
    with init_empty_weights():
        full_model = get_peft_model(type(parts[0].model)(config), copy.deepcopy(peft_config))
    if full_model.active_peft_config.target_parameters:
        raise ValueError(
            f"With target_modules={peft_config.target_modules!r} PEFT adapts the experts, which are parameters and "
            'not modules. A split model supports LoRA of modules. Name them, for example target_modules=["q_proj", '
            '"v_proj"].'
        )
    layers = [(name, module) for name, module in full_model.named_modules() if isinstance(module, LoraLayer)]
    lora_layers = {name.removeprefix(_PEFT_PREFIX): layer for name, layer in layers}
    routers = [name for name, layer in lora_layers.items() if _is_router(layer)]
    if routers:
        raise ValueError(
            f"With target_modules={peft_config.target_modules!r} PEFT adapts {routers[0]}, but the output of this "
            'router is no tensor. Name other modules, for example target_modules=["q_proj", "v_proj"].'
        )
    for part in parts:
        part.requires_grad_(False)
        _inject_lora(part, peft_config, lora_layers)


def check_adapter(peft_config: PeftConfig) -> LoraConfig | PrefixTuningConfig:
    """
    Check that the parts of a split model support an adapter config, and return the config.

    Raises:
        ValueError: If the method is neither LoRA nor prefix tuning, or the parts would ignore a field or interpret it
            differently from the full model.
    """
    if not isinstance(peft_config, (LoraConfig, PrefixTuningConfig)):
        raise ValueError(
            f"{type(peft_config).__name__} is not supported in a split model. Use LoRA or prefix tuning (p-tuning v2)."
        )
    is_lora = isinstance(peft_config, LoraConfig)
    names = [field.name for field in dataclasses.fields(peft_config)] if is_lora else ["modules_to_save"]
    kind = LoraConfig if is_lora else PrefixTuningConfig
    default_config = kind()
    for name in names:
        value = getattr(peft_config, name)
        if name not in _LORA_SETTINGS and value and value != getattr(default_config, name, None):
            raise ValueError(f"{name}={value!r} of a {kind.__name__} is not supported in a split model. Remove it.")
    return peft_config


def check_peft_model(model: PeftModel) -> None:
    """
    Check that the adapter of a PEFT model can be copied to the parts of a split model.

    Raises:
        ValueError: If the model does not have exactly one active adapter, or this adapter is merged, disabled or of an
            unsupported method.
    """
    if len(model.active_adapters) != 1:
        raise ValueError(
            f"A PEFT model must have exactly one active adapter to be split, but its active adapters are "
            f"{model.active_adapters}. Activate one adapter with set_adapter()."
        )
    check_adapter(model.active_peft_config)
    if any(module.merged or module.disable_adapters for module in model.modules() if isinstance(module, LoraLayer)):
        raise ValueError(
            "The adapter of the PEFT model is merged or disabled. Call unmerge_adapter() or enable_adapter_layers() "
            "before splitting the model."
        )


def copy_adapter(parts: Iterable[Part], model: PeftModel) -> None:
    """
    Copy the adapter of a PEFT model to the parts of its base model.

    Args:
        parts (`Iterable[Part]`): The parts of the base model.
        model (`PeftModel`): A model with LoRA or prefix tuning.

    Raises:
        ValueError: If a split model does not support the adapter.
    """
    check_peft_model(model)
    parts = list(parts)
    config = copy.deepcopy(model.active_peft_config)
    if isinstance(config, LoraConfig):
        # Other initializations change the base weights. The weights of the adapter are loaded below.
        config.init_lora_weights = True
    add_adapter(parts, model.get_base_model().config, config)
    state = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    load_adapter(parts, state)
    # Keep the dtype of the PEFT model's adapter, which is not float32 with autocast_adapter_dtype=False.
    dtype = next(iter(state.values())).dtype
    for part in parts:
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def adapter_state(part: Part) -> dict[str, torch.Tensor]:
    """
    Return the adapter weights of a part, with their names in a PEFT adapter of the full model.

    Args:
        part ([`Part`]): The part.

    Returns:
        `dict[str, torch.Tensor]`: Copies of the weights. Each block has a separate prefix with the name
        `prompt_embeddings.<block index>` and the shape `(length, 2 · token_dim)`. PEFT concatenates the prefixes of
        all blocks into one matrix.
    """
    if part.prefix is not None:
        columns = part.prefix.embeddings().detach().chunk(len(part.blocks), dim=1)
        return {f"{_PROMPT}.{number}": prefix.clone() for number, prefix in zip(part.blocks, columns, strict=True)}
    if not any(isinstance(module, LoraLayer) for module in part.model.modules()):
        return {}
    state = get_peft_model_state_dict(part.model)
    return {_PEFT_PREFIX + part.original_name(name): value.detach().clone() for name, value in state.items()}


def load_adapter(parts: Iterable[Part], state: Mapping[str, torch.Tensor]) -> None:
    """
    Load adapter weights of the full model into the parts.

    Args:
        parts (`Iterable[Part]`): The parts, to which an adapter was added.
        state (`Mapping[str, torch.Tensor]`): Adapter weights with the names of PEFT or of `adapter_state`.

    Raises:
        ValueError: If a weight is missing or its shape differs, or the parts have a prefix encoder
            (`prefix_projection=True`).
    """
    with torch.no_grad():
        for part in parts:
            if part.prefix is not None:
                _load_prefix(part, part.prefix, state)
                continue
            for name, parameter in part.model.named_parameters():
                original = _PEFT_PREFIX + part.original_name(name.replace(f".{_DEFAULT}", ""))
                if "lora_" in name:
                    if original not in state or state[original].shape != parameter.shape:
                        raise ValueError(
                            f"The adapter has no weight {original} of shape {tuple(parameter.shape)}. Load an adapter "
                            "of the same model with the same config."
                        )
                    parameter.copy_(state[original])


def merge_adapters(states: Iterable[Mapping[str, torch.Tensor]], num_blocks: int) -> dict[str, torch.Tensor]:
    """
    Merge the adapters of all parts into one PEFT adapter of the full model.

    Args:
        states (`Iterable[Mapping[str, torch.Tensor]]`): The output of `adapter_state` for each part.
        num_blocks (`int`): Number of blocks of the full model.

    Returns:
        `dict[str, torch.Tensor]`: The adapter weights with the names that PEFT uses in a file.

    Raises:
        ValueError: If the prefix of a block is missing, or two parts have the same weight.
    """
    merged: dict[str, torch.Tensor] = {}
    for state in states:
        if duplicates := sorted(merged.keys() & state.keys()):
            raise ValueError(f"Two parts have the weight {duplicates[0]}. Merge only parts of the same cut.")
        merged.update(state)
    if not any(name.startswith(_PROMPT) for name in merged):
        return merged
    if missing := [number for number in range(num_blocks) if f"{_PROMPT}.{number}" not in merged]:
        raise ValueError(f"The prefix of block {missing[0]} is missing. Pass the adapters of all parts.")
    return {_PROMPT: torch.cat([merged[f"{_PROMPT}.{number}"] for number in range(num_blocks)], dim=1)}


def save_adapter(
    parts: Iterable[Part], config: PretrainedConfig, peft_config: PeftConfig, directory: str | os.PathLike[str]
) -> None:
    """
    Save the adapters of all parts as one adapter that `PeftModel.from_pretrained` loads for the full model.

    Args:
        parts (`Iterable[Part]`): All parts of the model.
        config (`PretrainedConfig`): The config of the full model.
        peft_config (`PeftConfig`): The config from which the adapters were created.
        directory (`str` or `os.PathLike`): The output directory. It is created if it does not exist.
    """
    parts = list(parts)
    merged = merge_adapters([adapter_state(part) for part in parts], parts[0].cut.num_blocks)
    full_peft_config(peft_config, config, parts[0]).save_pretrained(os.fspath(directory))
    save_weights(merged, os.path.join(directory, SAFETENSORS_WEIGHTS_NAME))


def save_weights(state: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Save tensors as a safetensors file that `from_pretrained` loads."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def full_peft_config(peft_config: PeftConfig, config: PretrainedConfig, part: Part) -> PeftConfig:
    """
    Create the config that is saved with an adapter of the full model.

    Args:
        peft_config (`PeftConfig`): The config from which the adapters were created. It is not modified.
        config (`PretrainedConfig`): The config of the full model.
        part ([`Part`]): Any part of the model.
    """
    saved = copy.deepcopy(peft_config)
    if isinstance(saved, PrefixTuningConfig):
        saved = _prefix_config(saved, config, part.cut.num_blocks, part.layout)
    saved.inference_mode = True
    return saved


def _is_router(layer: LoraLayer) -> bool:
    """Whether a layer adapts a router that is a subclass of a linear layer."""
    return type(layer.get_base_layer()).__name__.endswith("Router")


def _inject_lora(part: Part, peft_config: LoraConfig, lora_layers: Mapping[str, LoraLayer]) -> None:
    """
    Add LoRA to the modules of a part that are adapted in the full model, with the rank and alpha of each module.

    `lora_layers` are the LoRA layers of the full model, by module name.
    """
    part_layers = {
        name: layer
        for original, layer in lora_layers.items()
        if (name := part.part_name(original)) is not None and part.owns(name)
    }
    if not part_layers:
        return
    config = copy.deepcopy(peft_config)
    config.layers_to_transform = config.layers_pattern = config.exclude_modules = None
    # PEFT matches the full module names exactly, and so no other modules.
    config.target_modules = set(part_layers)
    config.rank_pattern = {f"^{re.escape(name)}": layer.r[_DEFAULT] for name, layer in part_layers.items()}
    config.alpha_pattern = {f"^{re.escape(name)}": layer.lora_alpha[_DEFAULT] for name, layer in part_layers.items()}
    inject_adapter_in_model(config, part.model)
    # As in a PeftModel, the adapters of a half-precision base model are trained in float32.
    cast_adapter_dtype(part.model, _DEFAULT)


def _prefix_config(
    peft_config: PrefixTuningConfig, config: PretrainedConfig, num_blocks: int, layout: Layout
) -> PrefixTuningConfig:
    """Create PEFT's config for the prefixes of `num_blocks` blocks of the model."""
    prefix_config = copy.deepcopy(peft_config)
    if layout.runner is not None:  # PEFT does not support the model classes that need a runner
        num_heads, head_size = layout.runner.key_value_heads(config)
        prefix_config.num_attention_heads = num_heads
        prefix_config.token_dim = num_heads * head_size
        prefix_config.encoder_hidden_size = prefix_config.encoder_hidden_size or prefix_config.token_dim
        prefix_config.num_transformer_submodules = 1
    else:
        with init_empty_weights():
            # PEFT computes the sizes of keys and values, including grouped-query attention.
            prefix_config = get_peft_model(AutoModelForCausalLM.from_config(config), prefix_config).active_peft_config
    prefix_config.num_layers = num_blocks
    prefix_config.inference_mode = False
    return prefix_config


def _load_prefix(part: Part, part_prefix: Prefix, state: Mapping[str, torch.Tensor]) -> None:
    if part_prefix.config.prefix_projection:
        raise ValueError(
            "An adapter with prefix_projection=True cannot be loaded into parts, because one encoder computes the "
            "prefixes of all blocks. Set prefix_projection=False, or call SplitModel.add_adapter, which creates an "
            "encoder for each part."
        )
    if _PROMPT in state:
        columns = state[_PROMPT].chunk(part.cut.num_blocks, dim=1)
        state = {f"{_PROMPT}.{number}": prefix for number, prefix in enumerate(columns)}
    if missing := [number for number in part.blocks if f"{_PROMPT}.{number}" not in state]:
        raise ValueError(f"The adapter has no prefix for block {missing[0]}. Load an adapter of the same model.")
    weight = part_prefix.encoder.embedding.weight
    values = torch.cat([state[f"{_PROMPT}.{number}"] for number in part.blocks], dim=1)
    if values.shape != weight.shape:
        raise ValueError(
            f"The prefixes in the adapter have shape {tuple(values.shape)}, but the blocks need shape "
            f"{tuple(weight.shape)}. Load an adapter of the same model with the same config."
        )
    weight.copy_(values)
