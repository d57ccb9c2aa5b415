"""The encoders and the heads that `model.head` of a recipe describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from hf_federated.data import FederatedDataset
from hf_federated.experiments.recipe.schema import RecipeError, recipe_errors
from hf_federated.experiments.recipe.sections import DEFAULT_HEAD_HIDDEN, TFIDF, ModelSection
from hf_federated.features import (
    BlocksClassifier,
    CachedEncoder,
    FeatureClassifier,
    FeatureClassifierConfig,
    FrozenEncoder,
    FrozenLayers,
    TfidfEncoder,
)
from hf_federated.features.tfidf import VOCABULARY_FILE
from hf_federated.tasks import Task, TextClassification


def load_encoder(model: ModelSection) -> CachedEncoder:
    """
    Build the encoder of a model with a head. It loads its weights when a feature is missing.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe, with `head`.

    Raises:
        ValueError: If an argument is invalid.
    """
    kwargs = model.kwargs or {}
    if model.name_or_path == TFIDF:
        return TfidfEncoder(**kwargs)
    if (Path(model.name_or_path) / VOCABULARY_FILE).is_file():
        return TfidfEncoder.from_pretrained(model.name_or_path)
    if model.head == "blocks":
        return FrozenLayers(model.name_or_path, model.freeze or "", revision=model.revision, **kwargs)
    return FrozenEncoder(model.name_or_path, model.revision, pooling=model.pooling or "mean", **kwargs)


def is_same_encoder(first: Any, second: Any) -> bool:
    """Whether two objects are encoders with the same arguments, so that clients can share one of them."""
    if not isinstance(first, CachedEncoder) or type(first) is not type(second):
        return False
    return first.to_dict() == second.to_dict()


def load_head(model: ModelSection, task: Task, encoder: CachedEncoder) -> PreTrainedModel:
    """
    Build the head of a model. The global random number generator initializes its weights.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe, with `head`.
        task ([`Task`]): The task. Its labels become the labels of the head.
        encoder ([`CachedEncoder`]): The encoder from [`load_encoder`].

    Raises:
        ValueError: If the blocks of the model cannot be separated.
    """
    if model.head == "blocks":
        kwargs: dict[str, Any] = model.kwargs or {}
        whole = task.load_model(model.name_or_path, revision=model.revision, **kwargs)
        return BlocksClassifier.from_model(whole, model.freeze or "")
    hidden_sizes = [model.head_hidden or DEFAULT_HEAD_HIDDEN] if model.head == "mlp" else []
    return FeatureClassifier(
        FeatureClassifierConfig(encoder.feature_size, hidden_sizes=hidden_sizes, **task.model_kwargs)
    )


def fit_encoder(encoder: Any, task: Task, public: Dataset | None, clients: FederatedDataset | None = None) -> None:
    """
    Fit an encoder that needs texts: on the public examples, or in a simulation on the examples of all clients.

    Args:
        encoder (`Any`): The tokenizer or the encoder of a model. Only a [`TfidfEncoder`] is fitted.
        task ([`Task`]): The task, which names the columns with the texts.
        public (`datasets.Dataset`, *optional*): The raw public examples.
        clients ([`FederatedDataset`], *optional*): The raw examples of all clients. Clients on other machines have no
            access to them.

    Raises:
        RecipeError: If there are no examples to fit on.
    """
    if not isinstance(encoder, TfidfEncoder) or encoder.is_fitted:
        return
    assert isinstance(task, TextClassification)  # checked by Recipe
    examples = public if public is not None or clients is None else clients.to_dataset()
    if examples is None:
        raise RecipeError(
            f"model.name_or_path is {TFIDF}, which parties on different machines must fit on the same texts. Set"
            " public.path, or set name_or_path to a folder with a fitted TfidfEncoder."
        )
    columns = [examples[column][:] for column in task.text_columns]
    with recipe_errors("model.kwargs"):
        encoder.fit([" ".join(row) for row in zip(*columns, strict=True)])


def refuse_head(model: ModelSection, command: str) -> None:
    """
    Raise an error if a model has a head on cached features.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe.
        command (`str`): What does not support heads, for the message.

    Raises:
        RecipeError: If `model.head` is set.
    """
    if model.head is not None:
        raise RecipeError(f"model.head is {model.head}, but {command} does not support cached features. Remove it.")
