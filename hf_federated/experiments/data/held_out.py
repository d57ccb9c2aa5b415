"""Hold out test or validation examples of a federation, and limit the number of its clients and examples.

[`hold_out_examples`] takes a share of the examples of each client, and [`hold_out_clients`] takes whole clients. Both
draw with `data.seed`. The rows are not copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from datasets import Dataset, LargeList, List

from hf_federated.data import FederatedDataset, Partition
from hf_federated.data.client_datasets import PartitionedDataset
from hf_federated.data.column_values import rank_values, read_column
from hf_federated.data.labels import read_labels
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.sections import DataSection
from hf_federated.utils.random import derived_seed


# For each field that holds out a share of the examples, the fields that do not need several examples of a client.
OTHER_FIELDS = {
    "test_examples": "data.test_path, data.test_split or data.test_clients",
    "validation_examples": "data.validation_split",
}


def hold_out_examples(
    clients: FederatedDataset,
    share: float,
    seed: int,
    label_column: str | None = None,
    field: str = "test_examples",
) -> tuple[FederatedDataset, FederatedDataset]:
    """
    Split the examples of each client into training and test examples, or into training and validation examples.

    A client with `n` examples gives `share * n` test examples, rounded up, and keeps at least one training example. A
    client with one example gives none. The test examples have the label shares of the client, up to rounding. They
    depend on the client and the seed, not on the other clients.

    Args:
        clients ([`FederatedDataset`]): The clients.
        share (`float`): Share of the examples of each client, above 0 and below 1.
        seed (`int`): Seed of the draw.
        label_column (`str`, *optional*): The column whose values are the strata.
        field (`str`, *optional*, defaults to `"test_examples"`): The field of `data` that sets the share. Two fields
            draw independently with one seed.

    Returns:
        `tuple[FederatedDataset, FederatedDataset]`: The clients with their training examples, and the clients with
        their test examples. Clients without test examples are missing in the second one.

    Raises:
        RecipeError: If no client has two examples.
    """
    source, indices = rows_of(clients)
    strata = _strata(source, label_column)[indices]
    chosen, begin = [], 0
    for client_id, size in clients.num_rows.items():
        # Rounding first avoids the next integer for products such as 0.07 * 100 = 7.000000000000001.
        num_test = min(math.ceil(round(share * size, 9)), size - 1)
        generator = np.random.default_rng(derived_seed(seed, field, client_id))
        chosen.append(begin + draw_stratified(strata[begin : begin + size], num_test, generator))
        begin += size
    is_test = np.zeros(len(indices), dtype=bool)
    is_test[np.concatenate(chosen)] = True
    if not is_test.any():
        raise RecipeError(
            f"data.{field} holds out examples of clients with at least 2 examples, but each of the {len(clients)}"
            f" clients has one example. Set {OTHER_FIELDS[field]}."
        )
    return keep_rows(clients, source, indices, ~is_test), keep_rows(clients, source, indices, is_test)


def hold_out_clients(clients: FederatedDataset, data: DataSection) -> tuple[FederatedDataset, FederatedDataset]:
    """
    Split the clients into training clients and held-out test clients.

    `data.seed` determines one permutation of all clients. The first clients of the permutation are held out. With
    `max_clients`, the next clients of the permutation are the training clients.

    Raises:
        RecipeError: If no client remains for training.
    """
    held_out = data.test_clients or 0
    num_test = max(1, round(held_out * len(clients))) if isinstance(held_out, float) else held_out
    if num_test >= len(clients):
        raise RecipeError(
            f"data.test_clients holds out {num_test} of {len(clients)} clients. At least one client must remain for"
            " training."
        )
    order = _shuffled(clients, data)
    return _select_clients(clients, order[num_test:][: data.max_clients]), _select_clients(clients, order[:num_test])


def limit_clients(clients: FederatedDataset, data: DataSection) -> FederatedDataset:
    """Sample at most `max_clients` clients with `data.seed` and keep the order of the dataset."""
    if data.max_clients is None:
        return clients
    return _select_clients(clients, _shuffled(clients, data)[: data.max_clients])


def limit_examples(
    clients: FederatedDataset, maximum: int | None, seed: int, keep_clients: bool = False
) -> FederatedDataset:
    """
    Sample at most `maximum` examples of all clients together, the same share of each client up to rounding.

    Args:
        clients ([`FederatedDataset`]): The clients.
        maximum (`int`, *optional*): Maximum number of examples. `None` keeps all examples.
        seed (`int`): Seed of the draw.
        keep_clients (`bool`, *optional*, defaults to `False`): Whether each client keeps at least one example.
            Otherwise, clients without a sampled example are left out.

    Raises:
        RecipeError: If `keep_clients` is set and there are more clients than `maximum`.
    """
    sizes = np.array(list(clients.num_rows.values()))
    num_rows = int(sizes.sum())
    if maximum is None or maximum >= num_rows:
        return clients
    generator = np.random.default_rng(seed)
    strata = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.zeros(num_rows, dtype=bool)
    if keep_clients:
        if maximum < len(sizes):
            raise RecipeError(
                f"data.max_train_rows is {maximum}, but there are {len(sizes)} clients, and each client keeps at least"
                f" one example. Set it to at least {len(sizes)}, or set data.max_clients."
            )
        kept[np.cumsum(sizes) - sizes + generator.integers(sizes)] = True
        maximum -= len(sizes)
    others = np.flatnonzero(~kept)
    kept[others[draw_stratified(strata[others], maximum, generator)]] = True
    return keep_rows(clients, *rows_of(clients), kept)


def draw_stratified(strata: np.ndarray, num_drawn: int, generator: np.random.Generator) -> np.ndarray:
    """
    Draw positions without replacement. The number from each stratum is its share of `num_drawn`, rounded up or down.

    This is systematic sampling: shuffle the positions, sort them by stratum, and take equally spaced positions after a
    random start. Each position has the same probability. [`datasets.Dataset.train_test_split`] stratifies only if each
    label has two examples and each part has room for every label, which clients with few examples do not fulfill.

    Args:
        strata (`np.ndarray` of shape `(num_positions,)`, `int64`): The stratum of each position, at least 0.
        num_drawn (`int`): Number of positions to draw.
        generator (`np.random.Generator`): The random generator to draw from.

    Returns:
        `np.ndarray` of shape `(num_drawn,)`, `int64`: The drawn positions, sorted.
    """
    if num_drawn == 0:
        return np.empty(0, dtype=np.int64)
    shuffled = generator.permutation(len(strata))
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]
    points = np.floor((np.arange(num_drawn) + generator.random()) * len(order) / num_drawn).astype(np.int64)
    return np.sort(order[np.minimum(points, len(order) - 1)])


def sample_examples(dataset: Any, maximum: int | None, seed: int) -> Any:
    """Sample at most `maximum` examples of a dataset or of all clients, and keep their order."""
    if isinstance(dataset, FederatedDataset):
        return limit_examples(dataset, maximum, seed)
    if maximum is None or maximum >= len(dataset):
        return dataset
    return dataset.select(np.sort(np.random.default_rng(seed).choice(len(dataset), maximum, replace=False)))


def _strata(dataset: Dataset, label_column: str | None) -> np.ndarray:
    """The label of each row as a number from 0. The label of a list of tags is its most frequent entity type."""
    if label_column is None:
        return np.zeros(len(dataset), dtype=np.int64)
    if isinstance(dataset.features[label_column], (List, LargeList)):
        return read_labels(dataset, label_column)[0]
    codes, _ = rank_values(*read_column(dataset, label_column))
    return codes + 1  # the code of a missing label is -1


def rows_of(clients: FederatedDataset) -> tuple[Dataset, np.ndarray]:
    """A dataset with the rows of all clients, and the row numbers of the clients one after the other."""
    if clients.source is not None and clients.partition is not None:
        return clients.source, clients.partition.indices
    pooled = clients.to_dataset()
    return pooled, np.arange(len(pooled))


def keep_rows(clients: FederatedDataset, source: Dataset, indices: np.ndarray, kept: np.ndarray) -> FederatedDataset:
    """Keep the rows for which `kept` is true, in the order of [`rows_of`], and the clients that have such rows."""
    owners = np.repeat(np.arange(len(clients)), list(clients.num_rows.values()))[kept]
    sizes = np.bincount(owners, minlength=len(clients))
    client_ids = [client_id for client_id, size in zip(clients, sizes, strict=True) if size]
    partition = Partition(client_ids, indices[kept], np.concatenate([[0], np.cumsum(sizes[sizes > 0])]))
    return FederatedDataset(PartitionedDataset(source, partition), clients.partitioning, clients.origin)


def _shuffled(clients: FederatedDataset, data: DataSection) -> list[str]:
    ids = list(clients)
    return [ids[position] for position in np.random.default_rng(data.seed).permutation(len(ids))]


def _select_clients(clients: FederatedDataset, chosen: list[str]) -> FederatedDataset:
    """Select clients in the order of the dataset, so that results do not depend on the order of sampling."""
    return clients.select_clients([client_id for client_id in clients if client_id in set(chosen)])
