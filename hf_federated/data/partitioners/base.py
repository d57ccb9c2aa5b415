"""Base class of all partitioners, and the `Partition` that a partitioner returns.

A partition holds no examples. It is one integer permutation of the row indices of a dataset, cut at offsets, with one
id per client. A million rows take 4 MB as `int32`. [`FederatedDataset`] builds the client datasets from a partition,
and `hf_federated.data.storage` writes partitions to disk.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset

from ..client_ids import check_client_ids, raise_for_empty_clients


PartitionerType = TypeVar("PartitionerType", bound="Partitioner")


@dataclass(frozen=True, eq=False)
class Partition:
    """
    Assignment of the rows of a dataset to clients.

    Args:
        client_ids (`list[str]`):
            One id per client. Ids are unique and not empty.
        indices (`np.ndarray` of shape `(num_assigned_rows,)`, `int32` or `int64`):
            Row indices, grouped by client in the order of `client_ids`. A row index occurs at most once. A row whose
            index does not occur belongs to no client.
        offsets (`np.ndarray` of shape `(num_clients + 1,)`, `int64`):
            The rows of client `i` are `indices[offsets[i]:offsets[i + 1]]`.

    Raises:
        `ValueError`: If an id is empty or occurs twice, if the offsets do not match the ids and the indices, or if a
            client has no rows.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.data import Partition
    >>> partition = Partition(["anna", "ben"], np.array([4, 0, 2, 1, 3]), np.array([0, 2, 5]))
    >>> partition.rows(0).tolist()
    [4, 0]
    >>> partition.sizes.tolist()
    [2, 3]

    ```
    """

    client_ids: list[str]
    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        check_client_ids(self.client_ids)
        if self.indices.ndim != 1 or self.indices.dtype.kind not in "iu":
            raise ValueError(
                f"Partition: indices has {self.indices.ndim} dimensions and dtype {self.indices.dtype}. Pass a"
                " one-dimensional array of integers."
            )
        if self.offsets.shape != (len(self.client_ids) + 1,):
            raise ValueError(
                f"Partition: offsets has shape {self.offsets.shape}, but {len(self.client_ids)} clients need"
                f" {len(self.client_ids) + 1} offsets."
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.indices) or bool((self.sizes < 0).any()):
            raise ValueError(
                f"Partition: offsets must increase from 0 to the number of indices ({len(self.indices)}), got"
                f" {self.offsets.tolist()[:10]} …"
            )
        raise_for_empty_clients([self.client_ids[i] for i in np.flatnonzero(self.sizes == 0)])

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def sizes(self) -> np.ndarray:
        """`np.ndarray` of shape `(num_clients,)`: number of rows of each client."""
        return np.diff(self.offsets)

    def rows(self, position: int) -> np.ndarray:
        """Row indices of the client at a position. The array is a view of `indices`, not a copy."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def select(self, positions: Sequence[int]) -> Partition:
        """Return the partition of the clients at the given positions, in the given order."""
        return Partition.from_rows([self.client_ids[position] for position in positions], map(self.rows, positions))

    def check_rows(self, num_rows: int) -> None:
        """
        Check that the partition fits a dataset with `num_rows` rows.

        Raises:
            `ValueError`: If a row index is outside the dataset, or if it is assigned to more than one client.
        """
        if len(self.indices) == 0:
            return
        lowest, highest = int(self.indices.min()), int(self.indices.max())
        if lowest < 0 or highest >= num_rows:
            invalid = lowest if lowest < 0 else highest
            raise ValueError(f"The partition names row {invalid}, but the dataset has the rows 0 to {num_rows - 1}.")
        counts = np.bincount(self.indices, minlength=num_rows)
        if int(counts.max()) > 1:
            raise ValueError(
                f"The partition assigns row {int(counts.argmax())} {int(counts.max())} times. Assign each row to at"
                " most one client."
            )

    @classmethod
    def from_sizes(
        cls, client_ids: Sequence[str], indices: np.ndarray, sizes: Sequence[int] | np.ndarray
    ) -> Partition:
        """Build a partition from row indices that are grouped by client, and the number of rows of each client."""
        return cls(list(client_ids), indices, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def from_rows(cls, client_ids: Sequence[str], rows: Iterable[np.ndarray]) -> Partition:
        """Build a partition from the row indices of each client."""
        pieces = list(rows)
        indices = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
        return cls.from_sizes(client_ids, indices, list(map(len, pieces)))

    @classmethod
    def from_owners(cls, client_ids: Sequence[str], owners: np.ndarray, drop_empty: bool = False) -> Partition:
        """
        Build a partition from the client that each row belongs to. The rows of a client keep their order.

        Args:
            client_ids (`Sequence[str]`):
                One id per client.
            owners (`np.ndarray` of shape `(num_rows,)`, integer):
                For each row, the position in `client_ids` of the client that owns the row. `-1` assigns the row to no
                client.
            drop_empty (`bool`, *optional*, defaults to `False`):
                Whether clients without rows are left out. Otherwise, they raise an error.
        """
        # numpy uses a radix sort for 16-bit integers, which is 10 times faster than a stable sort of wider integers.
        narrow = owners.astype(np.int16 if len(client_ids) < 2**15 else np.int32)
        order = np.argsort(narrow, kind="stable").astype(row_index_dtype(len(owners)))
        sizes = np.bincount(owners + 1, minlength=len(client_ids) + 1)
        num_unowned, sizes = int(sizes[0]), sizes[1:]
        if drop_empty:
            client_ids = [client_ids[client] for client in np.flatnonzero(sizes).tolist()]
            sizes = sizes[sizes > 0]
        return cls.from_sizes(client_ids, order[num_unowned:], sizes)


@dataclass(frozen=True)
class Partitioner(ABC):
    """
    Base class for the assignment of the rows of a dataset to clients.

    A partitioner is a frozen dataclass. Its fields are its settings. They are stored next to a saved partition and
    appear on dataset and model cards. A partitioner creates its own random generator from its seed, so that a seed
    gives the same partition in every process.

    Example:

    ```python
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset
    >>> from hf_federated.data import Partition, Partitioner
    >>> @dataclass(frozen=True)
    ... class HalvesPartitioner(Partitioner):
    ...     def partition(self, dataset: Dataset) -> Partition:
    ...         owners = np.arange(len(dataset)) * 2 // len(dataset)
    ...         return Partition.from_owners(["first", "second"], owners)
    >>> clients = FederatedDataset.from_dataset(Dataset.from_dict({"text": ["a", "b", "c"]}), HalvesPartitioner())
    >>> clients.num_rows
    {'first': 2, 'second': 1}

    ```
    """

    @abstractmethod
    def partition(self, dataset: Dataset) -> Partition:
        """
        Partition a dataset.

        Args:
            dataset (`datasets.Dataset`): The dataset to partition. Its rows are not copied.

        Returns:
            `Partition`: The row indices of each client. Every client has at least one row.
        """

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        """
        Partition several splits so that a client has the same share of each.

        Everything that depends on the data (a prior over labels, clusters, the list of clients) is computed from the
        *first* split and reused for the other splits. Therefore the test examples of a client follow the same
        distribution as its training examples. The first split gets the same partition as from
        [`~Partitioner.partition`].

        Args:
            splits (`Mapping[str, datasets.Dataset]` or `datasets.DatasetDict`):
                Split name to dataset. The training split is first.

        Returns:
            `dict[str, Partition]`: Split name to its partition.
        """
        # Correct if the shares depend only on the settings. Partitioners that use the data override this method.
        check_splits(splits)
        return {name: self.partition(dataset) for name, dataset in splits.items()}

    @property
    def naming_columns(self) -> list[str]:
        """
        The columns whose values only name the client of a row. [`FederatedDataset.from_dataset`] drops these columns,
        so that no client trains on its own name.
        """
        return []

    def settings(self) -> dict[str, Any]:
        """
        Return all constructor arguments with their values, in types that JSON supports.

        A nested partitioner becomes a dictionary with its class name and settings. A function becomes its qualified
        name.
        """
        return {field.name: _to_json_value(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def reseeded(self: PartitionerType, key: str) -> PartitionerType:
        """Return a copy of the partitioner whose seed is derived from its seed and `key`, if it has a seed."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "seed":
                # crc32 is the same in all processes. hash() of a string differs between processes.
                derived = np.random.SeedSequence([value, zlib.crc32(key.encode())]).generate_state(1)
                changes["seed"] = int(derived[0])
            elif isinstance(value, Partitioner):
                changes[field.name] = value.reseeded(key)
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class SplitsPartitioner(Partitioner):
    """Base class of the partitioners that use the data, and therefore partition all splits together."""

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

    @abstractmethod
    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        """Partition several splits, as [`Partitioner.partition_splits`]."""


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Partitioner):
        return {"partitioner": type(value).__name__, **value.settings()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    if callable(value):
        named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value


def check_splits(splits: object) -> None:
    """Raise `TypeError` or `ValueError` unless `splits` maps at least one split name to a `datasets.Dataset`."""
    if not isinstance(splits, Mapping):
        raise TypeError(
            f"partition_splits: expected a mapping from split name to Dataset, got {type(splits).__name__}. For one"
            " dataset, call partition."
        )
    if not splits:
        raise ValueError("partition_splits: the mapping of splits is empty. Pass at least one split.")
    for name, dataset in splits.items():
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"partition_splits: the split {name!r} is a {type(dataset).__name__}, expected a datasets.Dataset."
            )


def check_integer(partitioner: Partitioner, name: str, minimum: int) -> None:
    """Raise `ValueError` unless a setting is an integer of at least `minimum`."""
    value = getattr(partitioner, name)
    if isinstance(value, np.integer):
        value = int(value)  # settings are stored as JSON, which has no numpy integers
        object.__setattr__(partitioner, name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(
            f"{type(partitioner).__name__}: {name} must be an integer of at least {minimum}, got {value!r}."
        )


def check_concentration(partitioner: Partitioner, name: str) -> None:
    """Raise `ValueError` unless a setting is a finite number above zero."""
    value = getattr(partitioner, name)
    if isinstance(value, (np.integer, np.floating)):
        value = float(value)
        object.__setattr__(partitioner, name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(
            f"{type(partitioner).__name__}: {name} must be a finite number above 0, got {value!r}. It is the"
            " concentration of a Dirichlet distribution: small values make clients different, large values make them"
            " similar."
        )


def check_column_name(partitioner: Partitioner, name: str) -> None:
    """Raise `ValueError` unless a setting is the name of a column."""
    value = getattr(partitioner, name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{type(partitioner).__name__}: {name} must be the name of a column, got {value!r}.")


def check_boolean(partitioner: Partitioner, name: str) -> None:
    """Raise `ValueError` unless a setting is `True` or `False`."""
    value = getattr(partitioner, name)
    if not isinstance(value, bool):
        raise ValueError(f"{type(partitioner).__name__}: {name} must be True or False, got {value!r}.")


# The check of each setting that several partitioners have, by its name.
_CHECKS: dict[str, Callable[[Partitioner, str], None]] = {
    **dict.fromkeys(
        ("num_clients", "clients_per_domain", "max_clients", "min_size", "num_clusters", "batch_size"),
        partial(check_integer, minimum=1),
    ),
    "seed": partial(check_integer, minimum=0),
    **dict.fromkeys(("alpha", "beta", "quantity_beta"), check_concentration),
    **dict.fromkeys(("column", "domain_column", "label_column"), check_column_name),
    **dict.fromkeys(
        ("balance_entities", "diverse_domains", "diverse_labels", "keep_column", "merge_small"), check_boolean
    ),
}


def check_settings(partitioner: Partitioner) -> None:
    """Raise `ValueError` unless each setting with a common name is valid. `None` is valid if it is the default."""
    for field in dataclasses.fields(partitioner):
        is_unset = field.default is None and getattr(partitioner, field.name) is None
        if field.name in _CHECKS and not is_unset:
            _CHECKS[field.name](partitioner, field.name)


def check_enough_rows(
    partitioner: Partitioner, num_rows: int, num_clients: int, min_size: int, split: str = ""
) -> None:
    """Raise `ValueError` if there are fewer than `num_clients * min_size` rows."""
    if num_rows >= num_clients * min_size:
        return
    of_split = f" of the split {split!r}" if split else ""
    with_minimum = f" with at least {min_size} each" if min_size > 1 else ""
    max_clients = num_rows // min_size
    lower = " or lower min_size" if min_size > 1 else ""
    advice = (
        f"Set num_clients to at most {max_clients}{lower}, or pass more rows"
        if max_clients
        else f"Pass more rows{lower}"
    )
    raise ValueError(
        f"{type(partitioner).__name__}: num_clients={num_clients}, but {num_rows} rows{of_split} are too few for"
        f" {num_clients} clients{with_minimum}. {advice}."
    )


def numbered_client_ids(num_clients: int) -> list[str]:
    """Return the client ids `"0"`, `"1"`, …"""
    return [str(position) for position in range(num_clients)]


def row_index_dtype(num_rows: int) -> type[np.signedinteger]:
    """Return `int32` if it can hold the row indices of `num_rows` rows, else `int64`."""
    return np.int32 if num_rows < 2**31 else np.int64
