"""Loading of parts from the safetensors files of a checkpoint, without reading the weights of the other parts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..utils.untrusted_json import read_json_object
from .conversion import find_conversions
from .cut import Cut, Role
from .layouts import Layout
from .parts import Part
from .splitting import check_not_quantized


def load_parts(
    name: str,
    config: PretrainedConfig,
    cut: Cut,
    roles: tuple[Role, ...],
    *,
    layout: Layout | None = None,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> dict[Role, Part]:
    """
    Load parts of a checkpoint, without reading the weights of the other parts.

    Args:
        name (`str`): A directory or a Hub id with safetensors files.
        config (`PretrainedConfig`): The config of the full model.
        cut ([`~split.Cut`]): The cuts of the model.
        roles (`tuple[str, ...]`): The parts to load: `("head", "tail")` for a client, `("body",)` for the server.
        layout ([`Layout`], *optional*): The layout of the model. Defaults to the layout of its model type.
        model_class (`type[PreTrainedModel]`, *optional*):
            The model class, if `AutoModelForCausalLM` has no class for the config.
        dtype (`torch.dtype`, *optional*): The dtype of the weights. Defaults to the stored dtype.
        kwargs: `revision`, `token`, `cache_dir`, … of a checkpoint on the Hub.

    Returns:
        `dict[str, Part]`: The parts by role.

    Raises:
        ValueError: If weights are missing or quantized, or do not fit the config.
    """
    check_not_quantized(config)
    parts = {role: Part(config, cut, role, layout, model_class) for role in roles}
    required = {part.original_name(name) for part in parts.values() for name in part.model.state_dict()}
    part = parts[roles[0]]
    is_tied = config.tie_word_embeddings and "tail" in roles
    tied = {f"{part.layout.output}.weight": f"{part.layout.embedding}.weight"} if is_tied else {}
    weights = read_weights(name, required - tied.keys() | set(tied.values()), dtype, part, **kwargs)
    for alias, source in tied.items():
        weights[alias] = weights[source]
    for part in parts.values():
        part.assign_parameters(weights)
    return parts


def read_weights(
    name: str,
    weight_names: Iterable[str],
    dtype: torch.dtype | None,
    part: Part,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """
    Read weights of a checkpoint by name.

    If the checkpoint has several files, only the files with a requested weight are opened, and downloaded if the
    checkpoint is on the Hub. If the checkpoint has one file, only the requested weights are read from it.

    Args:
        name (`str`): A directory or a Hub id.
        weight_names (`Iterable[str]`):
            Names of the weights in the full model. The names in the checkpoint may lack the prefix of the base model.
        dtype (`torch.dtype`, *optional*): The dtype of floating-point weights. Defaults to the stored dtype.
        part ([`Part`]): Any part of the model. Weights that the checkpoint stores in another form are converted.
        kwargs: Arguments of `cached_file`: `revision`, `token`, `cache_dir`, …

    Returns:
        `dict[str, torch.Tensor]`: CPU tensors by name in the full model. Floating-point weights are
        `torch.nn.Parameter`.

    Raises:
        ValueError: If a weight is missing, or the checkpoint has no safetensors file.
    """
    weight_map = _weight_map(name, **kwargs)
    by_file: dict[str, list[tuple[str, str]]] = {}
    missing: list[str] = []
    for weight in sorted(weight_names):
        stored_name = _stored_name(weight, weight_map)
        if stored_name is None:
            missing.append(weight)
        else:
            by_file.setdefault(weight_map[stored_name], []).append((weight, stored_name))
    conversions = find_conversions(part, weight_map, set(missing)) if missing else []
    for source, _ in (source for conversion in conversions for source in conversion.sources):
        by_file.setdefault(weight_map[source], []).append((source, source))
    tensors: dict[str, torch.Tensor] = {}
    for file_name, names in sorted(by_file.items()):
        with safe_open(_file(name, file_name, **kwargs), framework="pt") as file:
            for weight, stored_name in names:
                tensor = file.get_tensor(stored_name)
                if dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                tensors[weight] = tensor
    for conversion in conversions:
        tensors.update(conversion.convert(tensors.pop))
    if missing := [weight for weight in missing if weight not in tensors]:
        raise ValueError(
            f"{name} has no weights named {missing[:3]}{' …' if len(missing) > 3 else ''}. Either the weights and the "
            "config belong to different models, or the checkpoint uses different names. Save the checkpoint again "
            "with save_pretrained."
        )
    return {name: nn.Parameter(value) if value.is_floating_point() else value for name, value in tensors.items()}


def read_weight_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """
    Read the index of a checkpoint with several weight files: the file name of each stored weight.

    Args:
        path (`str` or `os.PathLike`): The index.

    Raises:
        ValueError: If the file is not an index.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{os.fspath(path)} does not name the file of each weight. Save the checkpoint again.")
    return weight_map


def _weight_map(name: str, **kwargs: Any) -> dict[str, str]:
    """Map the names of the stored weights to file names."""
    index = _file(name, SAFE_WEIGHTS_INDEX_NAME, optional=True, **kwargs)
    if index is not None:
        return read_weight_index(index)
    single = _file(name, SAFE_WEIGHTS_NAME, optional=True, **kwargs)
    if single is None:
        raise ValueError(
            f"{name} has no {SAFE_WEIGHTS_NAME}, but parts are read from safetensors files. Save the model with "
            "save_pretrained."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)


def _file(name: str, file_name: str, optional: bool = False, **kwargs: Any) -> Any:
    if os.path.isdir(name) and not optional:
        return os.path.join(name, file_name)
    return cached_file(name, file_name, _raise_exceptions_for_missing_entries=not optional, **kwargs)


def _stored_name(name: str, weight_map: dict[str, str]) -> str | None:
    """Return a weight's name in the checkpoint, with or without the prefix of the base model; `None` if missing."""
    without_prefix = name.partition(".")[2]
    return next((candidate for candidate in (name, without_prefix) if candidate in weight_map), None)
