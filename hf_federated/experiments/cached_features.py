"""The encoders and the heads that `model.head` of a recipe describes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.sections import DEFAULT_HEAD_HIDDEN, ModelSection
from hf_federated.features import (
    BlocksClassifier,
    CachedEncoder,
    FeatureClassifier,
    FeatureClassifierConfig,
    FrozenEncoder,
    FrozenLayers,
)
from hf_federated.tasks import Task


def load_encoder(model: ModelSection) -> CachedEncoder:
    """
    Build the encoder of a model with a head. It loads its weights when a feature is missing.

    Args:
        model ([`ModelSection`]): The section `model` of a recipe, with `head`.

    Raises:
        ValueError: If an argument is invalid.
    """
    kwargs = model.kwargs or {}
    if model.head == "blocks":
        return FrozenLayers(model.name_or_path, model.freeze or "", revision=model.revision, **kwargs)
    return FrozenEncoder(model.name_or_path, model.revision, pooling=model.pooling or "mean", **kwargs)


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
