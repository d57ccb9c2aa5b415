"""Conversion of stored weights to the parameters of a model class, for the weights of a part.

Some checkpoints store other weights than the model class has: Mixtral stores a matrix for each expert, and
`MixtralForCausalLM` has one parameter for all experts. `transformers` defines the conversion for each model type, and
`from_pretrained` and `save_pretrained` apply it to whole models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from .parts import Part


@dataclass
class Conversion:
    """
    Stored weights that are converted together to one or more weights of the model class.

    Args:
        target (`str`): Name of the first weight in the full model.
        model (`PreTrainedModel`): The full model with empty parameters, from which a conversion reads shapes.
        converter (`WeightConverter`, *optional*): The conversion. By default the weight is only renamed.
        sources (`list[tuple[str, str]]`): Name of each stored weight, and the pattern that the name matches.
    """

    target: str
    model: PreTrainedModel
    converter: Any = None
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        Convert the stored weights.

        Args:
            read (`Callable`): Returns a stored weight by name.

        Returns:
            `dict[str, torch.Tensor]`: Weights by name in the full model.
        """
        if self.converter is None:
            return {self.target: read(self.sources[0][0])}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))
        converted = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def find_conversions(part: Part, stored_names: Iterable[str], required: Set[str]) -> list[Conversion]:
    """
    Find the conversions that create weights of a model class.

    Args:
        part ([`Part`]): Any part of the model.
        stored_names (`Iterable[str]`): Names of the stored weights.
        required (`Set[str]`): Names of the required weights in the full model.

    Returns:
        `list[Conversion]`: The conversions. Required weights that no conversion creates are missing in the checkpoint.
    """
    model = part.empty_full_model()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Conversion] = {}
    for name in sorted(stored_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        converter = None if pattern is None else by_pattern[pattern]
        # A checkpoint of the base model lacks the prefix of its names.
        for candidate in (target, f"{model.base_model_prefix}.{target}"):
            if not required.isdisjoint(_targets(candidate, converter)):
                conversion = found.setdefault(candidate, Conversion(candidate, model, converter))
                conversion.sources.append((name, pattern or name))
    return list(found.values())


def to_checkpoint(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Convert the weights of a full model to the weights that its checkpoints contain.

    Args:
        model (`PreTrainedModel`): A model of the class.
        state (`Mapping[str, torch.Tensor]`): Weights by name in the full model.

    Returns:
        `dict[str, torch.Tensor]`: Weights by name in a checkpoint, in separate memory if they were converted.
    """
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    return {name: value if name in state else value.contiguous().clone() for name, value in converted.items()}


def _targets(target: str, converter: Any) -> set[str]:
    """Return the names of all weights that a conversion creates."""
    if converter is None:
        return {target}
    first, *others = converter.target_patterns
    return {target, *(target.replace(first, other) for other in others)}
