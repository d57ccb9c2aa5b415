"""Split a dataset into the private, public and server parts that federated distillation uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from datasets import Dataset

from .client_datasets import PartitionedDataset
from .column_values import check_columns, group_by_value
from .federated_dataset import FederatedDataset
from .partitioners.base import Partition
from .row_selection import shuffle_strata


class DistillationSplit(NamedTuple):
    """
    The three parts of a split for federated distillation.

    Args:
        private (`datasets.Dataset` or [`FederatedDataset`]): The examples that the clients train on. The type is the
            type of the dataset that was split.
        public (`datasets.Dataset`): The unlabeled examples that clients and server share.
        server (`datasets.Dataset`, *optional*): The labeled examples of the server. `None` if the server has none.
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
    Split a dataset into private examples, public examples and, if requested, labeled examples for the server.

    FedID makes half of the training examples public, and gives a tenth of the public half to the server with labels
    (50 % private, 45 % public, 5 % server): `public_share=0.45, server_share=0.05`. AdaFD makes a fifth of each domain
    public: `public_share=0.2, stratify_by_column="domain"`. Any partitioner can partition the private part. A
    federated dataset contributes the same share of the examples of each client.

    A stratum is one value of `stratify_by_column`, or one client. The number of examples is rounded in each stratum,
    and halves are rounded up. Examples are drawn without replacement, and each part keeps the order of the dataset.

    Args:
        data (`datasets.Dataset` or [`FederatedDataset`]):
            The examples. They are not copied.
        public_share (`float`):
            Share of the examples that become public, between 0 and 1.
        server_share (`float`, *optional*, defaults to `0.0`):
            Share of the examples that the server receives with labels. With 0, `server` is `None`.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column that is removed from the public examples.
        stratify_by_column (`str`, *optional*):
            Take the same share of each value of this column. Not allowed for a `FederatedDataset`, whose strata are
            its clients.
        seed (`int`, *optional*, defaults to `0`):
            Random seed of the draw.

    Raises:
        `ValueError`: If a share is not between 0 and 1, if the private or the public part would be empty, if a client
            would have no private examples, or if a column does not exist.
        `TypeError`: If the clients are not `datasets.Dataset`s.

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
    _check_shares(public_share, server_share)
    rows: Dataset = data.to_dataset() if isinstance(data, FederatedDataset) else data
    check_columns(rows.column_names, [label_column])
    if isinstance(data, FederatedDataset):
        if stratify_by_column is not None:
            raise ValueError(
                "split_for_distillation: a FederatedDataset is always stratified by client. Remove"
                f" stratify_by_column={stratify_by_column!r}."
            )
        strata = np.repeat(np.arange(len(data)), list(data.num_rows.values()))
    elif stratify_by_column is None:
        strata = np.zeros(len(data), dtype=np.int64)
    else:
        _, strata = group_by_value(data, stratify_by_column)
    private, public, server = _parts(strata, public_share, server_share, seed)
    private_rows: Dataset | FederatedDataset = rows.select(private)
    if isinstance(data, FederatedDataset):
        partition = Partition.from_sizes(data.client_ids, private, np.bincount(strata[private], minlength=len(data)))
        private_rows = FederatedDataset(PartitionedDataset(rows, partition), data.partitioning)
    if not len(private) or not len(public) or (server_share > 0 and not len(server)):
        raise ValueError(
            f"split_for_distillation: the shares give {len(private)} private, {len(public)} public and {len(server)}"
            " server examples after rounding in each stratum. Pass more examples, or set larger shares."
        )
    return DistillationSplit(
        private_rows,
        rows.select(public).remove_columns(label_column),
        rows.select(server) if server_share > 0 else None,
    )


def _check_shares(public_share: float, server_share: float) -> None:
    for name, share in (("public_share", public_share), ("server_share", server_share)):
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ValueError(f"split_for_distillation: {name}={share!r}, but it must be at least 0 and below 1.")
    if public_share == 0 or public_share + server_share >= 1:
        raise ValueError(
            "split_for_distillation: the public and the private part must not be empty, got"
            f" public_share={public_share} and server_share={server_share}. Set public_share above 0, and the sum of"
            " both shares below 1."
        )


def _parts(
    strata: np.ndarray, public_share: float, server_share: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sorted row numbers of the private, the public and the server part."""
    order, rank = shuffle_strata(strata, np.random.default_rng(seed))
    sizes = np.bincount(strata)
    num_server = np.floor(server_share * sizes + 0.5).astype(np.int64)
    num_not_private = num_server + np.floor(public_share * sizes + 0.5).astype(np.int64)
    stratum = strata[order]
    is_server = rank < num_server[stratum]
    is_public = ~is_server & (rank < num_not_private[stratum])
    return np.sort(order[~is_server & ~is_public]), np.sort(order[is_public]), np.sort(order[is_server])
