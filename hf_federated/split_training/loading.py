"""Parties' own parts of a checkpoint, for a networked run: nobody reads the others' weights. And the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from peft import PeftConfig
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..messages.quantization import TRAVEL_DTYPES
from ..split.adapters import add_adapter
from ..split.boundary import Boundary, Link
from ..split.cut import Cut, Role
from ..split.families import layout_of
from ..split.loading import load_parts
from ..split.model import SplitModel
from ..split.parts import Part
from ..split.wire import Wire
from ..utils.random import derived_seed, own_draws
from .config import SplitConfig


# Where the files of a checkpoint are found.
FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
# Parts are read from safetensors and without a copy, however they are asked for.
_WITHOUT_EFFECT = {"low_cpu_mem_usage", "use_safetensors"}
# A config is found by these too, and a part's weights are not.
_OF_OTHER_FILES = {"gguf_file", "subfolder"}


def file_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of arguments of `from_pretrained` that say where its files are."""
    return {name: kwargs[name] for name in FILE_ARGUMENTS if name in kwargs}


def load_server_body(
    name: str,
    split: SplitConfig,
    adapter: PeftConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    **kwargs: Any,
) -> tuple[PretrainedConfig, Part, Wire]:
    """
    The server's blocks of a checkpoint.

    Args:
        name (`str`): A directory or a Hub id.
        split ([`SplitConfig`]): Where it is cut.
        adapter (`PeftConfig`, *optional*): What every part gets.
        seed (`int`, *optional*, defaults to `0`): Of the adapter's first values.
        dtype (`torch.dtype` or `str`, *optional*): Of the weights; by default as they are stored. `"auto"` is what
            `from_pretrained` takes it for: the one that the config names.
        kwargs: What `AutoConfig.from_pretrained` takes: fields of the config, `attn_implementation`, and `revision`,
            `token`, … of a checkpoint on the Hub.

    Returns:
        `tuple[PretrainedConfig, Part, Wire]`: The whole model's config, the body, and how states travel.

    Raises:
        ValueError: If one is given that means nothing for a part, or weights are missing or do not fit.
    """
    config, parts = _load(name, split, ("body",), adapter, derived_seed(seed, "server"), dtype, kwargs)
    return config, parts[0], _wire(split, parts[0])


def load_client_model(
    name: str,
    split: SplitConfig,
    client_id: str,
    adapter: PeftConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    link: Link | None = None,
    **kwargs: Any,
) -> SplitModel:
    """
    A client's head and tail of a checkpoint.

    Args:
        name (`str`): A directory or a Hub id.
        split ([`SplitConfig`]): Where it is cut.
        client_id (`str`): Whose.
        adapter (`PeftConfig`, *optional*): What every part gets.
        seed (`int`, *optional*, defaults to `0`): Of the adapter's first values, which are the same for all clients.
        dtype (`torch.dtype` or `str`, *optional*): Of the weights; by default as they are stored. `"auto"` is what
            `from_pretrained` takes it for: the one that the config names.
        link ([`~split.Link`], *optional*): To the server; it may be set later, as `model.boundary.link`.
        kwargs: What `AutoConfig.from_pretrained` takes: fields of the config, `attn_implementation`, and `revision`,
            `token`, … of a checkpoint on the Hub.

    Raises:
        ValueError: If one is given that means nothing for a part, or weights are missing or do not fit.
    """
    roles: tuple[Role, ...] = ("head", "tail")
    config, (head, tail) = _load(name, split, roles, adapter, derived_seed(seed, "clients"), dtype, kwargs)
    boundary = Boundary(_NoLink() if link is None else link, _wire(split, head), client_id)
    model = SplitModel(config, head, tail, boundary)
    model.adapter_config = adapter
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(name, **file_arguments(kwargs))
    return model


def load_named_model(name: str, settings: Any, quantization_config: Any = None) -> PreTrainedModel:
    """
    The whole model, of a name that TRL's `SFTTrainer` was given in its place, as it loads it.

    Args:
        name (`str`): A directory or a Hub id.
        settings (`trl.SFTConfig`, *optional*): Its `model_init_kwargs` are those of `from_pretrained`, with `dtype`
            `"float32"` unless they say another; its `trust_remote_code` is one of them.
        quantization_config (`Any`, *optional*): What the trainer was given as such.

    Raises:
        ValueError: If the model is to be quantized.
    """
    kwargs = {"dtype": "float32", **(getattr(settings, "model_init_kwargs", None) or {})}
    kwargs.setdefault("trust_remote_code", getattr(settings, "trust_remote_code", False))
    if quantization_config is not None or kwargs.get("quantization_config") is not None:
        raise ValueError("A quantized model cannot be split: leave `quantization_config` out.")
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def _load(
    name: str,
    split: SplitConfig,
    roles: tuple[Role, ...],
    adapter: PeftConfig | None,
    seed: int,
    dtype: torch.dtype | str | None,
    kwargs: dict[str, Any],
) -> tuple[PretrainedConfig, list[Part]]:
    _refuse(kwargs.keys() & _OF_OTHER_FILES)
    config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
    _refuse(unused.keys() - _WITHOUT_EFFECT)
    if dtype == "auto":
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = _named_dtype(dtype)
    if dtype is not None:
        config.dtype = dtype
    cut = Cut(int(getattr(config, layout_of(config).num_blocks)), split.head_blocks, split.tail_blocks)
    loaded = load_parts(name, config, cut, roles, dtype=dtype, **file_arguments(kwargs))
    parts = [loaded[role] for role in roles]
    if adapter is not None:
        with own_draws(seed):
            add_adapter(parts, config, adapter)
    return config, parts


def _refuse(names: Set[str]) -> None:
    if names:
        raise ValueError(
            f"{', '.join(sorted(names))}: a part is loaded with dtype, attn_implementation,"
            f" {', '.join(FILE_ARGUMENTS)} and fields of the model's config alone. Leave others out."
        )


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}; give 'auto', or a torch dtype of weights such as 'bfloat16'.")
    return dtype


def _wire(split: SplitConfig, part: Part) -> Wire:
    if split.wire_dtype != "auto":
        return Wire(split.wire_dtype)
    name = str(part.dtype).removeprefix("torch.")
    return Wire(name if name in TRAVEL_DTYPES else "float32")


class _NoLink:
    """Before a client is connected."""

    def exchange(self, blob: bytes) -> bytes:
        raise ValueError("This client is not connected to a server yet: set model.boundary.link.")

    def end_step(self) -> None:
        """Nothing."""
