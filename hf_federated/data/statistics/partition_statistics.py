"""Summary of a partition in one object, for the terminal, for cards, and for JSON files.

The numbers are from `label_statistics.py` and `text_statistics.py`. Plots are in `partition_plots.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...utils.printable import printable
from ..client_mapping import ClientMapping
from ..markdown_table import markdown_table
from .dirichlet_concentration import estimate_alpha
from .label_statistics import (
    LabelCounts,
    check_has_columns,
    jensen_shannon_divergence,
    label_counts,
    mean_divergence,
)
from .text_statistics import vocabulary_overlap


# A table lists up to this many clients. If there are more, it lists the largest and the smallest clients.
MAX_LISTED_CLIENTS = 20
NUM_LISTED_EXTREMES = 5
# Up to this many labels have separate columns in a table.
MAX_LABEL_COLUMNS = 5
MAX_NAME_LENGTH = 24


@dataclass(frozen=True, eq=False)
class PartitionStatistics:
    """
    Sizes, labels and words of the clients, as returned by [`describe_partition`].

    Args:
        client_ids (`list[str]`):
            The client ids.
        sizes (`np.ndarray` of shape `(num_clients,)`, `int64`):
            Number of examples of each client.
        labels ([`LabelCounts`], *optional*):
            Number of examples of each client with each label.
        mean_divergence (`float`, *optional*):
            Mean Jensen-Shannon divergence between the label distributions of two clients, in bits.
        alpha (`float`, *optional*):
            Effective Dirichlet concentration, see [`estimate_alpha`]. `None` if it cannot be estimated, because there
            is one client, one label, or one example per client.
        mean_vocabulary_overlap (`float`, *optional*):
            Mean Jaccard index of the vocabularies of two clients.
        num_compared_clients (`int`, *optional*):
            Number of clients that the two means are computed for. `None` if they are computed for all clients.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, describe_partition
    >>> rows = {"shop": ["x"] * 60 + ["y"] * 20, "label": ["good"] * 40 + ["bad"] * 40}
    >>> statistics = describe_partition(FederatedDataset.from_column(Dataset.from_dict(rows), "shop"), "label")
    >>> print(statistics.to_markdown())
    | partition                                    |        value |
    | -------------------------------------------- | -----------: |
    | clients                                      |            2 |
    | rows                                         |           80 |
    | rows per client: smallest / median / largest | 20 / 40 / 60 |
    | Gini coefficient of the sizes                |        0.250 |
    | labels                                       |            2 |
    | labels per client: fewest / median           |      1 / 1.5 |
    | mean Jensen-Shannon divergence (bits)        |        0.459 |
    | effective α                                  |         0.56 |
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
        """Number of examples of all clients."""
        return int(self.sizes.sum())

    @property
    def gini(self) -> float:
        """
        Gini coefficient of the client sizes.

        It is half the mean absolute difference of two client sizes, divided by the mean size. It is 0 if all clients
        have the same size, and near 1 if one client has almost all examples.
        """
        ascending = np.sort(self.sizes).astype(np.float64)
        ranks = np.arange(1, self.num_clients + 1)
        return float((2 * ranks - self.num_clients - 1) @ ascending / (self.num_clients * ascending.sum()))

    def to_dict(self) -> dict[str, Any]:
        """
        Convert the statistics to numbers, strings, lists and dictionaries for JSON. Missing statistics are left out.

        An infinite α is the string `"inf"`, because JSON has no number for it. `float` can parse this string.
        `label_counts` has the label counts of each client in the order of `label_names`.
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
        Format the statistics as two Markdown tables with aligned columns: a summary, and a list of clients.

        Up to 20 clients are listed in their order. With more clients, the five largest and the five smallest are
        listed. Up to five labels have columns with their shares. With more labels, the most frequent labels are named.
        Names are truncated to 24 characters.
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
            ["rows per client: smallest / median / largest", f"{sizes.min()} / {np.median(sizes):g} / {sizes.max()}"],
            ["Gini coefficient of the sizes", f"{self.gini:.3f}"],
        ]
        of_compared = f", of {self.num_compared_clients} clients" if self.num_compared_clients is not None else ""
        if self.labels is not None:
            labels_per_client = (self.labels.counts > 0).sum(axis=1)
            lines.append(["labels", str(len(self.labels.label_names))])
            lines.append(
                ["labels per client: fewest / median", f"{labels_per_client.min()} / {np.median(labels_per_client):g}"]
            )
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
        label_columns = ["labels", "most frequent"] if self.labels is not None and not columns else columns
        header = ["client", "rows", *map(_format_name, label_columns)]
        if self.num_clients <= MAX_LISTED_CLIENTS:
            return header, [self._client_row(position) for position in range(self.num_clients)]
        by_size = np.argsort(-self.sizes, kind="stable").tolist()
        largest, smallest = by_size[:NUM_LISTED_EXTREMES], by_size[-NUM_LISTED_EXTREMES:]
        omitted = [f"… {self.num_clients - 2 * NUM_LISTED_EXTREMES} more", *["…"] * (len(header) - 1)]
        return header, [*map(self._client_row, largest), omitted, *map(self._client_row, smallest)]

    def _client_row(self, position: int) -> list[str]:
        row = [_format_name(self.client_ids[position]), str(self.sizes[position])]
        if self.labels is None:
            return row
        shares = self.labels.counts[position] / max(int(self.sizes[position]), 1)
        if self._label_columns():
            return [*row, *(f"{share:.0%}" for share in shares)]
        most_frequent = [label for label in np.argsort(-shares, kind="stable")[:3].tolist() if shares[label] > 0]
        formatted = ", ".join(
            f"{_format_name(self.labels.label_names[label])} {shares[label]:.0%}" for label in most_frequent
        )
        return [*row, str(int((shares > 0).sum())), formatted]


def describe_partition(
    clients: ClientMapping,
    label_column: str | None = None,
    text_column: str | None = None,
    max_clients: int = 1000,
    rows_per_client: int | None = 100,
    seed: int = 0,
) -> PartitionStatistics:
    """
    Compute statistics of a partition.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        label_column (`str`, *optional*):
            The column with the labels. If `None`, there are no label statistics.
        text_column (`str`, *optional*):
            The column with the texts. If `None`, there are no vocabulary statistics, and scikit-learn is not needed.
        max_clients (`int`, *optional*, defaults to 1000):
            Maximum number of clients to compare pairwise, because the run time grows with the square of their number.
            If there are more clients, a random sample is compared. Sizes, labels and α always include all clients.
        rows_per_client (`int`, *optional*, defaults to 100):
            Number of texts of a client to read for its vocabulary, see [`vocabulary_overlap`]. `None` reads all texts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sample of clients and of the samples of texts.

    Raises:
        `ValueError`: If a column does not exist, or an example has no label or no text.
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
        raise ValueError(f"describe_partition: max_clients must be an integer of at least 2, got {max_clients!r}.")
    check_has_columns(clients, [column for column in (label_column, text_column) if column is not None])
    labels = None if label_column is None else label_counts(clients, label_column)
    compared = np.arange(len(clients))
    if len(clients) > max_clients:
        compared = np.sort(np.random.default_rng(seed).choice(len(clients), max_clients, replace=False))
    has_pairs = len(clients) > 1
    divergence = overlap = None
    if labels is not None and has_pairs:
        divergence = mean_divergence(jensen_shannon_divergence(labels.shares[compared]))
    if text_column is not None and has_pairs:
        sampled_clients = clients.select_clients([clients.client_ids[position] for position in compared])
        overlap = mean_divergence(vocabulary_overlap(sampled_clients, text_column, rows_per_client, seed))
    return PartitionStatistics(
        client_ids=clients.client_ids,
        sizes=np.array(list(clients.num_rows.values()), dtype=np.int64),
        labels=labels,
        mean_divergence=divergence,
        alpha=None if labels is None else _estimate_alpha(labels),
        mean_vocabulary_overlap=overlap,
        num_compared_clients=max_clients if len(clients) > max_clients else None,
    )


def _estimate_alpha(labels: LabelCounts) -> float | None:
    """Estimate α, or return `None` with one client, one label, or one row per client."""
    num_present = int((labels.counts.sum(axis=0) > 0).sum())
    if len(labels.client_ids) < 2 or num_present < 2 or int(labels.sizes.max()) < 2:
        return None
    return estimate_alpha(labels.counts)


def _format_name(name: str) -> str:
    """Make a name printable, truncate it, and escape the character that separates table cells."""
    return printable(name, MAX_NAME_LENGTH).replace("|", "\\|")
