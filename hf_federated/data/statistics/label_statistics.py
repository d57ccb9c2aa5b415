"""Label statistics of clients: counts and Jensen-Shannon divergence.

All functions take counts or shares of shape `(num_clients, num_labels)`. Only `label_counts` reads datasets, and it
reads only their label column. `dirichlet_concentration.py` estimates α, and `text_statistics.py` compares the words of
clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features

from ..client_datasets import as_dataset
from ..column_values import check_columns, read_column
from ..labels import read_labels


if TYPE_CHECKING:
    import torch

    from ..client_mapping import ClientMapping


# Number of values in one block of mixtures: 1 MB of float64, which fits into the cache of a CPU core.
BLOCK_SIZE = 2**17


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """
    Number of examples of each label for each client.

    Args:
        client_ids (`list[str]`):
            The client ids, in the order of the rows of `counts`.
        label_names (`list[str]`):
            The label names, in the order of the columns of `counts`. Names of a `ClassLabel` that no client has are
            included.
        counts (`np.ndarray` of shape `(num_clients, num_labels)`, `int64`):
            Number of examples of each client with each label.

    Raises:
        `ValueError`: If the shape of `counts` does not match the numbers of clients and labels.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.data import LabelCounts
    >>> counts = LabelCounts(["anna", "ben"], ["bad", "good"], np.array([[3, 1], [0, 4]]))
    >>> counts.sizes.tolist()
    [4, 4]
    >>> counts.shares.tolist()
    [[0.75, 0.25], [0.0, 1.0]]

    ```
    """

    client_ids: list[str]
    label_names: list[str]
    counts: np.ndarray

    def __post_init__(self) -> None:
        if self.counts.shape != (len(self.client_ids), len(self.label_names)):
            raise ValueError(
                f"LabelCounts: counts has shape {self.counts.shape}, but {len(self.client_ids)} clients and"
                f" {len(self.label_names)} labels need shape {(len(self.client_ids), len(self.label_names))}."
            )

    @property
    def sizes(self) -> np.ndarray:
        """`np.ndarray` of shape `(num_clients,)`, `int64`: number of examples of each client."""
        return self.counts.sum(axis=1)

    @property
    def shares(self) -> np.ndarray:
        """`np.ndarray` of shape `(num_clients, num_labels)`, `float64`: label distribution of each client."""
        return self.counts / np.maximum(self.sizes, 1)[:, None]


def label_counts(clients: ClientMapping, label_column: str = "label") -> LabelCounts:
    """
    Count the labels of each client.

    If the clients are a partition of one dataset, the label column of that dataset is read once, and no client dataset
    is created. Otherwise, the label column of each client dataset is read.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels.

    Raises:
        `ValueError`: If the label column does not exist, or an example has no label.
        `TypeError`: If a client is an `IterableDataset`, or if the column type cannot hold labels.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, label_counts
    >>> reviews = Dataset.from_dict({"movie": ["Up", "Heat", "Up"], "label": ["good", "bad", "bad"]})
    >>> counts = label_counts(FederatedDataset.from_column(reviews, "movie"))
    >>> counts.client_ids, counts.label_names
    (['Heat', 'Up'], ['bad', 'good'])
    >>> counts.counts.tolist()
    [[1, 0], [1, 1]]

    ```
    """
    check_has_columns(clients, [label_column])
    codes, names = _labels_by_client(clients, label_column)
    owners = np.repeat(np.arange(len(clients)), list(clients.num_rows.values()))
    cells = np.bincount(owners * len(names) + codes, minlength=len(clients) * len(names))
    return LabelCounts(clients.client_ids, list(names), cells.reshape(len(clients), len(names)).astype(np.int64))


def _labels_by_client(clients: ClientMapping, label_column: str) -> tuple[np.ndarray, list[str]]:
    """Return the label of every row, with all rows of the first client first, and the label names."""
    source, partition = clients.source, clients.partition
    if source is None or partition is None:
        return read_labels(_concatenated_column(clients, label_column), label_column)
    if len(partition.indices) < len(source):  # do not read the labels of rows that belong to no client
        return read_labels(clients.to_dataset().select_columns(label_column), label_column)
    codes, names = read_labels(source, label_column)
    return codes[partition.indices], names


def _concatenated_column(clients: ClientMapping, column: str) -> Dataset:
    """
    Concatenate one column of all clients.

    The Arrow values are concatenated, not the datasets, because each dataset may select a few rows of a table with
    millions of rows.
    """
    chunks: list[pa.Array] = []
    for client_id in clients:
        values, rows = read_column(clients[client_id], column)
        chunks.extend((values if rows is None else values.take(pa.array(rows))).chunks)
    features = Features({column: clients[clients.client_ids[0]].features[column]})
    return Dataset(
        pa.table({column: pa.chunked_array(chunks)}), info=DatasetInfo(features=features), fingerprint="labels"
    )


def check_has_columns(clients: ClientMapping, columns: list[str]) -> None:
    """
    Check that no client is an `IterableDataset` or a dataset of torch, and that all columns exist.

    Raises:
        `TypeError`: If a client is an `IterableDataset`, because its rows cannot be counted, or a dataset of torch,
            because its columns are unknown.
        `ValueError`: If a column does not exist. The message lists the existing columns.
    """
    for client_id, num_rows in clients.num_rows.items():
        if num_rows is None:
            raise TypeError(
                f"Client {client_id!r} is an IterableDataset, whose rows cannot be counted without reading them. Save"
                " it as a Dataset first, or exclude it with select_clients."
            )
    if columns and not clients.column_names:
        for client_id in clients:
            as_dataset(client_id, clients[client_id], "read by column")
    check_columns(clients.column_names, columns)


def jensen_shannon_divergence(shares: np.ndarray) -> np.ndarray:
    """
    Compute the Jensen-Shannon divergence between the label distributions of each pair of clients, in bits.

    `JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2`, where `H` is the entropy in bits (Lin, 1991, "Divergence measures
    based on the Shannon entropy"). The divergence is 0 for equal distributions and 1 for distributions without a
    common label.

    Figure 2 of FedNLP (Lin et al., 2022) names this divergence. The script published with that paper plots the
    *distance* of `scipy.spatial.distance.jensenshannon` with its default base instead. The distance is
    `sqrt(JSD * log(2))` and at most 0.83. The divergence of clients with few examples is overestimated, because their
    label shares vary by chance. Therefore compare partitions with similar client sizes.

    Args:
        shares (`np.ndarray` of shape `(num_clients, num_labels)`):
            The label distribution of each client: [`LabelCounts.shares`].

    Returns:
        `np.ndarray` of shape `(num_clients, num_clients)`, `float64`: A symmetric matrix with zeros on the diagonal.
        The run time grows with `num_clients**2 * num_labels`. The memory in addition to the result is constant.

    Raises:
        `ValueError`: If a row is not a distribution.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.data import jensen_shannon_divergence
    >>> jensen_shannon_divergence(np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])).round(3).tolist()
    [[0.0, 1.0, 0.311], [1.0, 0.0, 0.311], [0.311, 0.311, 0.0]]

    ```
    """
    shares = np.asarray(shares, dtype=np.float64)
    if shares.ndim != 2 or not np.isfinite(shares).all() or (shares < 0).any():
        raise ValueError(
            "jensen_shannon_divergence needs an array of shape (num_clients, num_labels) with finite shares of at"
            f" least 0, got shape {shares.shape}{'' if shares.ndim != 2 else ' with negative or infinite numbers'}."
        )
    sums = shares.sum(axis=1)
    if len(sums) and float(np.abs(sums - 1).max()) > 1e-6:
        client = int(np.abs(sums - 1).argmax())
        raise ValueError(
            f"jensen_shannon_divergence: the shares of client {client} sum to {sums[client]:g}, not to 1. Pass shares"
            " (LabelCounts.shares), not counts."
        )
    import torch

    distributions = torch.from_numpy(shares)
    entropy = _entropy(distributions)
    num_clients, num_labels = shares.shape
    divergence = torch.zeros(num_clients, num_clients, dtype=torch.float64)
    step = max(BLOCK_SIZE // max(num_labels, 1), 1)
    for first in range(num_clients - 1):
        for begin in range(first + 1, num_clients, step):
            block = slice(begin, begin + step)
            mixed = _entropy((distributions[first] + distributions[block]) / 2)
            divergence[first, block] = mixed - (entropy[first] + entropy[block]) / 2
    divergence = (divergence / math.log(2)).clamp_(0, 1)  # rounding errors give -1e-17 for equal distributions
    return (divergence + divergence.T).numpy()


def _entropy(distributions: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of each row in nats."""
    import torch

    return -torch.xlogy(distributions, distributions).sum(dim=1)


def mean_divergence(divergence: np.ndarray) -> float:
    """
    Compute the mean over all pairs of different clients of a matrix such as [`jensen_shannon_divergence`].

    Raises:
        `ValueError`: If the matrix is not square, or there are fewer than two clients.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.data import mean_divergence
    >>> mean_divergence(np.array([[0.0, 0.25, 0.5], [0.25, 0.0, 0.75], [0.5, 0.75, 0.0]]))
    0.5

    ```
    """
    if divergence.ndim != 2 or divergence.shape[0] != divergence.shape[1] or len(divergence) < 2:
        raise ValueError(
            "mean_divergence needs a square matrix for at least two clients, got an array of shape"
            f" {divergence.shape}."
        )
    num_clients = len(divergence)
    return float((divergence.sum() - np.trace(divergence)) / (num_clients * (num_clients - 1)))
