"""The validation examples of a recipe, on which settings are chosen.

A run with `data.evaluate_on: validation` is evaluated on these examples and uses no test example. Validation examples
are `data.validation_split`, or the share `data.validation_examples` of the training examples of each client. The share
is drawn with `data.seed` after the test examples are held out, and no run trains on it. A run on validation examples
and a run on test examples therefore train on the same examples.
"""

from __future__ import annotations

import copy
import dataclasses

from hf_federated.data import FederatedDataset
from hf_federated.experiments.data.held_out import hold_out_examples
from hf_federated.experiments.data.label_encoding import label_column
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import recipe_errors


def without_test_splits(recipe: Recipe) -> Recipe:
    """
    Return the recipe of a run on validation examples without its test splits, so that they are not loaded.

    Args:
        recipe ([`Recipe`]): The recipe. A recipe that is evaluated on test examples is returned unchanged.
    """
    data = recipe.data
    if data.evaluate_on == "test":
        return recipe
    # `dataclasses.replace` would reject a split in addition to `test_examples`, which are still held out.
    changed = copy.copy(data)
    changed.test_path, changed.test_split, changed.further_test_splits = None, data.validation_split, []
    changed.validation_split = None
    return dataclasses.replace(recipe, data=changed)


def hold_out_validation(clients: FederatedDataset, recipe: Recipe) -> tuple[FederatedDataset, FederatedDataset]:
    """
    Split the training examples of each client into training and validation examples.

    Args:
        clients ([`FederatedDataset`]): The clients, without test examples.
        recipe ([`Recipe`]): The recipe, with `data.validation_examples`.

    Returns:
        `tuple[FederatedDataset, FederatedDataset]`: The clients with their training examples, and the clients with
        their validation examples.

    Raises:
        RecipeError: If no client has two examples.
    """
    data, column = recipe.data, label_column(recipe.task)
    with recipe_errors("data.validation_examples"):
        return hold_out_examples(
            clients,
            data.validation_examples or 0.0,
            data.seed,
            column if column in clients.column_names else None,
            "validation_examples",
        )
