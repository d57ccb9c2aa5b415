"""Numbers of examples of the clients that `partition.json` lists, as the limit of what clients may announce."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hf_federated.data.storage.partition_file import PARTITION_FILE, PartitionFile
from hf_federated.experiments.data.splits import task_without_label_names
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import recipe_errors
from hf_federated.trainer.announcement_limits import FIELD


def listed_counts(recipe: Recipe, client_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """
    Return `max_examples_per_client` for a recipe whose `data.path` is a partitioned folder on this machine.

    Args:
        recipe ([`Recipe`]): The recipe.
        client_ids (`Collection[str]`): Ids of clients of the run.

    Returns:
        `dict`: The field of [`FederatedConfig`] with the number of training examples of each client. Empty if the
        recipe sets the field, if the folder does not list all the clients, or if the task makes several encoded
        examples of one raw example.

    Raises:
        RecipeError: If `partition.json` cannot be read.
    """
    folder, split = Path(recipe.data.path), recipe.data.train_split
    if recipe.partition is not None or recipe.federation.get(FIELD) is not None:
        return {}
    if not (folder / PARTITION_FILE).is_file() or not task_without_label_names(recipe).one_feature_per_example:
        return {}
    with recipe_errors("data.path"):
        stored = PartitionFile.read(folder).clients_of(split)
    counts = {client.client_id: client.splits[split].num_rows for client in stored}
    return {FIELD: counts} if counts.keys() >= set(client_ids) else {}
