"""Clients that differ in domain, in labels, in both or in neither (AdaFD, Xiao et al. 2025, section IV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from ..labels import read_labels_of_splits
from .base import (
    Partition,
    Partitioner,
    check_column_name,
    check_concentration,
    check_splits,
    check_whole_number,
    number_clients,
)
from .dirichlet import deal_rows, draw_shares


@dataclass(frozen=True)
class MultiDomainPartitioner(Partitioner):
    """
    Makes one of four partitions that differ in nothing but their diversity.

    | `diverse_domains` | `diverse_labels` | a client's rows | the paper's name |
    |---|---|---|---|
    | no | no | are drawn from all | IID |
    | yes | no | are drawn from one domain | multi-domain |
    | no | yes | are drawn from all domains by `q_j ~ Dir(alpha * p)` | label diverse |
    | yes | yes | are drawn from one domain by `q_j ~ Dir(alpha * p)` | non-IID |

    With the same other arguments all four have the same number of clients, `clients_per_domain` for each domain, and
    every client has the same number of rows in all four; the two that are label diverse share the `q_j`. That number
    is the largest that the fourth permits: no domain has to hand out more rows of a label than it has. **So rows are
    dropped**, the more the smaller `alpha` is; a partition of all rows with domain and label diversity is
    `NestedPartitioner(NaturalPartitioner(domain), LabelDirichletPartitioner(...))` with several clients a domain.

    p are the labels' shares of the whole, over the labels that the domain has. Where labels need not differ, they are
    those of the rows drawn: clients of one domain have that domain's shares. Clients are named after their domain
    (`"baby"`; `"baby/0"`, `"baby/1"`, … if there are several), or `"0"`, `"1"`, … where they have no domain.

    Of several splits, the domains and the `q_j` come from the first; the number of rows a client is each split's own.
    A label that a domain lacks in a split has no share there. Rows of a domain that only a later split has are
    dropped.

    Args:
        domain_column (`str`):
            Column with the domain of a row; of any type that a label may have.
        label_column (`str`, *optional*, defaults to `"label"`):
            Column with the labels, as for [`LabelDirichletPartitioner`].
        diverse_domains (`bool`, *optional*, defaults to `True`):
            Whether a client has rows of one domain only.
        diverse_labels (`bool`, *optional*, defaults to `True`):
            Whether clients differ in their shares of labels.
        clients_per_domain (`int`, *optional*, defaults to `1`):
            Number of clients divided by the number of domains. The paper has one.
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration of the labels (the paper's α).
        min_size (`int`, *optional*, defaults to `1`):
            Rows that every client has at least, of the first split.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global generators are neither read nor changed.

    Raises:
        `ValueError`: If clients would have fewer than `min_size` rows, if a column does not exist, or if a row has no
            domain or no label.
        `TypeError`: If the type of a column does not name classes.

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
        check_column_name(self, "domain_column")
        check_column_name(self, "label_column")
        for name in ("diverse_domains", "diverse_labels"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"MultiDomainPartitioner: {name} must be True or False, got {getattr(self, name)!r}.")
        check_whole_number(self, "clients_per_domain", 1)
        check_concentration(self, "alpha")
        check_whole_number(self, "min_size", 1)
        check_whole_number(self, "seed", 0)

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        domains, domain_names = read_labels_of_splits(splits, self.domain_column)
        labels, label_names = read_labels_of_splits(splits, self.label_column)
        first = next(iter(splits))
        if len(domains[first]) == 0:
            raise ValueError("MultiDomainPartitioner: the data set has no rows, so there are no domains.")
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
            owners[known] = self._deal(generator, domain, label, counts)
            partitions[split] = Partition.from_owners(self._client_ids(names), owners)
        return partitions

    def _draw(self, generator: np.random.Generator, table: np.ndarray) -> np.ndarray:
        """The shares q_j of labels, of shape `(num_domains, clients_per_domain, num_labels)`."""
        prior = table.sum(axis=0) / table.sum()
        return np.stack(
            [draw_shares(generator, self.alpha, prior * (row > 0), self.clients_per_domain) for row in table]
        )

    def _counts(
        self, shares: np.ndarray, table: np.ndarray, names: list[str], label_names: list[str], split: str
    ) -> np.ndarray:
        """Rows of each label, of the shape of `shares`: the same sum for all clients, and within `table`."""
        shares = shares * (table > 0)[:, None, :]
        totals = shares.sum(axis=2, keepdims=True)
        shares = np.divide(shares, totals, out=np.zeros_like(shares), where=totals > 0)
        demand = shares.sum(axis=1)
        # Rounding moves a client's count by less than 1, so the answer is not above this.
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
            where = f" of the split {split!r}" if split else ""
            raise ValueError(
                f"MultiDomainPartitioner: alpha={self.alpha} and seed={self.seed} leave {size} rows a client{where},"
                f" fewer than {minimum}: the label {label_names[label]!r} of the domain {names[domain]!r} runs out."
                " Raise alpha, lower clients_per_domain, or leave out rare labels and small domains."
            )
        return counts

    def _deal(
        self, generator: np.random.Generator, domain: np.ndarray, label: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Owner of each row. Rows of a cell are alike to a client: of a domain and a label, of one of them, or all."""
        num_domains, _, num_labels = counts.shape
        if not self.diverse_labels:
            counts, label, num_labels = counts.sum(axis=2, keepdims=True), np.zeros_like(label), 1
        if not self.diverse_domains:
            return deal_rows(generator, label, counts.reshape(-1, num_labels))
        cells = np.zeros((*counts.shape[:2], num_domains, num_labels), dtype=np.int64)
        for position in range(num_domains):
            cells[position, :, position] = counts[position]
        return deal_rows(generator, domain * num_labels + label, cells.reshape(-1, num_domains * num_labels))

    def _client_ids(self, names: list[str]) -> list[str]:
        if not self.diverse_domains:
            return number_clients(len(names) * self.clients_per_domain)
        if self.clients_per_domain == 1:
            return names
        return [f"{name}/{number}" for name in names for number in range(self.clients_per_domain)]


def round_shares(shares: np.ndarray, size: int) -> np.ndarray:
    """Whole numbers in proportion to shares, `size` in each row: rounded down, then up where most was lost."""
    exact = shares * size
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=-1, kind="stable"), axis=-1)
    return counts + (rank < size - counts.sum(axis=-1, keepdims=True))
