"""Models of a recipe on the meta device: the shapes and dtypes of all parameters, without weights.

The models are built from their configs, with `accelerate.init_empty_weights`, as `accelerate estimate-memory` does.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from peft import get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from hf_federated._compat import older_repository_code
from hf_federated.experiments.data.files import hub_errors
from hf_federated.experiments.model_loading import adapter_config
from hf_federated.experiments.recipe.schema import RecipeError, recipe_errors
from hf_federated.experiments.recipe.sections import ModelSection
from hf_federated.split.model import SplitModel
from hf_federated.split_training import SplitConfig
from hf_federated.tasks import LanguageModeling, Task
from hf_federated.utils.remote_code import CODE_ARGUMENTS, remote_causal_class


def load_config(model: ModelSection, task: Task, field: str = "model") -> PretrainedConfig:
    """
    Load the config of a model with the labels of the task.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        task ([`Task`]): The task.
        field (`str`, *optional*, defaults to `"model"`): Name of the section, for error messages.

    Raises:
        RecipeError: If the config cannot be loaded, or the model is quantized.
    """
    if model.decoder_name_or_path is not None:
        names = ("name_or_path", "decoder_name_or_path")
        sides = [_read_config(getattr(model, name), model, {}, f"{field}.{name}") for name in names]
        config: PretrainedConfig = EncoderDecoderConfig.from_encoder_decoder_configs(*sides)
    else:
        config = _read_config(model.name_or_path, model, task.model_kwargs, f"{field}.name_or_path")
    if isinstance(task, LanguageModeling) and task.needs_causal_attention(config):
        config.is_decoder = True
    if getattr(config, "quantization_config", None) is not None or "quantization_config" in (model.kwargs or {}):
        raise RecipeError(f"{field}: a quantized model cannot be estimated. Remove the quantization from the recipe.")
    return config


def _read_config(name: str, model: ModelSection, labels: dict[str, Any], field: str) -> PretrainedConfig:
    arguments = {**labels, **(model.kwargs or {})}
    with recipe_errors(field), hub_errors(field, name):
        # Arguments of `from_pretrained` that are no fields of the config do not change the shapes.
        config, _ = AutoConfig.from_pretrained(name, revision=model.revision, return_unused_kwargs=True, **arguments)
    return config


def meta_model(
    model: ModelSection, task: Task, field: str = "model", split: SplitConfig | None = None
) -> PreTrainedModel:
    """
    Build the model of a recipe on the meta device, with its adapter.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        task ([`Task`]): The task.
        field (`str`, *optional*, defaults to `"model"`): Name of the section, for error messages.
        split ([`SplitConfig`], *optional*): If set, the model is split.

    Returns:
        `PreTrainedModel`, `PeftModel` or [`SplitModel`]: The model.

    Raises:
        RecipeError: If the config cannot be loaded, or the model cannot be built from it.
    """
    config = load_config(model, task, field)
    dtype = _dtype(model, config)
    with recipe_errors(field), init_empty_weights(include_buffers=True):
        built = task.set_up(_build(model, task, config, dtype))
        adapter = adapter_config(model, task, config)
        if split is None:
            return built if adapter is None else get_peft_model(built, adapter)
        parts = SplitModel.from_model(built, split.head_blocks, split.tail_blocks, wire_dtype=split.wire_dtype)
        if adapter is not None:
            parts.add_adapter(adapter)
        return parts


def _build(model: ModelSection, task: Task, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    if isinstance(config, EncoderDecoderConfig):
        encoder_decoder: PreTrainedModel = EncoderDecoderModel(config)
        return encoder_decoder.to(dtype)
    # The class has the type of a class variable, or of a property that depends on the objective.
    model_class: Any = task.model_class
    kwargs = model.kwargs or {}
    remote = None
    if model_class is AutoModelForCausalLM:
        remote = remote_causal_class(model.name_or_path, config, {"revision": model.revision, **kwargs})
    if remote is None:
        code = {name: kwargs[name] for name in CODE_ARGUMENTS if name in kwargs}
        built: PreTrainedModel = model_class.from_config(config, dtype=dtype, **code)
        return built
    with older_repository_code():
        built = add_generation_mixin_to_remote_model(remote)(config)
    # `from_pretrained` sets these values, also for code that was written for other versions of transformers.
    vars(built.config).setdefault("use_cache", False)
    built.generation_config = GenerationConfig.from_model_config(config)
    return built.to(dtype)


def _dtype(model: ModelSection, config: PretrainedConfig) -> torch.dtype:
    """Return the dtype in which `from_pretrained` loads the weights: the given dtype, or that of the config."""
    dtype = (model.kwargs or {}).get("dtype", "auto")
    if dtype == "auto":
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return torch.float32 if dtype is None else dtype
