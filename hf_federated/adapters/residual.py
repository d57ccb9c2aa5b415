"""`ResidualAdapter`: changes of base weights that cannot be written, as a second, frozen LoRA adapter.

A change `W + L R` of a base weight in half precision, or of a quantized one, would be rounded away, and a tied weight
would also change elsewhere. The residual adapter adds `L R x` to the output of the layer instead, in float32. Its rank
grows with each change.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn

from ..utils.lora_modules import RESIDUAL, LoraModule, find_lora_modules


# Initializations of PEFT that subtract the first factors from the base weights.
CHANGES_BASE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class FrozenParameter(nn.Parameter):
    """A parameter that remains frozen when PEFT enables its adapter again, such as after `disable_adapter`."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        return super().requires_grad_(False)


def needs_residual(model: nn.Module) -> bool:
    """
    Return whether a base weight of the LoRA modules is quantized, in half precision, or tied to another weight.

    Args:
        model (`torch.nn.Module`): A model with LoRA.
    """
    num_names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for module in find_lora_modules(model).values():
        weight = module.base_parameter
        # Quantized weights have a subclass. Their values can have any dtype.
        if type(weight) is not nn.Parameter or weight.dtype not in (torch.float32, torch.float64):
            return True
        if num_names[id(weight)] > 1:
            return True
    return False


class ResidualAdapter:
    """
    Add the residual adapter to a PEFT model, or find it. With a change, it is active together with the other adapter.

    Args:
        model (`PeftModel`): A model with LoRA and no other adapter.

    Attributes:
        parameters (`dict[str, torch.nn.Parameter]`): The factors by their names in the global state. They have the
            rank 0 until they are written.

    Raises:
        ValueError: If the model has another adapter.
    """

    def __init__(self, model: PeftModel) -> None:
        self._modules = list(find_lora_modules(model).values())
        if others := [name for name in model.peft_config if name not in (model.active_adapters[0], RESIDUAL)]:
            raise ValueError(
                f"The model has the further adapter {others[0]!r}, but the changes of its base weights need a second "
                "adapter, which PEFT disables when another one is selected. Call `delete_adapter`, load the model "
                "with dtype=torch.float32, or use aggregation='fedit'."
            )
        initial = model.peft_config[model.active_adapters[0]].init_lora_weights
        if str(initial).lower().startswith(CHANGES_BASE_WEIGHTS):
            raise ValueError(
                f"init_lora_weights={initial!r} subtracts a part of the base weights that depends on the rank, and "
                "the saved adapter has a larger rank. Set init_lora_weights=True, load the model with "
                "dtype=torch.float32, or use aggregation='fedit'."
            )
        if RESIDUAL not in model.peft_config:
            self._add(model)
        self.parameters = {
            name: parameter
            for module in self._modules
            for name, parameter in zip(module.changed_names, module.factors(RESIDUAL), strict=True)
        }

    def _add(self, model: PeftModel) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        paths = [module.base.removeprefix("base_model.model.") for module in self._modules]
        names = "|".join(re.escape(path.removesuffix(".base_layer.weight")) for path in paths)
        model.peft_config[RESIDUAL] = LoraConfig(
            r=1,
            lora_alpha=1,
            target_modules=names,
            fan_in_fan_out=model.peft_config[model.active_adapters[0]].fan_in_fan_out,
        )
        # `add_adapter` of the model would also copy its head.
        model.base_model.inject_adapter(model.base_model.model, RESIDUAL)
        for module in self._modules:
            _set_empty(module)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)

    @property
    def num_values(self) -> int:
        """Number of values of the factors."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def max_values(self) -> int:
        """Number of values of the factors at their largest rank, the smaller dimension of the module."""
        factors = (module.factors(RESIDUAL) for module in self._modules)
        shapes = [(len(left), math.prod(right.shape[1:])) for left, right in factors]
        return sum(min(shape) * sum(shape) for shape in shapes)

    def resize(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Give the factors the ranks of a state. Their values are then undefined if a rank changes.

        Args:
            state (`Mapping[str, torch.Tensor]`): A value for each name of `parameters`.
        """
        for name, parameter in self.parameters.items():
            if parameter.shape != state[name].shape:
                parameter.data = parameter.new_empty(state[name].shape)
        for module in self._modules:
            rank, layer = len(module.factors(RESIDUAL)[1]), module.layer
            if rank != layer.r[RESIDUAL]:
                layer.r[RESIDUAL] = layer.lora_alpha[RESIDUAL] = rank
                # PEFT cannot merge an adapter with the rank 0.
                _activate(module, [module.adapter, RESIDUAL] if rank else [module.adapter])


def _set_empty(module: LoraModule) -> None:
    """Give the residual adapter of a module the rank 0, in float32 or wider."""
    b, a = module.factors(RESIDUAL)
    dtype = torch.promote_types(module.factors(module.adapter)[1].dtype, torch.float32)
    right = FrozenParameter(a.new_zeros(0, *a.shape[1:], dtype=dtype), requires_grad=False)
    left = FrozenParameter(b.new_zeros(len(b), 0, *b.shape[2:], dtype=dtype), requires_grad=False)
    layer = module.layer
    layer.r[RESIDUAL] = layer.lora_alpha[RESIDUAL] = 0
    if module.is_embedding:
        layer.lora_embedding_A[RESIDUAL], layer.lora_embedding_B[RESIDUAL] = right, left
    else:
        layer.lora_A[RESIDUAL].weight, layer.lora_B[RESIDUAL].weight = right, left


def _activate(module: LoraModule, adapters: list[str]) -> None:
    """Select the adapters of a module. PEFT also sets which factors are trained, which does not change here."""
    trained = [(factor, factor.requires_grad) for factor in module.factors(module.adapter)]
    module.layer.set_adapter(adapters)
    for factor, is_trained in trained:
        factor.requires_grad_(is_trained)


@contextmanager
def joined_adapter(model: PeftModel) -> Iterator[None]:
    """
    Replace the active adapter by the sum of both adapters while the model is saved: `[s B, L]` and `[A; R]`.

    The sum has the scale 1, and the rank of both adapters together. The model must not be used in the meantime.

    Args:
        model (`PeftModel`): A model with a residual adapter.
    """
    modules, name = find_lora_modules(model), model.active_adapters[0]
    configs, before = dict(model.peft_config), []
    ranks = {}
    try:
        for module in modules.values():
            (b, a), (left, right) = module.factors(name), module.factors(RESIDUAL)
            biases = [] if module.is_embedding else [module.layer.lora_B[name].bias]
            before += [(each, each.data) for each in (b, a, *biases) if each is not None]
            for bias in biases:
                if bias is not None:
                    bias.data = module.scaling * bias.data
            b.data = torch.cat([module.scaling * b.data, left.data], 1)
            a.data = torch.cat([a.data, right.data])
            path = module.base.removeprefix("base_model.model.").removesuffix(".base_layer.weight")
            ranks[re.escape(path)] = len(a)
        ((usual, _),) = Counter(ranks.values()).most_common(1)
        others = {path: rank for path, rank in ranks.items() if rank != usual}
        model.peft_config[name] = dataclasses.replace(
            configs[name], r=usual, lora_alpha=usual, rank_pattern=others, alpha_pattern=dict(others), use_rslora=False
        )
        model.peft_config.pop(RESIDUAL)
        yield
    finally:
        for parameter, value in before:
            parameter.data = value
        model.peft_config.clear()
        model.peft_config.update(configs)
