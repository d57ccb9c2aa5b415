"""What a recipe names, loaded: the clients tokenized, the model with a head for the task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model
from transformers import AutoTokenizer, PreTrainedModel, TrainingArguments, set_seed

from hf_federated.clients import ClientSpec
from hf_federated.data import FederatedDataset
from hf_federated.experiments.raw_data import RawRows, load_rows
from hf_federated.experiments.recipe import Recipe, RecipeError, build, recipe_errors
from hf_federated.experiments.recipe_sections import ModelSection
from hf_federated.tasks import (
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


# PEFT has no name for masked language modelling; an adapter for it is a plain one.
LORA_TASKS: dict[type[Task], TaskType] = {
    TextClassification: TaskType.SEQ_CLS,
    SequenceTagging: TaskType.TOKEN_CLS,
    QuestionAnswering: TaskType.QUESTION_ANS,
    Seq2Seq: TaskType.SEQ_2_SEQ_LM,
    Summarization: TaskType.CAUSAL_LM,
    SuperGlueClassification: TaskType.SEQ_CLS,
    SuperGlueCloze: TaskType.CAUSAL_LM,
    SuperGlueSeq2Seq: TaskType.SEQ_2_SEQ_LM,
}


@dataclass(frozen=True)
class Inputs:
    """
    The clients of a recipe, tokenized.

    Args:
        raw ([`RawRows`]): What was tokenized.
        train ([`FederatedDataset`]): The clients that train.
        test (`datasets.Dataset`): The rows to test on, short ones first: batches of one length hardly need padding.
        test_clients ([`FederatedDataset`], *optional*): The same by client, if they were asked for.
        metrics (`dict`): Arguments of a `Trainer` that make metrics of predictions.
        further_tests (`dict[str, datasets.Dataset]`): By split, further rows to test the trained model on.
    """

    raw: RawRows
    train: FederatedDataset
    test: Dataset
    test_clients: FederatedDataset | None
    metrics: dict[str, Any]
    further_tests: dict[str, Dataset] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The task, with the names of its labels."""
        return self.raw.task


def load_inputs(recipe: Recipe, tokenizer: Any, by_client: bool = False) -> Inputs:
    """
    Loads the rows of a recipe and tokenizes them, each client's for itself.

    Args:
        recipe ([`Recipe`]): The recipe.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        by_client (`bool`, *optional*, defaults to `False`): Whether test rows are wanted by client too.

    Raises:
        RecipeError: If there are no such rows, or the task cannot read one.
    """
    if by_client and recipe.task.cls.needs_rows:
        raise RecipeError(f"federation.evaluate_clients is not there for {recipe.task.name}, whose metrics read rows.")
    # Of sequence to sequence the rows' own targets count, where they are given.
    if recipe.data.further_test_splits and (recipe.task.cls.needs_rows or issubclass(recipe.task.cls, Seq2Seq)):
        raise RecipeError(f"data.further_test_splits is not there for {recipe.task.name}, whose metrics read rows.")
    raw = load_rows(recipe, by_client)
    task = raw.task
    with recipe_errors("data"):
        train = task.prepare(raw.train, tokenizer)
        test = task.for_evaluation(task.prepare(raw.test, tokenizer), tokenizer)
        test_clients = None
        if by_client and raw.test_clients is not None:
            clients = task.prepare(raw.test_clients, tokenizer)
            fixed = {client_id: task.for_evaluation(rows, tokenizer) for client_id, rows in clients.items()}
            test_clients = FederatedDataset.from_dict(fixed)
        further = {
            split: task.for_evaluation(task.prepare(rows, tokenizer), tokenizer)
            for split, rows in raw.further_tests.items()
        }
    order = np.argsort([len(ids) for ids in test["input_ids"]], kind="stable")
    one_to_one = len(test) == len(raw.test)
    test = test.select(order)
    # Metrics that read rows take them in the order of the features; of clients' own rows they see the labels alone.
    rows = None if test_clients is not None else raw.test.select(order) if one_to_one else raw.test
    with recipe_errors("data"):
        compute_metrics = task.build_compute_metrics(tokenizer, features=test, rows=rows)
    metrics = {
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": task.preprocess_logits_for_metrics,
    }
    return Inputs(raw, train, test, test_clients, metrics, further)


def load_tokenizer(model: ModelSection) -> Any:
    """The tokenizer that lies with the model."""
    with recipe_errors("model.name_or_path"):
        return AutoTokenizer.from_pretrained(model.name_or_path, revision=model.revision)


def load_model(model: ModelSection, task: Task, tokenizer: Any, seed: int) -> PreTrainedModel:
    """
    The model with a head for the task, and with an adapter if the recipe asks for one.

    Args:
        model ([`ModelSection`]): The recipe's section.
        task ([`Task`]): The task; its labels become the model's `id2label`.
        tokenizer (`PreTrainedTokenizerFast`): The model's.
        seed (`int`): Seed of what the checkpoint does not hold (the head, the adapter).
    """
    set_seed(seed)
    changes = model.kwargs or {}
    with recipe_errors("model"), _size_errors():
        if model.decoder_name_or_path is not None:
            assert isinstance(task, (Seq2Seq, SuperGlueSeq2Seq))  # Recipe has checked
            sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in changes.items()}
            loaded: Any = task.load_encoder_decoder(
                model.name_or_path, model.decoder_name_or_path, tokenizer, **sides, encoder_revision=model.revision
            )
        else:
            loaded = task.load_model(model.name_or_path, revision=model.revision, **changes)
    if model.lora is None and model.prefix is None:
        return loaded
    kind = TaskType.CAUSAL_LM if _is_causal(task) else LORA_TASKS.get(type(task))
    section, cls = ("model.lora", LoraConfig) if model.lora is not None else ("model.prefix", PrefixTuningConfig)
    config = build(section, cls, {"task_type": kind, **(model.lora or model.prefix or {})})
    with recipe_errors(section):
        return get_peft_model(loaded, config)


def load_client_specs(
    recipe: Recipe, task: Task, args: TrainingArguments, client_ids: Sequence[str]
) -> dict[str, ClientSpec]:
    """
    The recipe's models for clients, dealt out to them in turn.

    Args:
        recipe ([`Recipe`]): The recipe.
        task ([`Task`]): The task; its labels become the models' `id2label`.
        args (`TrainingArguments`): The server's; a client's are these but for what its model's section says.
        client_ids (`Sequence[str]`): The clients, in order.
    """
    sections = recipe.client_models
    tokenizers = [load_tokenizer(ModelSection(item.name_or_path, item.revision)) for item in sections]
    specs = {}
    for place, client_id in enumerate(client_ids):
        section, tokenizer = sections[place % len(sections)], tokenizers[place % len(sections)]
        model = ModelSection(section.name_or_path, section.revision, kwargs=section.kwargs)
        with recipe_errors(f"client_models[{place % len(sections)}].training"):
            own = dataclasses.replace(args, **section.training) if section.training else None
        specs[client_id] = ClientSpec(
            # Whenever it is needed in memory, the same.
            model=functools.partial(load_model, model, task, tokenizer, derived_seed(args.seed, "head", client_id)),
            processing_class=tokenizer,
            args=own,
        )
    return specs


@contextmanager
def _size_errors() -> Iterator[None]:
    """Says what to do about a head of another size, which transformers lists in its log and raises as this."""
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise RecipeError(
            "model: the head in the checkpoint is not of the size that the task's labels need. Start from the model"
            " without its head, or draw a new one with model.kwargs={ignore_mismatched_sizes: true}."
        ) from error


def _is_causal(task: Task) -> bool:
    return isinstance(task, LanguageModeling) and task.objective == "causal"
