"""Load the tokenized data and the models that a recipe names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, TaskType, get_peft_model
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments, set_seed

from hf_federated.clients import ClientSpec
from hf_federated.data import FederatedDataset
from hf_federated.experiments.data.files import check_local_path, hub_errors
from hf_federated.experiments.data.raw import RawData, load_raw_data
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


@dataclass(frozen=True)
class TokenizedData:
    """
    The tokenized data of a recipe.

    Args:
        raw ([`RawData`]): The raw examples.
        train ([`FederatedDataset`]): The tokenized training clients.
        test (`datasets.Dataset`): The tokenized test examples, sorted by length to minimize padding.
        test_clients ([`FederatedDataset`], *optional*): The tokenized test examples by client, if requested.
        metric_arguments (`dict`): The arguments of a `Trainer` that compute metrics from predictions.
        further_tests (`dict[str, datasets.Dataset]`): Additional tokenized test examples by split.
    """

    raw: RawData
    train: FederatedDataset
    test: Dataset
    test_clients: FederatedDataset | None
    metric_arguments: dict[str, Any]
    further_tests: dict[str, Dataset] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The task, with the names of its labels."""
        return self.raw.task


def load_tokenized_data(recipe: Recipe, tokenizer: Any, by_client: bool = False) -> TokenizedData:
    """
    Load the data of a recipe and tokenize it, separately for each client.

    Args:
        recipe ([`Recipe`]): The recipe.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        by_client (`bool`, *optional*, defaults to `False`): Whether to also return the test examples by client.

    Raises:
        RecipeError: If the data cannot be loaded, or the task cannot process an example.
    """
    needs_rows = recipe.task.cls.needs_rows
    # The metrics of sequence-to-sequence tasks use the raw targets, if these are available.
    uses_rows = needs_rows or issubclass(recipe.task.cls, Seq2Seq)
    unsupported = {
        "federation.evaluate_clients": by_client and needs_rows,
        "data.further_test_splits": bool(recipe.data.further_test_splits) and uses_rows,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise RecipeError(
                f"{name} is not supported for {recipe.task.name}, whose metrics need the raw examples. Remove the"
                " field."
            )
    raw = load_raw_data(recipe, by_client)
    task = raw.task
    with recipe_errors("data"):
        train = task.prepare(raw.train, tokenizer)
        test_clients = None
        if by_client and raw.test_clients is not None:
            clients = task.prepare(raw.test_clients, tokenizer)
            evaluated = {client_id: task.for_evaluation(client, tokenizer) for client_id, client in clients.items()}
            test_clients = FederatedDataset.from_dict(evaluated)
        further_tests = {
            split: task.for_evaluation(task.prepare(dataset, tokenizer), tokenizer)
            for split, dataset in raw.further_tests.items()
        }
    # Metrics by client use only the labels, and no raw examples.
    test, metric_arguments = tokenize_test(task, tokenizer, raw.test, uses_rows=test_clients is None)
    return TokenizedData(raw, train, test, test_clients, metric_arguments, further_tests)


def tokenize_test(
    task: Task, tokenizer: Any, examples: Dataset, uses_rows: bool = True
) -> tuple[Dataset, dict[str, Any]]:
    """
    Tokenize test examples, and sort them by length to minimize padding.

    Args:
        task ([`Task`]): The task, with the names of its labels.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        examples (`datasets.Dataset`): The raw examples.
        uses_rows (`bool`, *optional*, defaults to `True`): Whether metrics may use the raw examples.

    Returns:
        `tuple[datasets.Dataset, dict[str, Any]]`: The tokenized examples, and the arguments of a `Trainer` that
        compute metrics from predictions.

    Raises:
        RecipeError: If the task cannot process an example.
    """
    with recipe_errors("data"):
        test = task.for_evaluation(task.prepare(examples, tokenizer), tokenizer)
        order = np.argsort([len(ids) for ids in test["input_ids"]], kind="stable")
        one_to_one = len(test) == len(examples)
        test = test.select(order)
        # Metrics that use raw examples need them in the order of the features.
        rows = examples.select(order) if uses_rows and one_to_one else examples if uses_rows else None
        compute_metrics = task.build_compute_metrics(tokenizer, features=test, rows=rows)
    return test, {
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": task.preprocess_logits_for_metrics,
    }


def load_tokenizer(model: ModelSection, section: str = "model") -> Any:
    """
    Load the tokenizer of a model. It can run the code of a repository if `kwargs` of the model permit this.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        section (`str`, *optional*, defaults to `"model"`): The name of the section, for error messages.

    Raises:
        RecipeError: If the tokenizer cannot be loaded.
    """
    field = f"{section}.name_or_path"
    with recipe_errors(field), hub_errors(field, model.name_or_path):
        check_local_path(model.name_or_path, f"{field}: ")
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
    if model.lora is None and model.prefix is None:
        return None
    task_type = TaskType.CAUSAL_LM if _is_causal(task) else LORA_TASKS.get(type(task))
    section, cls = ("model.lora", LoraConfig) if model.lora is not None else ("model.prefix", PrefixTuningConfig)
    sizes = _prefix_sizes(model_config) if model.prefix is not None else {}
    values = {"task_type": task_type, **sizes, **(model.lora or model.prefix or {})}
    config: PeftConfig = build(section, cls, values)
    return config


def _prefix_sizes(config: Any) -> dict[str, int]:
    """Sizes of prefixes that PEFT cannot read from the config of a model outside of `transformers` (ChatGLM2)."""
    layout = LAYOUTS.get(config.model_type)
    if layout is None or layout.runner is None:
        return {}
    layout = layout_of(config)
    assert layout.runner is not None  # all generations of ChatGLM have a runner
    num_heads, head_size = layout.runner.key_value_heads(config)
    num_layers = int(getattr(config, layout.num_blocks))
    return {"num_layers": num_layers, "num_attention_heads": num_heads, "token_dim": num_heads * head_size}


def load_client_specs(
    recipe: Recipe, task: Task, args: TrainingArguments, client_ids: Sequence[str]
) -> dict[str, ClientSpec]:
    """
    Assign the models of `client_models` to the clients in turn.

    Args:
        recipe ([`Recipe`]): The recipe.
        task ([`Task`]): The task. Its labels become the `id2label` of the models.
        args (`TrainingArguments`): The training arguments of the server. An entry of `client_models` can override
        them.
        client_ids (`Sequence[str]`): The ids of the clients in order.

    Returns:
        `dict[str, ClientSpec]`: The model, tokenizer and training arguments of each client.
    """
    sections = recipe.client_models
    tokenizers = [
        load_tokenizer(ModelSection(item.name_or_path, item.revision, kwargs=item.kwargs), f"client_models[{index}]")
        for index, item in enumerate(sections)
    ]
    specs = {}
    for number, client_id in enumerate(client_ids):
        index = number % len(sections)
        section, tokenizer = sections[index], tokenizers[index]
        model = ModelSection(section.name_or_path, section.revision, kwargs=section.kwargs)
        with recipe_errors(f"client_models[{index}].training"):
            client_args = dataclasses.replace(args, **section.training) if section.training else None
        specs[client_id] = ClientSpec(
            # The derived seed gives the same model each time it is loaded into memory.
            model=functools.partial(load_model, model, task, tokenizer, derived_seed(args.seed, "head", client_id)),
            processing_class=tokenizer,
            args=client_args,
        )
    return specs


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


def _is_causal(task: Task) -> bool:
    return isinstance(task, LanguageModeling) and task.objective == "causal"
