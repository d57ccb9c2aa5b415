"""What a partitioner returns and what it has to implement.

A partition never holds rows: it is one integer permutation of the row numbers, cut at offsets, with one id for each
piece. A million rows over a thousand clients is 4 MB of `int32`. This module does not open clients
(`FederatedDataset` does) and does not write partitions to disk.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset


PartitionerType = TypeVar("PartitionerType", bound="Partitioner")


@dataclass(frozen=True, eq=False)
class Partition:
    """
    Which rows belong to which client.

    Args:
        client_ids (`list[str]`):
            One id for each client, unique and not empty.
        indices (`np.ndarray` of shape `(num_assigned_rows,)`, `int32` or `int64`):
            Row numbers, all rows of the first client first. A row number occurs at most once; rows that occur nowhere
            belong to nobody.
        offsets (`np.ndarray` of shape `(num_clients + 1,)`, `int64`):
            The rows of client `i` are `indices[offsets[i]:offsets[i + 1]]`.

    Raises:
        `ValueError`: If an id is empty or occurs twice, if the offsets do not fit, or if a client has no rows.

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
                f"Partition: indices must be one vector of integers, got {self.indices.ndim} dimensions of"
                f" {self.indices.dtype}."
            )
        if self.offsets.shape != (len(self.client_ids) + 1,):
            raise ValueError(
                f"Partition: {len(self.client_ids)} clients need {len(self.client_ids) + 1} offsets, got an array of"
                f" shape {self.offsets.shape}."
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.indices) or bool((self.sizes < 0).any()):
            raise ValueError(
                f"Partition: offsets must rise from 0 to the number of indices ({len(self.indices)}), got"
                f" {self.offsets.tolist()[:10]} …"
            )
        raise_if_empty([self.client_ids[i] for i in np.flatnonzero(self.sizes == 0)])

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def sizes(self) -> np.ndarray:
        """`np.ndarray` of shape `(num_clients,)`: rows of each client."""
        return np.diff(self.offsets)

    def rows(self, position: int) -> np.ndarray:
        """Row numbers of the client at a position (a view, not a copy)."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def select(self, positions: Sequence[int]) -> Partition:
        """The partition of a few of the clients, in the order given."""
        pieces = [self.rows(position) for position in positions]
        offsets = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
        indices = np.concatenate(pieces) if pieces else self.indices[:0]
        return Partition([self.client_ids[position] for position in positions], indices, offsets)

    def check_rows(self, num_rows: int) -> None:
        """
        Checks a partition against the data set it is for.

        Raises:
            `ValueError`: If a row number is outside the data set, or belongs to two clients.
        """
        if len(self.indices) == 0:
            return
        lowest, highest = int(self.indices.min()), int(self.indices.max())
        if lowest < 0 or highest >= num_rows:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"The partition names row {wrong}, but the data set has the rows 0 to {num_rows - 1}.")
        counts = np.bincount(self.indices, minlength=num_rows)
        if int(counts.max()) > 1:
            raise ValueError(
                f"The partition gives row {int(counts.argmax())} away {int(counts.max())} times. A row belongs to one"
                " client at most."
            )

    @classmethod
    def from_owners(cls, client_ids: Sequence[str], owners: np.ndarray) -> Partition:
        """
        Builds a partition from each row's owner. The rows of a client keep their order.

        Args:
            client_ids (`Sequence[str]`):
                One id for each client.
            owners (`np.ndarray` of shape `(num_rows,)`, integer):
                Position in `client_ids` of the client that gets the row; `-1` gives the row to nobody.
        """
        # numpy sorts 16-bit integers by radix: 10 times faster than a stable sort of wider ones
        narrow = owners.astype(np.int16 if len(client_ids) < 2**15 else np.int32)
        order = np.argsort(narrow, kind="stable").astype(row_number_dtype(len(owners)))
        sizes = np.bincount(owners + 1, minlength=len(client_ids) + 1)
        num_unowned, sizes = int(sizes[0]), sizes[1:]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(list(client_ids), order[num_unowned:], offsets)


@dataclass(frozen=True)
class Partitioner(ABC):
    """
    Cuts one data set into clients.

    A partitioner is a frozen dataclass: its fields are its settings, which are written beside a saved partition and
    on the cards. It draws from a generator of its own, so that a seed gives the same partition in every process.

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
        Args:
            dataset (`datasets.Dataset`): The rows to give away. They are not copied.

        Returns:
            `Partition`: Each client's row numbers. Every client has at least one row.
        """

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        """
        Cuts several splits so that a client has the same share of each.

        Whatever is learned from rows (a prior over labels, clusters, which clients there are) is learned from the
        *first* split and holds for the others, so that a client's test rows follow its training rows. The first
        split is cut as [`~Partitioner.partition`] cuts it.

        Args:
            splits (`Mapping[str, datasets.Dataset]` or `datasets.DatasetDict`): Split name to rows, training first.

        Returns:
            `dict[str, Partition]`: A partition of each split.
        """
        # Right where shares follow from the settings alone; the others override it.
        check_splits(splits)
        return {name: self.partition(dataset) for name, dataset in splits.items()}

    def settings(self) -> dict[str, Any]:
        """
        All constructor arguments with their values, as JSON can hold them.

        A partitioner among them is a dictionary with its name and settings, a function is its name.
        """
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def reseeded(self: PartitionerType, key: str) -> PartitionerType:
        """The same partitioner with another seed, which follows from its own and a key, if it has one."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "seed":
                # Not hash(), which differs between processes.
                derived = np.random.SeedSequence([value, zlib.crc32(key.encode())]).generate_state(1)
                changes["seed"] = int(derived[0])
            elif isinstance(value, Partitioner):
                changes[field.name] = value.reseeded(key)
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, Partitioner):
        return {"partitioner": type(value).__name__, **value.settings()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value):
        named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value


def check_splits(splits: object) -> None:
    """Raises `TypeError` or `ValueError` unless there is at least one split and each is a `datasets.Dataset`."""
    if not isinstance(splits, Mapping):
        raise TypeError(
            f"partition_splits: expected a mapping from split name to Dataset, got {type(splits).__name__}. For one"
            " data set, call partition."
        )
    if not splits:
        raise ValueError("partition_splits: the mapping is empty, so there is nothing to cut.")
    for name, dataset in splits.items():
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"partition_splits: the split {name!r} is a {type(dataset).__name__}, expected a datasets.Dataset."
            )


def check_whole_number(owner: Partitioner, name: str, minimum: int) -> None:
    """Raises `ValueError` unless a setting is a whole number, at least `minimum`."""
    value = getattr(owner, name)
    if isinstance(value, np.integer):
        value = int(value)  # settings are written as JSON
        object.__setattr__(owner, name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{type(owner).__name__}: {name} must be a whole number from {minimum}, got {value!r}.")


def check_concentration(owner: Partitioner, name: str) -> None:
    """Raises `ValueError` unless a setting is a finite number above zero."""
    value = getattr(owner, name)
    if isinstance(value, (np.integer, np.floating)):
        value = float(value)
        object.__setattr__(owner, name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(
            f"{type(owner).__name__}: {name} must be a finite number above 0, got {value!r}. It concentrates the"
            " Dirichlet distribution: small values make clients differ, large ones make them alike."
        )


def check_column_name(owner: Partitioner, name: str) -> None:
    """Raises `ValueError` unless a setting is the name of a column."""
    value = getattr(owner, name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{type(owner).__name__}: {name} must be the name of a column, got {value!r}.")


def check_enough_rows(owner: Partitioner, num_rows: int, num_clients: int, min_size: int, split: str = "") -> None:
    """Raises `ValueError` unless the rows suffice for that many clients."""
    if num_rows >= num_clients * min_size:
        return
    where = f" of the split {split!r}" if split else ""
    each = f" with at least {min_size} each" if min_size > 1 else ""
    at_most = num_rows // min_size
    lower = ", lower min_size" if min_size > 1 else ""
    advice = f"Ask for at most {at_most} clients{lower}, or pass more rows" if at_most else f"Pass more rows{lower}"
    raise ValueError(
        f"{type(owner).__name__}: {num_clients} clients{each} cannot share {num_rows} rows{where}. {advice}."
    )


def number_clients(num_clients: int) -> list[str]:
    """`"0"`, `"1"`, …"""
    return [str(position) for position in range(num_clients)]


def row_number_dtype(num_rows: int) -> type[np.signedinteger]:
    """The smallest of `int32` and `int64` that counts the rows."""
    return np.int32 if num_rows < 2**31 else np.int64


def check_client_ids(client_ids: Sequence[str]) -> None:
    """Raises `ValueError` unless the ids are strings, not empty and unique."""
    if len(set(client_ids)) == len(client_ids) and all(isinstance(i, str) and i for i in client_ids):
        return
    seen: set[str] = set()
    for client_id in client_ids:
        if not isinstance(client_id, str):
            raise ValueError(f"A client id must be a string, got {client_id!r} ({type(client_id).__name__}).")
        if not client_id:
            raise ValueError("A client id is the empty string. Give every client a name.")
        if client_id in seen:
            raise ValueError(f"The client id {client_id!r} occurs twice. Ids name clients, so they must be unique.")
        seen.add(client_id)


def raise_if_empty(client_ids: Sequence[str]) -> None:
    """Raises `ValueError` with the names of the clients that have no rows, if there are any."""
    if client_ids:
        shown = ", ".join(repr(client_id) for client_id in client_ids[:5])
        more = f" and {len(client_ids) - 5} more" if len(client_ids) > 5 else ""
        raise ValueError(
            f"A client without rows cannot train: {shown}{more}. Leave it out, or make fewer clients from the rows."
        )
