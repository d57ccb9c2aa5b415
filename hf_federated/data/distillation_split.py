"""Private, public and server-labelled rows: the three parts that federated distillation trains on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from datasets import Dataset

from .client_datasets import PartitionedDataset
from .column_values import check_columns, group_by_value
from .federated_dataset import FederatedDataset
from .partitioners.base import Partition


class DistillationSplit(NamedTuple):
    """
    Args:
        private (`datasets.Dataset` or [`FederatedDataset`]): What the clients train on, of the kind that was split.
        public (`datasets.Dataset`): Without labels; clients and server see it.
        server (`datasets.Dataset`, *optional*): With labels; the server's own. `None` if it has none.
    """

    private: Dataset | FederatedDataset
    public: Dataset
    server: Dataset | None


def split_for_distillation(
    data: Dataset | FederatedDataset,
    public_share: float,
    server_share: float = 0.0,
    label_column: str = "label",
    stratify_by_column: str | None = None,
    seed: int = 0,
) -> DistillationSplit:
    """
    Sets rows aside as public data and, if asked for, as labelled data of the server.

    FedID: half of the training rows are public, and a tenth of those is labelled and the server's (50 % private, 45 %
    public, 5 % server): `public_share=0.45, server_share=0.05`. AdaFD: a fifth of each domain is public:
    `public_share=0.2, stratify_by_column="domain"`. What is private can be cut by any partitioner; a federated data
    set gives the same share of each of its clients.

    Numbers of rows are rounded in every stratum (a value of the column, or a client), halves up; rows are drawn
    without replacement and stay in their order.

    Args:
        data (`datasets.Dataset` or [`FederatedDataset`]):
            The rows. They are not copied.
        public_share (`float`):
            Share of rows that become public, between 0 and 1.
        server_share (`float`, *optional*, defaults to `0.0`):
            Share of rows that become the server's. 0 gives `None`.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column that the public rows lose.
        stratify_by_column (`str`, *optional*):
            Of each value of this column the same share is taken. Not for a `FederatedDataset`, whose strata are its
            clients.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.

    Raises:
        `ValueError`: If a share is not between 0 and 1, nothing would be private or public, a client would have no
            private rows, or a column does not exist.
        `TypeError`: If clients are not `datasets.Dataset`s.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import split_for_distillation
    >>> rows = Dataset.from_dict({"text": [f"text {i}" for i in range(100)], "label": [i % 2 for i in range(100)]})
    >>> split = split_for_distillation(rows, public_share=0.45, server_share=0.05)
    >>> len(split.private), len(split.public), len(split.server)
    (50, 45, 5)
    >>> split.public.column_names
    ['text']

    ```
    """
    for name, share in (("public_share", public_share), ("server_share", server_share)):
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ValueError(f"split_for_distillation: {name} must be a number from 0 to below 1, got {share!r}.")
    if not 0 < public_share + server_share < 1 or public_share == 0:
        raise ValueError(
            "split_for_distillation: some rows must be public and some private, got"
            f" public_share={public_share}, server_share={server_share}."
        )
    if isinstance(data, FederatedDataset):
        if stratify_by_column is not None:
            raise ValueError(
                "split_for_distillation: a FederatedDataset gives the same share of each client; leave out"
                f" stratify_by_column={stratify_by_column!r}."
            )
        return _split_clients(data, public_share, server_share, label_column, seed)
    check_columns(data.column_names, [label_column])
    if stratify_by_column is None:
        strata = np.zeros(len(data), dtype=np.int64)
    else:
        _, strata = group_by_value(data, stratify_by_column)
    private, public, server = _parts(strata, public_share, server_share, seed)
    _check_parts(len(private), len(public), len(server), server_share)
    return DistillationSplit(
        data.select(private), *_public_and_server(data, public, server, server_share, label_column)
    )


def _split_clients(
    clients: FederatedDataset, public_share: float, server_share: float, label_column: str, seed: int
) -> DistillationSplit:
    pooled = clients.to_dataset()
    check_columns(pooled.column_names, [label_column])
    sizes = np.array(list(clients.num_rows.values()))
    strata = np.repeat(np.arange(len(sizes)), sizes)
    private, public, server = _parts(strata, public_share, server_share, seed)
    left = np.bincount(strata[private], minlength=len(sizes))
    partition = Partition(clients.client_ids, private, np.concatenate([[0], np.cumsum(left)]))
    _check_parts(len(private), len(public), len(server), server_share)
    rows = FederatedDataset(PartitionedDataset(pooled, partition), clients.partitioning)
    return DistillationSplit(rows, *_public_and_server(pooled, public, server, server_share, label_column))


def _check_parts(num_private: int, num_public: int, num_server: int, server_share: float) -> None:
    if not num_private or not num_public or (server_share > 0 and not num_server):
        raise ValueError(
            f"split_for_distillation: {num_private} rows would be private, {num_public} public and {num_server} the"
            " server's, rounded in every stratum or client. Pass more rows, or larger shares."
        )


def _public_and_server(
    data: Dataset, public: np.ndarray, server: np.ndarray, server_share: float, label_column: str
) -> tuple[Dataset, Dataset | None]:
    return (
        data.select(public).remove_columns(label_column),
        data.select(server) if server_share > 0 else None,
    )


def _parts(
    strata: np.ndarray, public_share: float, server_share: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row numbers of the private, public and server's part, each rising."""
    # rows in random order within their stratum, the strata one after the other
    shuffled = np.random.default_rng(seed).permutation(len(strata))
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]
    sizes = np.bincount(strata)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    num_server = np.floor(server_share * sizes + 0.5).astype(np.int64)
    num_given = num_server + np.floor(public_share * sizes + 0.5).astype(np.int64)
    stratum = strata[order]
    is_server = rank < num_server[stratum]
    is_public = ~is_server & (rank < num_given[stratum])
    return np.sort(order[~is_server & ~is_public]), np.sort(order[is_public]), np.sort(order[is_server])
