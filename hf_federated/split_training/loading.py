"""Loading of one party's parts from a checkpoint, without the weights of other parts, or of a full model by name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from peft import PeftConfig
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..split.adapters import add_adapter
from ..split.boundary import Boundary, Link
from ..split.cut import Role
from ..split.families import cut_of
from ..split.loading import load_parts
from ..split.model import SplitModel
from ..split.parts import Part
from ..split.wire import Wire
from ..utils.random import derived_seed, isolated_rng
from ..utils.remote_code import remote_causal_class
from .config import SplitConfig


# Arguments that determine where the files of a checkpoint are found.
FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
# Parts are always read from safetensors and without a copy in memory.
_IGNORED_ARGUMENTS = {"low_cpu_mem_usage", "use_safetensors"}
# `AutoConfig.from_pretrained` accepts these arguments, but the loader of a part's weights does not.
_UNSUPPORTED_ARGUMENTS = {"gguf_file", "subfolder"}


def file_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of `from_pretrained` that determine where the files of a checkpoint are found."""
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
    Load the server's blocks of a checkpoint.

    Args:
        name (`str`): A directory or an id of a model on the Hub.
        split ([`SplitConfig`]): The cut of the model.
        adapter (`PeftConfig`, *optional*): Config of the adapters of all parts.
        seed (`int`, *optional*, defaults to `0`): Seed of the initial values of the adapter.
        dtype (`torch.dtype` or `str`, *optional*): Dtype of the weights. Defaults to the dtype of the stored weights.
            `"auto"` uses the dtype that the config names, as in `from_pretrained`.
        kwargs: Arguments of `AutoConfig.from_pretrained`: fields of the config, `attn_implementation`, and arguments
            such as `revision` and `token` for a checkpoint on the Hub.

    Returns:
        `tuple[PretrainedConfig, Part, Wire]`: The config of the full model, the body, and the encoding of hidden
        states.

    Raises:
        ValueError: If an argument is not supported for a part, or weights are missing or have a wrong shape.
    """
    config, parts = _load_parts(name, split, ("body",), adapter, derived_seed(seed, "server"), dtype, kwargs)
    return config, parts[0], Wire.for_weights(parts[0].dtype, split.wire_dtype)


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
    Load a client's head and tail of a checkpoint.

    Args:
        name (`str`): A directory or an id of a model on the Hub.
        split ([`SplitConfig`]): The cut of the model.
        client_id (`str`): The client.
        adapter (`PeftConfig`, *optional*): Config of the adapters of all parts.
        seed (`int`, *optional*, defaults to `0`): Seed of the initial values of the adapter, which are equal for all
            clients.
        dtype (`torch.dtype` or `str`, *optional*): Dtype of the weights. Defaults to the dtype of the stored weights.
            `"auto"` uses the dtype that the config names, as in `from_pretrained`.
        link ([`~split.Link`], *optional*): Link to the server. Can be set later as `model.boundary.link`.
        kwargs: Arguments of `AutoConfig.from_pretrained`: fields of the config, `attn_implementation`, and arguments
            such as `revision` and `token` for a checkpoint on the Hub.

    Raises:
        ValueError: If an argument is not supported for a part, or weights are missing or have a wrong shape.
    """
    roles: tuple[Role, ...] = ("head", "tail")
    config, (head, tail) = _load_parts(name, split, roles, adapter, derived_seed(seed, "clients"), dtype, kwargs)
    wire = Wire.for_weights(head.dtype, split.wire_dtype)
    boundary = Boundary(_UnconnectedLink() if link is None else link, wire, client_id)
    model = SplitModel(config, head, tail, boundary)
    model.adapter_config = adapter
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(name, **file_arguments(kwargs))
    return model


def load_model_by_name(name: str, settings: Any, quantization_config: Any = None) -> PreTrainedModel:
    """
    Load a full model by its name, as TRL's `SFTTrainer` does when `model` is a string.

    Args:
        name (`str`): A directory or an id of a model on the Hub.
        settings (`trl.SFTConfig`, *optional*): The training arguments. Their `model_init_kwargs` are passed to
            `from_pretrained`. `dtype` defaults to `"float32"`, and `trust_remote_code` to the field of the same name.
        quantization_config (`Any`, *optional*): The trainer's argument of the same name.

    Raises:
        ValueError: If a quantization is requested.
    """
    kwargs = {"dtype": "float32", **(getattr(settings, "model_init_kwargs", None) or {})}
    kwargs.setdefault("trust_remote_code", getattr(settings, "trust_remote_code", False))
    if quantization_config is not None or kwargs.get("quantization_config") is not None:
        raise ValueError("A quantized model cannot be split. Leave `quantization_config` out.")
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def _load_parts(
    name: str,
    split: SplitConfig,
    roles: tuple[Role, ...],
    adapter: PeftConfig | None,
    seed: int,
    dtype: torch.dtype | str | None,
    kwargs: dict[str, Any],
) -> tuple[PretrainedConfig, list[Part]]:
    _reject_arguments(kwargs.keys() & _UNSUPPORTED_ARGUMENTS)
    config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
    _reject_arguments(unused.keys() - _IGNORED_ARGUMENTS)
    if dtype == "auto":
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = _resolve_dtype(dtype)
    if dtype is not None:
        config.dtype = dtype
    cut = cut_of(config, split.head_blocks, split.tail_blocks)
    model_class = remote_causal_class(name, config, kwargs)
    files = file_arguments(kwargs)
    loaded = load_parts(name, config, cut, roles, model_class=model_class, dtype=dtype, **files)
    parts = [loaded[role] for role in roles]
    if adapter is not None:
        with isolated_rng(seed):
            add_adapter(parts, config, adapter)
    return config, parts


def _reject_arguments(names: Set[str]) -> None:
    if names:
        raise ValueError(
            f"The arguments {', '.join(sorted(names))} are not supported when a part of a model is loaded. Use only "
            f"dtype, attn_implementation, {', '.join(FILE_ARGUMENTS)} and fields of the model's config."
        )


def _resolve_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"dtype={name!r} is not supported. Use 'auto' or a floating-point dtype of torch such as 'bfloat16'."
        )
    return dtype


class _UnconnectedLink(Link):
    """Link of a client that is not connected to a server yet."""

    def exchange(self, blob: bytes) -> bytes:
        raise ValueError("This client is not connected to a server yet. Set model.boundary.link.")
