"""Arguments and classes for models whose code is in the repository of the model (`trust_remote_code`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from .._compat import older_repository_code


# Arguments of `from_pretrained` that permit the code of a repository and select its version.
CODE_ARGUMENTS = ("trust_remote_code", "code_revision")
# Arguments that determine where the files of a repository are found.
_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
# Auto classes of causal models. ChatGLM-6B, whose context attends in both directions, only has the second one.
_CAUSAL_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")


def code_arguments(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Select the arguments that permit the code of a repository. Without them, such code raises an error.

    Args:
        kwargs (`Mapping[str, Any]`, *optional*): Arguments of `from_pretrained` for a model.
    """
    return {name: (kwargs or {})[name] for name in CODE_ARGUMENTS if name in (kwargs or {})}


def load_repository_tokenizer(name: str, **kwargs: Any) -> Any:
    """
    Load a tokenizer, also with older code of its repository if `trust_remote_code` is set.

    Args:
        name (`str`): A directory or an id of a model on the Hub.
        kwargs: Arguments of `AutoTokenizer.from_pretrained`.
    """
    with older_repository_code() if kwargs.get("trust_remote_code") else nullcontext():
        return AutoTokenizer.from_pretrained(name, **kwargs)


def load_causal_model(name: str, **kwargs: Any) -> PreTrainedModel:
    """
    Load a causal model as `AutoModelForCausalLM` does, and also models of older code in a repository.

    If `trust_remote_code` is set and the repository has code for the model, all weights get the dtype that `dtype`
    requests, or else the dtype of the word embeddings. The code of ChatGLM-6B ignores `dtype` for some weights.

    Args:
        name (`str`): A directory or an id of a model on the Hub.
        kwargs: Arguments of `from_pretrained`.
    """
    model_class = None
    if kwargs.get("trust_remote_code"):
        config = AutoConfig.from_pretrained(name, **_repository_arguments(kwargs), **code_arguments(kwargs))
        model_class = remote_causal_class(name, config, kwargs)
    if model_class is None:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    # `AutoModelForCausalLM` would return a class without `generate` for the second model in a process.
    model_class = add_generation_mixin_to_remote_model(model_class)
    arguments = {argument: value for argument, value in kwargs.items() if argument not in CODE_ARGUMENTS}
    with older_repository_code():
        model = model_class.from_pretrained(name, **arguments)
    # transformers 5 moves `use_cache` to the generation config, but the code of ChatGLM2 reads it from the config.
    vars(model.config).setdefault("use_cache", False)
    dtype = kwargs.get("dtype")
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return model.to(model.dtype if dtype is None else dtype)


def remote_causal_class(name: str, config: PretrainedConfig, kwargs: Mapping[str, Any]) -> Any:
    """
    Load the class of a causal model from the code of its repository.

    Args:
        name (`str`): A directory or an id of a model on the Hub.
        config (`PretrainedConfig`): The config of the model.
        kwargs (`Mapping[str, Any]`): Arguments of `from_pretrained`.

    Returns:
        `type`: The class, or `None` if `trust_remote_code` is not set or the repository has no code for such a model.
    """
    auto_map: Mapping[str, str] = vars(config).get("auto_map") or {}
    references = [auto_map[class_name] for class_name in _CAUSAL_CLASSES if class_name in auto_map]
    if not kwargs.get("trust_remote_code") or config.is_encoder_decoder or not references:
        return None
    arguments = _repository_arguments(kwargs)
    return get_class_from_dynamic_module(references[0], name, code_revision=kwargs.get("code_revision"), **arguments)


def _repository_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs}
