"""Clients of equal size that differ in their labels (FedNLP, Lin et al. 2022, section 3.2).

`PerClassDirichletPartitioner` implements the other common scheme, which splits each class across the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset
from transformers.utils import logging

from ..labels import OUTSIDE, read_labels_of_splits
from .base import (
    Partition,
    SplitsPartitioner,
    check_enough_rows,
    check_settings,
    check_splits,
    numbered_client_ids,
)
from .dirichlet import assign_rows, draw_shares
from .quantity import quantity_sizes


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class LabelDirichletPartitioner(SplitsPartitioner):
    """
    Partitioner that gives every client the same number of examples, but different label shares.

    The labels of client j follow `q_j ~ Dir(alpha * p)`, where p are the label shares of the whole dataset. The
    examples of a client are drawn by `q_j` without replacement. When a label runs out, *dynamic re-assignment* draws
    from the remaining labels, in proportion to the remaining examples of each. Therefore no example is lost and no
    client is dropped, however small `alpha` is. The last clients get the examples that remain.

    A client has `num_rows // num_clients` examples, and the last client also gets the remainder. With `quantity_beta`,
    the sizes differ as well. The examples of a client stay in the order of the dataset. The clients are named `"0"`,
    `"1"`, …

    All splits use the same `q_j`. The first split determines p. Labels are matched by their names. A label that is
    absent from the first split has no share in `q_j`; its examples are assigned by re-assignment. In the splits after
    the first, clients may have fewer than `min_size` examples, but every client has at least one.

    Args:
        num_clients (`int`):
            Number of clients, at least 1.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels: a `ClassLabel`, strings, integers, booleans, dates, or sequences of tags. A
            sequence of tags counts as its most frequent entity type (see
            [`~hf_federated.data.labels.read_labels`]). The column may also hold the task of an example.
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration (α in the paper). Towards 0, each client has a single label. Above 100, all clients have the
            label shares of the whole dataset.
        quantity_beta (`float`, *optional*):
            If set, client sizes differ too. They are the sizes of [`QuantityDirichletPartitioner`] with this `beta`
            and the same `num_clients`, `min_size` and `seed`.
        min_size (`int`, *optional*, defaults to `1`):
            Minimum number of examples per client in the first split.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global random generators are neither used nor changed.
        balance_entities (`bool`, *optional*, defaults to `False`):
            Whether all clients get the same share of examples with entities, for a column of tags. Only the entity
            types then follow `q_j`. Otherwise, with a small `alpha`, most clients get examples without entities only,
            and a model that is averaged over such clients predicts no entity.

    Raises:
        `ValueError`: If there are fewer than `num_clients * min_size` examples, if the label column does not exist, if
            an example has no label, or if `balance_entities` is set and the column has no tags with names.
        `TypeError`: If the column type cannot hold labels.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, LabelDirichletPartitioner
    >>> dataset = Dataset.from_dict({"label": ["bad", "good"] * 50})
    >>> partitioner = LabelDirichletPartitioner(num_clients=3, alpha=0.001, seed=0)
    >>> clients = FederatedDataset.from_dataset(dataset, partitioner)
    >>> clients.num_rows
    {'0': 33, '1': 33, '2': 34}
    >>> sorted(set(clients["0"]["label"]))  # a small alpha gives a single label per client
    ['good']

    ```
    """

    num_clients: int
    label_column: str = "label"
    alpha: float = 1.0
    quantity_beta: float | None = None
    min_size: int = 1
    seed: int = 0
    balance_entities: bool = False

    def __post_init__(self) -> None:
        check_settings(self)

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        labels, names = read_labels_of_splits(splits, self.label_column)
        outside = self._outside(splits, names)
        partitions = self.partition_labels(labels, len(names), outside if self.balance_entities else None)
        if outside is not None and not self.balance_entities:
            first = next(iter(splits))
            _warn_of_clients_without_entities(partitions[first], labels[first] != outside)
        return partitions

    def settings(self) -> dict[str, Any]:
        # The settings of a partition without the option are those of earlier versions.
        return {name: value for name, value in super().settings().items() if name != "balance_entities" or value}

    def _outside(self, splits: Mapping[str, Dataset], names: list[str]) -> int | None:
        """The number of the label of examples without entities, or `None` if the column has no such label."""
        feature = next(iter(splits.values())).features[self.label_column]
        tags = getattr(feature, "feature", None)
        if not (isinstance(tags, ClassLabel) or getattr(tags, "dtype", "") in ("string", "large_string")):
            if not self.balance_entities:
                return None
            raise ValueError(
                f"LabelDirichletPartitioner: balance_entities is set, but the column {self.label_column!r} is"
                f" {feature} and not a list of tags with names. Set label_column to the column of tags, or cast the"
                " tags to ClassLabel."
            )
        return names.index(OUTSIDE) if OUTSIDE in names else None

    def partition_labels(
        self, labels: Mapping[str, np.ndarray], num_labels: int, outside: int | None = None
    ) -> dict[str, Partition]:
        """
        Partition splits by labels that are not in a column.

        Args:
            labels (`Mapping[str, np.ndarray]`): Split name to the label of each example, as integers from 0.
            num_labels (`int`): Number of labels over all splits.
            outside (`int`, *optional*): A label of which all clients get the same share, such as that of examples
                without entities. The other labels follow `q_j`.

        Returns:
            `dict[str, Partition]`: Split name to its partition.
        """
        sizes: dict[str, np.ndarray] = {}
        for name, codes in labels.items():
            min_size = 1 if sizes else self.min_size
            check_enough_rows(self, len(codes), self.num_clients, min_size, name)
            sizes[name] = self._sizes(len(codes), min_size)
        generator = np.random.default_rng(self.seed)
        first = np.bincount(next(iter(labels.values())), minlength=num_labels)
        if outside is not None:
            first[outside] = 0
            if not first.any():
                raise ValueError("LabelDirichletPartitioner: balance_entities is set, but no example has an entity.")
        shares = draw_shares(generator, self.alpha, first / first.sum(), self.num_clients)
        partitions = {}
        for name, codes in labels.items():
            available = np.bincount(codes, minlength=num_labels)
            # Skip labels that have no share and no rows. Drawing them would only use up random numbers, and the first
            # split would get a different partition when a later split has more labels.
            counts, left = np.zeros(shares.shape, dtype=np.int64), sizes[name]
            if outside is not None:
                counts[:, outside] = equal_shares(int(available[outside]), left)
                left, available[outside] = left - counts[:, outside], 0
            drawn = np.flatnonzero(shares.any(axis=0) | (available > 0))
            counts[:, drawn] += draw_counts(generator, shares[:, drawn], left, available[drawn])
            owners = assign_rows(generator, codes, counts)
            partitions[name] = Partition.from_owners(numbered_client_ids(self.num_clients), owners)
        return partitions

    def _sizes(self, num_rows: int, min_size: int) -> np.ndarray:
        if self.quantity_beta is not None:
            return quantity_sizes(num_rows, self.num_clients, self.quantity_beta, min_size, self.seed)
        sizes = np.full(self.num_clients, num_rows // self.num_clients, dtype=np.int64)
        sizes[-1] += num_rows % self.num_clients
        return sizes


def _warn_of_clients_without_entities(partition: Partition, has_entity: np.ndarray) -> None:
    """Log a warning if no example of a client has an entity."""
    num_entities = np.add.reduceat(has_entity[partition.indices].astype(np.int64), partition.offsets[:-1])
    without = [partition.client_ids[client] for client in np.flatnonzero(num_entities == 0)]
    if without:
        logger.warning(
            f"{len(without)} of {len(partition)} clients have no example with an entity (the first is"
            f" {without[0]!r}). Such clients teach a model to predict no entity. Set balance_entities=True to give all"
            " clients the same share of examples with entities."
        )


def equal_shares(num_rows: int, sizes: np.ndarray) -> np.ndarray:
    """Divide rows over clients in proportion to their sizes, up to rounding. No client gets more than its size."""
    return np.diff(np.cumsum(sizes) * num_rows // sizes.sum(), prepend=0)


def draw_counts(
    generator: np.random.Generator, shares: np.ndarray, sizes: np.ndarray, available: np.ndarray
) -> np.ndarray:
    """
    Draw the number of rows of each label for each client, one client after another, with dynamic re-assignment.

    Args:
        generator (`np.random.Generator`): The random generator to draw from.
        shares (`np.ndarray` of shape `(num_clients, num_labels)`): The label shares q_j of each client.
        sizes (`np.ndarray` of shape `(num_clients,)`, integer):
            Number of rows of each client. The sum is at most the sum of `available`.
        available (`np.ndarray` of shape `(num_labels,)`, integer): Number of rows of each label.

    Returns:
        `np.ndarray` of shape `(num_clients, num_labels)`, `int64`: Number of rows of each label for each client. Row j
        sums to `sizes[j]`. A column sums to at most the value in `available`.
    """
    remaining = available.astype(np.int64)
    counts = np.zeros(shares.shape, dtype=np.int64)
    for client, size in enumerate(sizes.tolist()):
        drawn = np.minimum(generator.multinomial(size, shares[client]), remaining)
        remaining -= drawn
        missing = size - int(drawn.sum())
        if missing:
            filled = generator.multivariate_hypergeometric(remaining, missing)
            remaining -= filled
            drawn += filled
        counts[client] = drawn
    return counts
