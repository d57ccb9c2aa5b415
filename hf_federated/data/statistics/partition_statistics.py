"""What a partition looks like, in one object: for a terminal, for a card, for a JSON file.

The numbers come from `label_statistics.py` and `text_statistics.py`; pictures are in `partition_plots.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..federated_dataset import FederatedDataset
from ..markdown_table import markdown_table
from .label_statistics import (
    LabelCounts,
    check_has_columns,
    estimate_alpha,
    jensen_shannon_divergence,
    label_counts,
    mean_divergence,
)
from .text_statistics import vocabulary_overlap


# A table lists this many clients in full, of more only the largest and the smallest.
MAX_LISTED_CLIENTS = 20
NUM_LISTED_EXTREMES = 5
# Up to this many labels each has a column of its own in a table.
MAX_LABEL_COLUMNS = 5
MAX_NAME_LENGTH = 24


@dataclass(frozen=True, eq=False)
class PartitionStatistics:
    """
    Sizes, labels and words of the clients; [`describe_partition`] makes it.

    Args:
        client_ids (`list[str]`):
            The clients, in their order.
        sizes (`np.ndarray` of shape `(num_clients,)`, `int64`):
            Rows of each client.
        labels ([`LabelCounts`], *optional*):
            Rows of each client with each label.
        mean_divergence (`float`, *optional*):
            Mean Jensen-Shannon divergence of the label distributions of two clients, in bits.
        alpha (`float`, *optional*):
            Effective Dirichlet concentration, see [`estimate_alpha`]; `None` where it cannot be estimated: one client,
            one label, or one row a client.
        mean_vocabulary_overlap (`float`, *optional*):
            Mean Jaccard index of the vocabularies of two clients.
        num_compared_clients (`int`, *optional*):
            Of how many clients the two means are taken, if not of all.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, describe_partition
    >>> rows = {"shop": ["x"] * 60 + ["y"] * 20, "label": ["good"] * 40 + ["bad"] * 40}
    >>> statistics = describe_partition(FederatedDataset.from_column(Dataset.from_dict(rows), "shop"), "label")
    >>> print(statistics.to_markdown())
    | partition                                  |        value |
    | ------------------------------------------ | -----------: |
    | clients                                    |            2 |
    | rows                                       |           80 |
    | rows a client: smallest / median / largest | 20 / 40 / 60 |
    | Gini coefficient of the sizes              |        0.250 |
    | labels                                     |            2 |
    | labels a client has: fewest / median       |      1 / 1.5 |
    | mean Jensen-Shannon divergence (bits)      |        0.459 |
    | effective α                                |         0.56 |
    <BLANKLINE>
    | client | rows |  bad | good |
    | ------ | ---: | ---: | ---: |
    | x      |   60 |  33% |  67% |
    | y      |   20 | 100% |   0% |

    ```
    """

    client_ids: list[str]
    sizes: np.ndarray
    labels: LabelCounts | None = None
    mean_divergence: float | None = None
    alpha: float | None = None
    mean_vocabulary_overlap: float | None = None
    num_compared_clients: int | None = None

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.client_ids)

    @property
    def num_rows(self) -> int:
        """Rows of all clients."""
        return int(self.sizes.sum())

    @property
    def gini(self) -> float:
        """
        Gini coefficient of the sizes: half the mean difference of two clients' rows, over the mean. 0 if all clients
        have as many rows, near 1 if one has almost all.
        """
        ascending = np.sort(self.sizes).astype(np.float64)
        ranks = np.arange(1, self.num_clients + 1)
        return float((2 * ranks - self.num_clients - 1) @ ascending / (self.num_clients * ascending.sum()))

    def to_dict(self) -> dict[str, Any]:
        """
        All of it for JSON: numbers, strings, lists and dictionaries; what was not asked for is left out.

        An infinite α is the string `"inf"`, which JSON has no number for and `float` reads. `label_counts` lists a
        client's rows in the order of `label_names`.
        """
        values: dict[str, Any] = {
            "num_clients": self.num_clients,
            "num_rows": self.num_rows,
            "rows_per_client": {
                "min": int(self.sizes.min()),
                "median": float(np.median(self.sizes)),
                "max": int(self.sizes.max()),
                "gini": self.gini,
            },
            "mean_divergence": self.mean_divergence,
            "alpha": "inf" if self.alpha is not None and math.isinf(self.alpha) else self.alpha,
            "mean_vocabulary_overlap": self.mean_vocabulary_overlap,
            "num_compared_clients": self.num_compared_clients,
            "sizes": dict(zip(self.client_ids, self.sizes.tolist(), strict=True)),
        }
        if self.labels is not None:
            values["label_names"] = self.labels.label_names
            values["label_counts"] = dict(zip(self.client_ids, self.labels.counts.tolist(), strict=True))
        return {name: value for name, value in values.items() if value is not None}

    def to_markdown(self) -> str:
        """
        Two tables, aligned for a terminal: a summary, and the clients.

        Up to 20 clients are listed in their order; of more, the five with the most rows and the five with the fewest.
        Up to five labels have a column with their share each; of more, the most frequent ones are named. Names are cut
        at 24 characters.
        """
        header, rows = self._client_rows()
        text_columns = {0} if self._label_columns() else {0, 3}
        summary = markdown_table(["partition", "value"], self._summary(), text_columns={0})
        return f"{summary}\n\n{markdown_table(header, rows, text_columns)}"

    def _summary(self) -> list[list[str]]:
        sizes = self.sizes
        lines = [
            ["clients", str(self.num_clients)],
            ["rows", str(self.num_rows)],
            ["rows a client: smallest / median / largest", f"{sizes.min()} / {np.median(sizes):g} / {sizes.max()}"],
            ["Gini coefficient of the sizes", f"{self.gini:.3f}"],
        ]
        of_compared = f", of {self.num_compared_clients} clients" if self.num_compared_clients is not None else ""
        if self.labels is not None:
            held = (self.labels.counts > 0).sum(axis=1)
            lines.append(["labels", str(len(self.labels.label_names))])
            lines.append(["labels a client has: fewest / median", f"{held.min()} / {np.median(held):g}"])
        if self.mean_divergence is not None:
            lines.append([f"mean Jensen-Shannon divergence (bits){of_compared}", f"{self.mean_divergence:.3f}"])
        if self.alpha is not None:
            lines.append(["effective α", f"{self.alpha:.2g}" if self.alpha < 100 else f"{self.alpha:.0f}"])
        if self.mean_vocabulary_overlap is not None:
            lines.append([f"mean vocabulary overlap (Jaccard){of_compared}", f"{self.mean_vocabulary_overlap:.3f}"])
        return lines

    def _label_columns(self) -> list[str]:
        names = [] if self.labels is None else self.labels.label_names
        return names if len(names) <= MAX_LABEL_COLUMNS else []

    def _client_rows(self) -> tuple[list[str], list[list[str]]]:
        columns = self._label_columns()
        with_labels = ["labels", "most frequent"] if self.labels is not None and not columns else columns
        header = ["client", "rows", *map(_short, with_labels)]
        if self.num_clients <= MAX_LISTED_CLIENTS:
            return header, [self._client_row(position) for position in range(self.num_clients)]
        by_size = np.argsort(-self.sizes, kind="stable").tolist()
        largest, smallest = by_size[:NUM_LISTED_EXTREMES], by_size[-NUM_LISTED_EXTREMES:]
        left_out = [f"… {self.num_clients - 2 * NUM_LISTED_EXTREMES} more", *["…"] * (len(header) - 1)]
        return header, [*map(self._client_row, largest), left_out, *map(self._client_row, smallest)]

    def _client_row(self, position: int) -> list[str]:
        row = [_short(self.client_ids[position]), str(self.sizes[position])]
        if self.labels is None:
            return row
        shares = self.labels.counts[position] / max(int(self.sizes[position]), 1)
        if self._label_columns():
            return [*row, *(f"{share:.0%}" for share in shares)]
        most = [label for label in np.argsort(-shares, kind="stable")[:3].tolist() if shares[label] > 0]
        named = ", ".join(f"{_short(self.labels.label_names[label])} {shares[label]:.0%}" for label in most)
        return [*row, str(int((shares > 0).sum())), named]


def describe_partition(
    clients: FederatedDataset,
    label_column: str | None = None,
    text_column: str | None = None,
    max_clients: int = 1000,
    rows_per_client: int | None = 100,
    seed: int = 0,
) -> PartitionStatistics:
    """
    Measures a partition.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        label_column (`str`, *optional*):
            The column with the labels. Without it nothing is said about labels.
        text_column (`str`, *optional*):
            The column with the texts. Without it nothing is said about words, and scikit-learn is not needed.
        max_clients (`int`, *optional*, defaults to 1000):
            Of more clients than this, as many are drawn to be compared pairwise: the time grows with the square.
            Sizes, labels and α are those of all clients.
        rows_per_client (`int`, *optional*, defaults to 100):
            How many texts of a client are read for its vocabulary, see [`vocabulary_overlap`]; `None` for all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of both draws.

    Raises:
        `ValueError`: If a column does not exist, or a row has no label or no text.
        `TypeError`: If a client is an `IterableDataset`.
        `ImportError`: If `text_column` is given and scikit-learn is not installed.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, IidPartitioner, describe_partition
    >>> dataset = Dataset.from_dict({"label": [0, 1] * 50})
    >>> statistics = describe_partition(FederatedDataset.from_dataset(dataset, IidPartitioner(4)), "label")
    >>> statistics.num_rows, statistics.gini, statistics.alpha
    (100, 0.0, inf)

    ```
    """
    if isinstance(max_clients, bool) or not isinstance(max_clients, int) or max_clients < 2:
        raise ValueError(f"describe_partition: max_clients must be a whole number from 2, got {max_clients!r}.")
    check_has_columns(clients, [column for column in (label_column, text_column) if column is not None])
    labels = None if label_column is None else label_counts(clients, label_column)
    compared = np.arange(len(clients))
    if len(clients) > max_clients:
        compared = np.sort(np.random.default_rng(seed).choice(len(clients), max_clients, replace=False))
    several = len(clients) > 1
    divergence = overlap = None
    if labels is not None and several:
        divergence = mean_divergence(jensen_shannon_divergence(labels.shares[compared]))
    if text_column is not None and several:
        few = clients.select_clients([clients.client_ids[position] for position in compared])
        overlap = mean_divergence(vocabulary_overlap(few, text_column, rows_per_client, seed))
    return PartitionStatistics(
        client_ids=clients.client_ids,
        sizes=np.array(list(clients.num_rows.values()), dtype=np.int64),
        labels=labels,
        mean_divergence=divergence,
        alpha=None if labels is None else _alpha(labels),
        mean_vocabulary_overlap=overlap,
        num_compared_clients=max_clients if len(clients) > max_clients else None,
    )


def _alpha(labels: LabelCounts) -> float | None:
    """`None` where the data do not say: one client, one label, or one row a client."""
    num_present = int((labels.counts.sum(axis=0) > 0).sum())
    if len(labels.client_ids) < 2 or num_present < 2 or int(labels.sizes.max()) < 2:
        return None
    return estimate_alpha(labels.counts)


def _short(name: str) -> str:
    """Cut, on one line, and with the character that would end a cell escaped."""
    name = " ".join(name.split())
    name = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
    return name.replace("|", "\\|")
