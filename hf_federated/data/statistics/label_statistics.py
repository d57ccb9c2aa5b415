"""How unlike clients are in their labels: counts, Jensen-Shannon divergence, effective Dirichlet concentration.

Everything here works on counts of shape `(num_clients, num_labels)`; only `label_counts` reads rows, and of them one
column. Words are compared in `text_statistics.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, DatasetInfo, Features

from ..column_values import check_columns, read_column
from ..labels import read_labels


if TYPE_CHECKING:
    from ..federated_dataset import FederatedDataset


# Numbers that a block of mixtures holds at a time: 1 MB of float64, which stays in a core's cache.
BLOCK_SIZE = 2**17
# A concentration beyond this cannot be told from an infinite one in float64.
MAX_ALPHA = 1e9


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """
    How many rows of each label each client has.

    Args:
        client_ids (`list[str]`):
            The clients, in their order.
        label_names (`list[str]`):
            The labels, in their order. A `ClassLabel` also lists those that no client has.
        counts (`np.ndarray` of shape `(num_clients, num_labels)`, `int64`):
            Rows of a client with a label.

    Raises:
        `ValueError`: If the shapes do not fit.

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
                f"LabelCounts: {len(self.client_ids)} clients and {len(self.label_names)} labels need counts of shape"
                f" {(len(self.client_ids), len(self.label_names))}, got {self.counts.shape}."
            )

    @property
    def sizes(self) -> np.ndarray:
        """`np.ndarray` of shape `(num_clients,)`, `int64`: rows of each client."""
        return self.counts.sum(axis=1)

    @property
    def shares(self) -> np.ndarray:
        """`np.ndarray` of shape `(num_clients, num_labels)`, `float64`: each client's label distribution."""
        return self.counts / np.maximum(self.sizes, 1)[:, None]


def label_counts(clients: FederatedDataset, label_column: str = "label") -> LabelCounts:
    """
    Counts the labels of each client.

    A partitioned source is read once, one column of it, and no client is opened. Clients with a data set each are read
    one column each.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels.

    Raises:
        `ValueError`: If there is no such column, or a row has no label.
        `TypeError`: If a client is an `IterableDataset`, or the values of the column cannot be labels.

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


def _labels_by_client(clients: FederatedDataset, label_column: str) -> tuple[np.ndarray, list[str]]:
    """The label of every row, all rows of the first client first, and the labels' names."""
    source, partition = clients.source, clients.partition
    if source is None or partition is None:
        return read_labels(_joined_column(clients, label_column), label_column)
    if len(partition.indices) < len(source):  # rows that no client has are not looked at
        return read_labels(clients.select_columns(label_column).to_dataset(), label_column)
    codes, names = read_labels(source, label_column)
    return codes[partition.indices], names


def _joined_column(clients: FederatedDataset, column: str) -> Dataset:
    """One column of all clients. Not concatenated as data sets: each may be a few rows of a table of millions."""
    chunks: list[pa.Array] = []
    for client_id in clients:
        values, rows = read_column(clients[client_id], column)
        chunks.extend((values if rows is None else values.take(pa.array(rows))).chunks)
    features = Features({column: clients[clients.client_ids[0]].features[column]})
    return Dataset(
        pa.table({column: pa.chunked_array(chunks)}), info=DatasetInfo(features=features), fingerprint="labels"
    )


def check_has_columns(clients: FederatedDataset, columns: list[str]) -> None:
    """
    Raises `TypeError` if a client is an `IterableDataset`, whose rows cannot be counted, and `ValueError` with the
    columns there are if one is missing.
    """
    for client_id, num_rows in clients.num_rows.items():
        if num_rows is None:
            raise TypeError(
                f"Client {client_id!r} is an IterableDataset, whose rows cannot be counted before they are read. Save"
                " it as a Dataset first, or leave it out with select_clients."
            )
    check_columns(clients.column_names, columns)


def jensen_shannon_divergence(shares: np.ndarray) -> np.ndarray:
    """
    The Jensen-Shannon divergence between the label distributions of every two clients, in bits.

    `JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2` with `H` the entropy in bits (Lin, 1991, "Divergence measures
    based on the Shannon entropy"): 0 for equal distributions, 1 for distributions without a common label.

    This is what figure 2 of FedNLP (Lin et al., 2022) names; the script published with that paper draws the *distance*
    of `scipy.spatial.distance.jensenshannon` in its default base instead, which is `sqrt(JSD * log(2))` and at most
    0.83. Divergences of clients with few rows are too large, because their shares vary by chance: compare partitions
    of similar sizes.

    Args:
        shares (`np.ndarray` of shape `(num_clients, num_labels)`):
            A label distribution a row: [`LabelCounts.shares`].

    Returns:
        `np.ndarray` of shape `(num_clients, num_clients)`, `float64`: symmetric, with zeros on the diagonal. Time
        grows with `num_clients**2 * num_labels`, memory beside the result does not.

    Raises:
        `ValueError`: If a row is no distribution.

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
            "jensen_shannon_divergence needs one row of shares from 0 a client, got an array of shape"
            f" {shares.shape}{'' if shares.ndim != 2 else ' with negative or infinite numbers'}."
        )
    sums = shares.sum(axis=1)
    if len(sums) and float(np.abs(sums - 1).max()) > 1e-6:
        wrong = int(np.abs(sums - 1).argmax())
        raise ValueError(
            f"jensen_shannon_divergence: the shares of client {wrong} sum to {sums[wrong]:g}, not to 1. Pass shares"
            " (LabelCounts.shares), not counts."
        )
    distributions = torch.from_numpy(shares)
    entropy = _entropy(distributions)
    num_clients, num_labels = shares.shape
    divergence = torch.zeros(num_clients, num_clients, dtype=torch.float64)
    step = max(BLOCK_SIZE // max(num_labels, 1), 1)
    for first in range(num_clients - 1):
        for begin in range(first + 1, num_clients, step):
            others = slice(begin, begin + step)
            mixed = _entropy((distributions[first] + distributions[others]) / 2)
            divergence[first, others] = mixed - (entropy[first] + entropy[others]) / 2
    divergence = (divergence / math.log(2)).clamp_(0, 1)  # rounding leaves -1e-17 between equal clients
    return (divergence + divergence.T).numpy()


def _entropy(distributions: torch.Tensor) -> torch.Tensor:
    """In nats, of each row."""
    return -torch.xlogy(distributions, distributions).sum(dim=1)


def mean_divergence(divergence: np.ndarray) -> float:
    """
    The mean over all pairs of different clients of a matrix such as that of [`jensen_shannon_divergence`].

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
            "mean_divergence needs a square matrix of at least two clients, got an array of shape"
            f" {divergence.shape}. One client differs from nobody."
        )
    num_clients = len(divergence)
    return float((divergence.sum() - np.trace(divergence)) / (num_clients * (num_clients - 1)))


def estimate_alpha(counts: np.ndarray, prior: np.ndarray | None = None) -> float:
    """
    The Dirichlet concentration that explains best how clients differ in their labels: an *effective* α.

    Each client's label distribution is taken as a draw from `Dir(alpha * prior)` with a prior that sums to one, as in
    the label partition of FedNLP (Lin et al., 2022, section 3.2), and its rows as independent draws from that. Where a
    partition was made with `Dir(a)` of equal `a` for each of L labels, the result is near `a * L`. The estimate
    maximises the likelihood of this Dirichlet-multinomial distribution over α, so that clients with few rows are not
    taken for more different than they are. With a fixed prior the likelihood has one maximum at most (Levin and Reeds,
    1977, "Compound multinomial likelihood functions are unimodal").

    Rows drawn without replacement, from a source that runs out of a label, differ from the model: there the estimate
    describes the partition that came out, not the argument that made it.

    Args:
        counts (`np.ndarray` of shape `(num_clients, num_labels)`, integer):
            Rows of each client with each label: [`LabelCounts.counts`].
        prior (`np.ndarray` of shape `(num_labels,)`, *optional*):
            The mean label distribution. Defaults to the shares of all clients' rows together.

    Returns:
        `float`: α. `inf` if clients are no more different than rows dealt out by chance; then the likelihood rises
        with α for ever. `0.0` if every client has one label only.

    Raises:
        `ValueError`: If there is one client, one label, no client with two rows, or a label that the prior rules out.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.data import estimate_alpha
    >>> rng = np.random.default_rng(0)
    >>> counts = np.stack([rng.multinomial(100, rng.dirichlet([0.5, 0.5, 1.0])) for _ in range(2000)])
    >>> round(estimate_alpha(counts, prior=np.array([0.25, 0.25, 0.5])), 1)
    2.0

    ```
    """
    counts, prior = _check_counts(counts, prior)
    sizes = counts.sum(axis=1)
    clients, labels = np.nonzero(counts)
    present, expected = counts[clients, labels], prior[labels]
    # The derivative of the likelihood by 1 / alpha at alpha = inf, twice. Not above 0: it has no maximum below.
    if float((present * (present - 1) / expected).sum() - (sizes * (sizes - 1)).sum()) <= 0:
        return math.inf
    if len(present) == int((sizes > 0).sum()):
        return 0.0
    slope = _Slope(torch.from_numpy(present), torch.from_numpy(expected), torch.from_numpy(sizes))
    low = high = 0.0
    while slope(low)[0] <= 0:
        low -= 2.0
    while slope(high)[0] > 0:
        high += 2.0
        if high > math.log(MAX_ALPHA):
            return math.inf
    return math.exp(_root(slope, low, high))


@dataclass(frozen=True)
class _Slope:
    """First and second derivative of the log-likelihood by log α."""

    present: torch.Tensor  # counts above 0, float64
    expected: torch.Tensor  # the prior of the label of each
    sizes: torch.Tensor  # rows of each client, float64

    def __call__(self, log_alpha: float) -> tuple[float, float]:
        alpha = torch.tensor(math.exp(log_alpha), dtype=torch.float64)
        scaled = alpha * self.expected
        first = (self.expected * (torch.digamma(scaled + self.present) - torch.digamma(scaled))).sum()
        first += (torch.digamma(alpha) - torch.digamma(alpha + self.sizes)).sum()
        second = (self.expected**2 * (_trigamma(scaled + self.present) - _trigamma(scaled))).sum()
        second += (_trigamma(alpha) - _trigamma(alpha + self.sizes)).sum()
        return float(alpha * first), float(alpha * first + alpha**2 * second)


def _trigamma(values: torch.Tensor) -> torch.Tensor:
    return torch.polygamma(1, values)


def _root(slope: _Slope, low: float, high: float) -> float:
    """Where the slope falls through 0: by Newton's steps, and by halving where one leads out of the bounds."""
    middle = (low + high) / 2
    for _ in range(100):
        value, curvature = slope(middle)
        low, high = (middle, high) if value > 0 else (low, middle)
        following = middle - value / curvature if curvature < 0 else math.nan
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - middle) < 1e-10:
            break
        middle = following
    return following


def _check_counts(counts: np.ndarray, prior: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError(
            "estimate_alpha needs counts: whole numbers from 0 of shape (num_clients, num_labels), got"
            f" {counts.dtype} of shape {counts.shape}. Pass LabelCounts.counts, not shares."
        )
    if len(counts) < 2:
        raise ValueError(f"estimate_alpha needs at least two clients to compare, got {len(counts)}.")
    if int(counts.sum(axis=1).max(initial=0)) < 2:
        raise ValueError("estimate_alpha: no client has two rows, and one row says nothing of a client's shares.")
    counts = counts.astype(np.float64)
    pooled = counts.sum(axis=0)
    prior = pooled / pooled.sum() if prior is None else np.asarray(prior, dtype=np.float64)
    if prior.shape != pooled.shape or (prior < 0).any() or abs(float(prior.sum()) - 1) > 1e-6:
        raise ValueError(
            f"estimate_alpha: the prior must be {len(pooled)} shares from 0 that sum to 1, got {prior.size} numbers"
            f" that sum to {float(prior.sum()):g}."
        )
    impossible = np.flatnonzero((prior == 0) & (pooled > 0))
    if len(impossible):
        raise ValueError(
            f"estimate_alpha: the prior gives label {int(impossible[0])} no share, but"
            f" {int(pooled[impossible[0]])} rows have it."
        )
    if int((prior > 0).sum()) < 2:
        raise ValueError("estimate_alpha needs at least two labels; with one, all clients are the same.")
    return counts, prior
