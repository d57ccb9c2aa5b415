"""Parts of a checkpoint, from its safetensors, without reading the others' weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from .cut import Cut, Role
from .layouts import Layout
from .parts import Part
from .whole import check_not_quantized


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
    Parts of a checkpoint, without reading the others' weights.

    Args:
        name (`str`): A directory or a Hub id, with safetensors.
        config (`PretrainedConfig`): The whole model's.
        cut (`Cut`): Where it is cut.
        roles (`tuple[str, ...]`): Which parts: `("head", "tail")` for a client, `("body",)` for the server.
        layout ([`Layout`], *optional*): Where the parts of the model are; by default that of its type.
        model_class (`type[PreTrainedModel]`, *optional*): Where `AutoModelForCausalLM` has none for the config.
        dtype (`torch.dtype`, *optional*): Of the weights; by default as they are stored.
        kwargs: `revision`, `token`, `cache_dir`, … of a checkpoint on the Hub.

    Raises:
        ValueError: If weights are missing or quantized, or do not fit the config.
    """
    check_not_quantized(config)
    parts = {role: Part(config, cut, role, layout, model_class) for role in roles}
    wanted = {part.original_name(own) for part in parts.values() for own in part.model.state_dict()}
    tied = {}
    for part in parts.values():
        if config.tie_word_embeddings and part.role == "tail":
            tied[f"{part.layout.output}.weight"] = f"{part.layout.embedding}.weight"
    weights = read_weights(name, wanted - tied.keys() | set(tied.values()), dtype, **kwargs)
    for alias, source in tied.items():
        weights[alias] = weights[source]
    for part in parts.values():
        part.take(weights)
    return parts


def read_weights(
    name: str, wanted: Iterable[str], dtype: torch.dtype | None = None, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """
    Weights of a checkpoint by name.

    Of a checkpoint in several files, only those that hold a wanted weight are opened, and downloaded where it is on
    the Hub; of one file, only the wanted parts are read.

    Args:
        name (`str`): A directory or a Hub id.
        wanted (`Iterable[str]`): Names of weights in the whole model. Checkpoints that were saved without the prefix
            of their base model are understood.
        dtype (`torch.dtype`, *optional*): Of floating weights; by default as they are stored.
        kwargs: What `cached_file` takes: `revision`, `token`, `cache_dir`, …

    Returns:
        `dict[str, torch.nn.Parameter]`: On the CPU.

    Raises:
        ValueError: If a weight is not there, or the checkpoint has no safetensors.
    """
    places = _places(name, **kwargs)
    stored = {own: _stored_name(own, places) for own in wanted}
    missing = sorted(own for own, there in stored.items() if there is None)
    if missing:
        raise ValueError(
            f"{name} has no weights named {missing[:3]}{' …' if len(missing) > 3 else ''}: weights and config are of "
            "different models, or the checkpoint names its weights otherwise (save it again with save_pretrained)."
        )
    by_file: dict[str, list[tuple[str, str]]] = {}
    for own, there in stored.items():
        assert there is not None
        by_file.setdefault(places[there], []).append((own, there))
    weights: dict[str, torch.Tensor] = {}
    for file_name, names in sorted(by_file.items()):
        with safe_open(_file(name, file_name, **kwargs), framework="pt") as file:
            for own, there in names:
                tensor = file.get_tensor(there)
                if dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                weights[own] = nn.Parameter(tensor) if tensor.is_floating_point() else tensor
    return weights


def _places(name: str, **kwargs: Any) -> dict[str, str]:
    """Which file holds a weight."""
    index = _file(name, SAFE_WEIGHTS_INDEX_NAME, optional=True, **kwargs)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            return dict(json.load(file)["weight_map"])
    single = _file(name, SAFE_WEIGHTS_NAME, optional=True, **kwargs)
    if single is None:
        raise ValueError(
            f"{name} has no {SAFE_WEIGHTS_NAME}: a part is read from safetensors. Save the model with save_pretrained."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)


def _file(name: str, file_name: str, optional: bool = False, **kwargs: Any) -> Any:
    if os.path.isdir(name):
        path = os.path.join(name, file_name)
        return path if os.path.isfile(path) or not optional else None
    return cached_file(name, file_name, _raise_exceptions_for_missing_entries=not optional, **kwargs)


def _stored_name(name: str, places: dict[str, str]) -> str | None:
    """A weight's name in the checkpoint, which may have been saved without the base model's prefix."""
    without_prefix = name.partition(".")[2]
    return next((candidate for candidate in (name, without_prefix) if candidate in places), None)
