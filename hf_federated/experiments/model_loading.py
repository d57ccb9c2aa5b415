"""Load the tokenizers and the models that a recipe names, with their heads and adapters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftConfig, PrefixTuningConfig, TaskType, get_peft_model
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from hf_federated.clients import ClientSpec
from hf_federated.experiments.cached_features import is_same_encoder, load_encoder, load_head
from hf_federated.experiments.data.files import hub_errors
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.experiments.recipe.sections import ModelSection
from hf_federated.split import LAYOUTS, layout_of
from hf_federated.tasks import (
    ClozeClassification,
    LanguageModeling,
    QuestionAnswering,
    Seq2Seq,
    SequenceTagging,
    Summarization,
    SuperGlueClassification,
    SuperGlueCloze,
    SuperGlueSeq2Seq,
    Task,
    TextClassification,
)
from hf_federated.utils.random import derived_seed
from hf_federated.utils.remote_code import code_arguments, load_repository_tokenizer


# PEFT has no task type for masked language modeling, so its adapters have no task type.
LORA_TASKS: dict[type[Task], TaskType] = {
    TextClassification: TaskType.SEQ_CLS,
    ClozeClassification: TaskType.CAUSAL_LM,
    SequenceTagging: TaskType.TOKEN_CLS,
    QuestionAnswering: TaskType.QUESTION_ANS,
    Seq2Seq: TaskType.SEQ_2_SEQ_LM,
    Summarization: TaskType.CAUSAL_LM,
    SuperGlueClassification: TaskType.SEQ_CLS,
    SuperGlueCloze: TaskType.CAUSAL_LM,
    SuperGlueSeq2Seq: TaskType.SEQ_2_SEQ_LM,
}


def load_tokenizer(model: ModelSection, section: str = "model") -> Any:
    """
    Load the tokenizer of a model, or the encoder of a model with a head on cached features.

    The tokenizer can run the code of a repository if `kwargs` of the model permit this.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        section (`str`, *optional*, defaults to `"model"`): The name of the section, for error messages.

    Raises:
        RecipeError: If the tokenizer cannot be loaded.
    """
    field = f"{section}.name_or_path"
    with recipe_errors(field), hub_errors(field, model.name_or_path):
        if model.head is not None:
            return load_encoder(model)
        return load_repository_tokenizer(model.name_or_path, revision=model.revision, **code_arguments(model.kwargs))


def load_model(model: ModelSection, task: Task, tokenizer: Any, seed: int) -> PreTrainedModel:
    """
    Load a model with the head of the task, and with an adapter if the recipe sets `model.lora` or `model.prefix`.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        task ([`Task`]): The task. Its labels become the model's `id2label`.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        seed (`int`): Seed for parameters that are not in the checkpoint (the head, the adapter).

    Raises:
        RecipeError: If the model or the adapter cannot be loaded.
    """
    set_seed(seed)
    kwargs = model.kwargs or {}
    with recipe_errors("model"), _size_errors():
        if model.decoder_name_or_path is not None:
            assert isinstance(task, (Seq2Seq, SuperGlueSeq2Seq))  # checked by Recipe
            sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in kwargs.items()}
            with hub_errors("model.decoder_name_or_path", model.decoder_name_or_path):
                loaded: Any = task.load_encoder_decoder(
                    model.name_or_path, model.decoder_name_or_path, tokenizer, **sides, encoder_revision=model.revision
                )
        elif model.head is not None:
            with hub_errors("model.name_or_path", model.name_or_path):
                loaded = load_head(model, task, tokenizer)
        else:
            loaded = task.load_model(model.name_or_path, revision=model.revision, **kwargs)
    config = adapter_config(model, task, loaded.config)
    if config is None:
        return loaded
    with recipe_errors("model.prefix" if model.lora is None else "model.lora"):
        return get_peft_model(loaded, config)


def adapter_config(model: ModelSection, task: Task, model_config: PretrainedConfig) -> PeftConfig | None:
    """
    Build the PEFT config that `model.lora` or `model.prefix` describes, or `None` if neither is set.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        task ([`Task`]): The task, which determines the task type of the adapter.
        model_config (`PretrainedConfig`): The config of the model.

    Raises:
        RecipeError: If a field is invalid.
    """
    is_causal = isinstance(task, LanguageModeling) and task.objective == "causal"
    task_type = TaskType.CAUSAL_LM if is_causal else LORA_TASKS.get(type(task))
    sizes = _prefix_sizes(model_config) if model.prefix is not None else {}
    return build_adapter(model, task_type=task_type, **sizes)


def build_adapter(model: ModelSection, **defaults: Any) -> PeftConfig | None:
    """
    Build the PEFT config of `model.lora` or `model.prefix`, or return `None` if neither is set.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        defaults (`Any`): Values of fields that the section does not set.

    Raises:
        RecipeError: If a field is invalid.
    """
    for section, cls, values in (
        ("model.lora", LoraConfig, model.lora),
        ("model.prefix", PrefixTuningConfig, model.prefix),
    ):
        if values is not None:
            config: PeftConfig = build(section, cls, {**defaults, **values})
            return config
    return None


def _prefix_sizes(config: Any) -> dict[str, int]:
    """Sizes of prefixes that PEFT cannot read from the config of a model outside of `transformers` (ChatGLM2)."""
    if config.model_type not in LAYOUTS:
        return {}
    layout = layout_of(config)
    if layout.runner is None:
        return {}
    num_heads, head_size = layout.runner.key_value_heads(config)
    num_layers = int(getattr(config, layout.num_blocks))
    return {"num_layers": num_layers, "num_attention_heads": num_heads, "token_dim": num_heads * head_size}


def load_client_specs(
    recipe: Recipe, task: Task, args: TrainingArguments, client_ids: Sequence[str], tokenizer: Any = None
) -> dict[str, ClientSpec]:
    """
    Assign the models of `client_models` to the clients in turn.

    Args:
        recipe ([`Recipe`]): The recipe.
        task ([`Task`]): The task. Its labels become the `id2label` of the models.
        args (`TrainingArguments`): The training arguments of the server. An entry of `client_models` can override
        them.
        client_ids (`Sequence[str]`): The ids of the clients in order.
        tokenizer (`Any`, *optional*): The tokenizer or encoder of the server. Clients with an equal encoder share it.

    Returns:
        `dict[str, ClientSpec]`: The model, tokenizer and training arguments of each client.
    """
    sections = recipe.client_models
    loaded = [load_tokenizer(item.model, f"client_models[{index}]") for index, item in enumerate(sections)]
    tokenizers = [tokenizer if is_same_encoder(item, tokenizer) else item for item in loaded]
    specs = {}
    for number, client_id in enumerate(client_ids):
        index = number % len(sections)
        section, seed = sections[index], derived_seed(args.seed, "head", client_id)
        with recipe_errors(f"client_models[{index}].training"):
            client_args = dataclasses.replace(args, **section.training) if section.training else None
        specs[client_id] = ClientSpec(
            # The derived seed gives the same model each time it is loaded into memory.
            model=functools.partial(load_model, section.model, task, tokenizers[index], seed),
            processing_class=tokenizers[index],
            args=client_args,
        )
    return specs


@contextmanager
def without_head_warnings() -> Iterator[None]:
    """Hide the warnings about new heads, which a program that loads many models would repeat for each model."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _size_errors() -> Iterator[None]:
    """Explain the `RuntimeError` that transformers raises if the head in the checkpoint has a different size."""
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise RecipeError(
            "model: the size of the head in the checkpoint does not match the number of labels of the task. Use a"
            " checkpoint without a head, or initialize a new head with model.kwargs={ignore_mismatched_sizes: true}."
        ) from error
