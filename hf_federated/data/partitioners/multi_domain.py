"""Clients that differ in domain, in labels, in both or in neither (AdaFD, Xiao et al. 2025, section IV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from ..labels import read_labels_of_splits
from .base import (
    Partition,
    SplitsPartitioner,
    check_settings,
    check_splits,
    numbered_client_ids,
)
from .dirichlet import assign_rows, draw_shares


@dataclass(frozen=True)
class MultiDomainPartitioner(SplitsPartitioner):
    """
    Partitioner for four partitions that differ only in the diversity of their clients.

    Use it to measure whether different domains or different labels of the clients cost the accuracy.

    | `diverse_domains` | `diverse_labels` | the examples of a client are drawn | name in the paper |
    |---|---|---|---|
    | no | no | from all domains | IID |
    | yes | no | from one domain | multi-domain |
    | no | yes | from all domains by `q_j ~ Dir(alpha * p)` | label diverse |
    | yes | yes | from one domain by `q_j ~ Dir(alpha * p)` | non-IID |

    With the same other arguments, all four partitions have the same number of clients, `clients_per_domain` per
    domain, and every client has the same number of examples in all four partitions. The two label-diverse partitions
    have the same `q_j`. The number of examples per client is the largest number that the fourth partition allows: for
    each label, the clients of a domain need at most the examples that the domain has. **Examples are therefore
    dropped**, and a smaller `alpha` drops more of them. For a partition of all examples with domain and label
    diversity, use `NestedPartitioner(NaturalPartitioner(domain), LabelDirichletPartitioner(...))` with several clients
    per domain.

    p are the label shares of the whole dataset, restricted to the labels of the domain. Without diverse labels, a
    client has the label shares of the examples that it draws from. With diverse domains, these are the label shares of
    its domain. Clients are named after their domain (`"baby"`, or `"baby/0"`, `"baby/1"`, … with several clients per
    domain). Without diverse domains, they are named `"0"`, `"1"`, …

    With several splits, the first split determines the domains and the `q_j`. Each split has a separate number of
    examples per client. A label that a domain lacks in a split has no share in that split. Examples of a domain that
    is absent from the first split are dropped.

    Args:
        domain_column (`str`):
            The column with the domain of an example. It can have any type that a label column can have.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels, as for [`LabelDirichletPartitioner`].
        diverse_domains (`bool`, *optional*, defaults to `True`):
            Whether all examples of a client are from one domain.
        diverse_labels (`bool`, *optional*, defaults to `True`):
            Whether clients differ in their label shares.
        clients_per_domain (`int`, *optional*, defaults to `1`):
            Number of clients per domain. The paper uses one.
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration of the labels (α in the paper).
        min_size (`int`, *optional*, defaults to `1`):
            Minimum number of examples per client in the first split.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global random generators are neither used nor changed.

    Raises:
        `ValueError`: If clients would have fewer than `min_size` examples, if a column does not exist, or if an
            example has no domain or no label.
        `TypeError`: If the column type cannot hold labels.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, MultiDomainPartitioner
    >>> reviews = Dataset.from_dict({"domain": ["baby", "sport"] * 100, "label": [0, 0, 1, 1] * 50})
    >>> both = MultiDomainPartitioner("domain", alpha=1.0)
    >>> neither = MultiDomainPartitioner("domain", diverse_domains=False, diverse_labels=False, alpha=1.0)
    >>> clients, iid = (FederatedDataset.from_dataset(reviews, partitioner) for partitioner in (both, neither))
    >>> clients.client_ids, iid.client_ids
    (['baby', 'sport'], ['0', '1'])
    >>> list(clients.num_rows.values()) == list(iid.num_rows.values())
    True

    ```
    """

    domain_column: str
    label_column: str = "label"
    diverse_domains: bool = True
    diverse_labels: bool = True
    clients_per_domain: int = 1
    alpha: float = 1.0
    min_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        domains, domain_names = read_labels_of_splits(splits, self.domain_column)
        labels, label_names = read_labels_of_splits(splits, self.label_column)
        first = next(iter(splits))
        if len(domains[first]) == 0:
            raise ValueError("MultiDomainPartitioner: the first split has no rows. Pass a dataset with rows.")
        occurring = np.flatnonzero(np.bincount(domains[first]))
        position_of_domain = np.full(len(domain_names), -1, dtype=np.int64)
        position_of_domain[occurring] = np.arange(len(occurring))
        names = [domain_names[domain] for domain in occurring]

        generator = np.random.default_rng(self.seed)
        shares: np.ndarray | None = None
        partitions = {}
        for split in splits:
            domain = position_of_domain[domains[split]]
            known = np.flatnonzero(domain >= 0)
            domain, label = domain[known], labels[split][known]
            table = np.bincount(domain * len(label_names) + label, minlength=len(names) * len(label_names))
            table = table.reshape(len(names), len(label_names))
            if shares is None:
                shares = self._draw(generator, table)
            counts = self._counts(shares, table, names, label_names, "" if split == first else split)
            owners = np.full(len(splits[split]), -1, dtype=np.int64)
            owners[known] = self._assign(generator, domain, label, counts)
            partitions[split] = Partition.from_owners(self._client_ids(names), owners)
        return partitions

    def _draw(self, generator: np.random.Generator, table: np.ndarray) -> np.ndarray:
        """Draw the label shares q_j, of shape `(num_domains, clients_per_domain, num_labels)`."""
        prior = table.sum(axis=0) / table.sum()
        return np.stack(
            [draw_shares(generator, self.alpha, prior * (row > 0), self.clients_per_domain) for row in table]
        )

    def _counts(
        self, shares: np.ndarray, table: np.ndarray, names: list[str], label_names: list[str], split: str
    ) -> np.ndarray:
        """
        Compute the number of rows of each label for each client, with the shape of `shares`.

        All clients have the same sum, and the clients of a domain need at most the rows in `table`.
        """
        shares = shares * (table > 0)[:, None, :]
        totals = shares.sum(axis=2, keepdims=True)
        shares = np.divide(shares, totals, out=np.zeros_like(shares), where=totals > 0)
        demand = shares.sum(axis=1)
        # Rounding changes a client's count by less than 1, so the size is at most this bound.
        bounds = np.divide(
            table + self.clients_per_domain, demand, out=np.full(demand.shape, np.inf), where=demand > 0
        )
        size = min(int(table.sum(axis=1).min()) // self.clients_per_domain, int(bounds.min())) if totals.all() else 0
        counts = round_shares(shares, size)
        while (counts.sum(axis=1) > table).any():
            size -= 1
            counts = round_shares(shares, size)
        minimum = 1 if split else self.min_size
        if size < minimum:
            domain, label = np.unravel_index(int(bounds.argmin()), bounds.shape)
            of_split = f" of the split {split!r}" if split else ""
            raise ValueError(
                f"MultiDomainPartitioner: alpha={self.alpha} and seed={self.seed} leave {size} rows per client"
                f"{of_split}, but at least {minimum} are needed. The label {label_names[label]!r} of the domain"
                f" {names[domain]!r} runs out. Increase alpha, reduce clients_per_domain, or remove rare labels and"
                " small domains."
            )
        return counts

    def _assign(
        self, generator: np.random.Generator, domain: np.ndarray, label: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """
        Assign each row to a client.

        Rows are drawn from one pool per domain and label, per label, per domain, or from a single pool, depending on
        `diverse_domains` and `diverse_labels`.
        """
        num_domains, _, num_labels = counts.shape
        if not self.diverse_labels:
            counts, label, num_labels = counts.sum(axis=2, keepdims=True), np.zeros_like(label), 1
        if not self.diverse_domains:
            return assign_rows(generator, label, counts.reshape(-1, num_labels))
        cells = np.zeros((*counts.shape[:2], num_domains, num_labels), dtype=np.int64)
        for position in range(num_domains):
            cells[position, :, position] = counts[position]
        return assign_rows(generator, domain * num_labels + label, cells.reshape(-1, num_domains * num_labels))

    def _client_ids(self, names: list[str]) -> list[str]:
        if not self.diverse_domains:
            return numbered_client_ids(len(names) * self.clients_per_domain)
        if self.clients_per_domain == 1:
            return names
        return [f"{name}/{number}" for name in names for number in range(self.clients_per_domain)]


def round_shares(shares: np.ndarray, size: int) -> np.ndarray:
    """
    Round `shares * size` to integers that sum to `size` in each row.

    All values are rounded down. The values with the largest remainders are then rounded up.
    """
    exact = shares * size
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=-1, kind="stable"), axis=-1)
    return counts + (rank < size - counts.sum(axis=-1, keepdims=True))
