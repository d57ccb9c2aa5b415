"""What a model that is already built must be, so that parts of its class with its weights compute what it does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from .parts import Part


logger = logging.get_logger(__name__)


def base_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's weights by name, without the adapters that PEFT put into it."""
    weights = model.state_dict(keep_vars=True)
    return {name.replace(".base_layer.", "."): value for name, value in weights.items() if ".lora_" not in name}


def check_not_quantized(config: PretrainedConfig) -> None:
    """
    Refuse weights that only a quantizer can read.

    Raises:
        ValueError: If the config names one.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("A quantized model (quantization_config) cannot be cut: load it without, or in bfloat16.")


def check_modules(model: PreTrainedModel, parts: Iterable[Part]) -> None:
    """
    Compare a model's modules with those that its parts were built with, which come from its class and config.

    Hooks are warned of: they stay on the model's own modules.

    Args:
        model (`PreTrainedModel`): The whole model.
        parts (`Iterable[Part]`): Its parts.

    Raises:
        ValueError: If somebody replaced a module.
    """
    whole = dict(model.named_modules())
    for part in parts:
        for name, own in part.model.named_modules():
            if not part.owns(name):
                continue
            original = part.original_name(name)
            there = whole.get(original)
            if there is not None and hasattr(there, "get_base_layer"):
                there = there.get_base_layer()
            if type(there) is not type(own):
                raise ValueError(
                    f"{original} is a {type(there).__name__}, and a model of its class and config has a "
                    f"{type(own).__name__}, as its parts have. Change the parts of a SplitModel, or write a class "
                    "whose __init__ makes the change."
                )
    hooked = [name for name, module in whole.items() if _has_hooks(module)]
    if hooked:
        logger.warning(
            f"Hooks on {', '.join(hooked[:3])}{' …' if len(hooked) > 3 else ''} are not run in a split: register them "
            "on the modules of the SplitModel's parts."
        )


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody hooked in; what transformers does for itself (hidden states, gradients of inputs) apart."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *module._backward_hooks.values()]
    return any(not str(getattr(own, "__module__", "")).startswith("transformers.") for own in hooks)
