"""Estimate the memory, the bytes and the time of a recipe from the configs of its models, without loading weights."""

from __future__ import annotations

from transformers import TrainingArguments

from hf_federated.experiments.cached_features import refuse_head
from hf_federated.experiments.estimate.federation_estimate import estimate_federation
from hf_federated.experiments.estimate.results import Estimate
from hf_federated.experiments.estimate.sizes import EstimateOptions, find_sizes
from hf_federated.experiments.estimate.split_estimate import estimate_split
from hf_federated.experiments.recipe.recipe import Recipe


def estimate_recipe(recipe: Recipe, options: EstimateOptions | None = None) -> Estimate:
    """
    Estimate the memory of each party, the bytes and round trips, and the computation of a recipe.

    The models are built on the meta device. The data are read only if they are local and a number of clients, of
    examples or of labels is neither given nor part of the recipe.

    Args:
        recipe ([`Recipe`]): The recipe.
        options ([`EstimateOptions`], *optional*): Given numbers of clients and examples.

    Raises:
        RecipeError: If a config or the data cannot be read, or a number is missing.
    """
    for model in (recipe.model, *(item.model for item in recipe.client_models)):
        refuse_head(model, "the estimate")
    options = EstimateOptions() if options is None else options
    args = training_arguments(recipe)
    sizes = find_sizes(recipe, options)
    if recipe.split is not None:
        return estimate_split(recipe, args, sizes, options)
    return estimate_federation(recipe, args, sizes, options)


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """
    Build the training arguments of a recipe for a machine without a GPU.

    Args:
        recipe ([`Recipe`]): The recipe.

    Raises:
        RecipeError: If an argument is invalid.
    """
    # On a CPU, the arguments refuse mixed precision in float16.
    args = recipe.training_arguments(use_cpu=True, report_to="none", fp16=False)
    args.fp16 = bool(recipe.training.get("fp16", False))
    return args
