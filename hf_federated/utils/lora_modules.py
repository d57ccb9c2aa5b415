"""The LoRA modules of a model: the names of the factors and of the base weight, and the scale of PEFT.

A method can change base weights. Weights in half precision, quantized weights and tied weights do not change. A
second, frozen adapter of PEFT, the residual adapter, then contains the changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn


# Name of the residual adapter.
RESIDUAL = "federated_residual"


@dataclass(frozen=True)
class LoraModule:
    """
    A LoRA module `W + s B A`.

    Args:
        layer (`LoraLayer`): The layer of PEFT.
        adapter (`str`): Name of the adapter.
        a, b (`str`): Names of the factors, of shapes `(r, in)` and `(out, r)`.
        base (`str`): Name of the base weight `W`.
        is_transposed (`bool`): Whether the base weight has the shape `(in, out)`, as in embeddings and `Conv1D`.
    """

    layer: LoraLayer
    adapter: str
    a: str
    b: str
    base: str
    is_transposed: bool

    @property
    def scaling(self) -> float:
        """The scale `s`: `lora_alpha / r`, or `lora_alpha / √r` with rsLoRA."""
        return float(self.layer.scaling[self.adapter])

    @property
    def rank(self) -> int:
        """The rank `r`."""
        return int(self.layer.r[self.adapter])

    @property
    def is_embedding(self) -> bool:
        """Whether the layer is an embedding, of which PEFT keeps the factors in other dictionaries."""
        return self.adapter in self.layer.lora_embedding_A

    @property
    def has_residual(self) -> bool:
        """Whether the residual adapter contains the changes of the base weight."""
        return RESIDUAL in self.layer.scaling

    @property
    def changed_names(self) -> tuple[str, ...]:
        """Names in the global state of the tensors that change with the base weight: `W`, or `L` and `R`."""
        return (f"{self.base}/residual_left", f"{self.base}/residual_right") if self.has_residual else (self.base,)

    def factors(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """
        Return the factors `B` and `A` of an adapter.

        Args:
            adapter (`str`): Name of the adapter.
        """
        layer = self.layer
        if self.is_embedding:
            return layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter]
        return layer.lora_B[adapter].weight, layer.lora_A[adapter].weight

    @property
    def base_parameter(self) -> nn.Parameter | None:
        """The base weight, or `None` if a quantized layer has tensors of other names."""
        return dict(self.layer.get_base_layer().named_parameters()).get("weight")


def find_lora_modules(model: nn.Module) -> dict[str, LoraModule]:
    """
    Return the LoRA modules of the active adapter, by the name of the factor `A`.

    Args:
        model (`torch.nn.Module`): A model. Without a LoRA adapter, there are no modules.
    """
    if not isinstance(model, PeftModel):
        return {}
    adapter, found = model.active_adapters[0], {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.scaling:
            continue
        is_embedding = adapter in layer.lora_embedding_A
        part, suffix = ("lora_embedding_", adapter) if is_embedding else ("lora_", f"{adapter}.weight")
        a, b = (f"{name}.{part}{factor}.{suffix}" for factor in "AB")
        is_transposed = is_embedding or bool(getattr(layer, "fan_in_fan_out", False))
        found[a] = LoraModule(layer, adapter, a, b, f"{name}.base_layer.weight", is_transposed)
    return found


def scaling_of(config: LoraConfig) -> float:
    """Return the scale `s` of a LoRA configuration."""
    return float(config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r))


def check_uniform(config: Any, where: str) -> None:
    """
    Check that the modules of an adapter have one rank and one scale.

    Args:
        config (`LoraConfig`): The configuration of the adapter.
        where (`str`): Text for the configuration in the error message.

    Raises:
        ValueError: If the configuration sets ranks or scales of single modules.
    """
    for name in ("rank_pattern", "alpha_pattern"):
        if value := getattr(config, name):
            raise ValueError(
                f"{where} sets {name}={value!r}, but clients of different ranks need one rank. Remove it."
            )
