"""Splitting of a model in memory into parts that share its parameters and compute the same function.

`loading.py` creates parts from the files of a checkpoint instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from .._compat import LOSS_FUNCTION, module_hooks
from .cut import ROLES, Cut, Role
from .layouts import Layout
from .parts import Part


logger = logging.get_logger(__name__)


def split_into_parts(
    model: PreTrainedModel, config: PretrainedConfig, cut: Cut, layout: Layout | None = None
) -> dict[Role, Part]:
    """
    Create the parts of a model.

    Args:
        model (`PreTrainedModel`): The full model. The parts share its parameters.
        config (`PretrainedConfig`): The config of the model, as [`dense_config`] returns it.
        cut ([`Cut`]): The cuts of the model.
        layout ([`Layout`], *optional*): The layout of the model. Defaults to the layout of its model type.

    Returns:
        `dict[str, Part]`: The parts by role.

    Raises:
        ValueError: If a module of the model was replaced by a module of another class.
    """
    parts = {role: Part(config, cut, role, layout, type(model)) for role in ROLES}
    weights = base_weights(model)
    for part in parts.values():
        part.assign_parameters(weights)
    check_modules(model, parts.values())
    # A loss that was set on the model is not a module, so it must be copied.
    parts["tail"].model.loss_type = model.loss_type
    if hasattr(model, LOSS_FUNCTION):
        parts["tail"].model.loss_function = model.loss_function
    return parts


def base_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of a model by name, without the adapters that PEFT added."""
    weights = model.state_dict(keep_vars=True)
    return {name.replace(".base_layer.", "."): value for name, value in weights.items() if ".lora_" not in name}


def check_not_quantized(config: PretrainedConfig) -> None:
    """
    Check that a model is not quantized.

    Raises:
        ValueError: If the config has a `quantization_config`.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "A quantized model cannot be split, but the config has a quantization_config. Load the model without "
            "quantization, for example in bfloat16. Load a GGUF file with GgufConfig(dequantize=True)."
        )


def dense_config(model: PreTrainedModel) -> PretrainedConfig:
    """
    Return the config of a model, without the `quantization_config` of a GGUF file whose weights were dequantized.

    Args:
        model (`PreTrainedModel`): The full model. Its config is not changed.

    Raises:
        ValueError: If the model is quantized.
    """
    config, name = model.config, "quantization_config"
    values = config.to_dict().get(name) or {}
    is_dense = all(parameter.is_floating_point() for parameter in model.parameters())
    if values.get("quant_method") == "gguf" and is_dense:
        config = copy.deepcopy(config)
        delattr(config, name)
    check_not_quantized(config)
    return config


def check_modules(model: PreTrainedModel, parts: Iterable[Part]) -> None:
    """
    Compare the modules of a model with the modules of its parts, which were built from the model's class and config.

    A warning lists modules with hooks. The hooks stay on the modules of the full model, so a split model does not call
    them.

    Args:
        model (`PreTrainedModel`): The full model.
        parts (`Iterable[Part]`): The parts of the model.

    Raises:
        ValueError: If a module of the model was replaced by a module of another class.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for part in parts:
        for name, part_module in part.model.named_modules():
            if not part.owns(name):
                continue
            original = part.original_name(name)
            module = modules.get(original)
            if module is not None and hasattr(module, "get_base_layer"):
                module = module.get_base_layer()
            if type(module) is not type(part_module):
                raise ValueError(
                    f"{original} is a {type(module).__name__}, but the class and the config of the model create a "
                    f"{type(part_module).__name__}, which the part has. Replace the module in the parts of the "
                    "SplitModel, or write a model class whose __init__ creates it."
                )
    if hooked := [name for name, module in modules.items() if _has_hooks(module)]:
        logger.warning(
            f"Hooks on {', '.join(hooked[:3])}{' …' if len(hooked) > 3 else ''} are not run in a split model. "
            "Register them on the modules of the SplitModel's parts."
        )


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, except the hooks of `transformers` (for hidden states and input gradients)."""
    hooks = module_hooks(module)
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
