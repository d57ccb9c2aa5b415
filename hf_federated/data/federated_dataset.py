"""`FederatedDataset`: one data set for each client, opened when it is asked for.

Rows are never copied to make one. A partition of a source is kept as row numbers; a client's view of them is built on
access and not retained, so that a thousand clients cost no more memory than two. `storage.py` and `hub.py` know how
they lie on disk and on the Hub; several splits at once are a `FederatedDatasetDict`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, IterableDataset
from huggingface_hub import CommitInfo

from .client_datasets import (
    ClientData,
    ClientDatasets,
    PartitionedDataset,
    SeparateDatasets,
    check_not_empty,
    check_same_schema,
)
from .column_values import check_columns
from .fednlp import read_fednlp
from .hub import fetch_split, read_hub_partition
from .partitioners.base import Partition, Partitioner, check_client_ids
from .partitioners.flower import adopt
from .partitioners.natural import NaturalPartitioner
from .source import DatasetSource
from .storage.folder import SplitToStore, open_folder, open_split
from .storage.partition_file import PartitionFile
from .storage.publishing import push_splits, save_splits


class FederatedDataset(Mapping[str, ClientData]):
    """
    A lazy mapping from client id to that client's `datasets.Dataset`.

    Make one with [`~FederatedDataset.from_dataset`] (a partitioner cuts a data set), [`~FederatedDataset.from_column`]
    (a column says whose a row is) or [`~FederatedDataset.from_dict`] (each client has a data set already). Iteration
    is in the order of the clients. All clients have the same columns, types and label names. Two federated data sets
    are equal only if they are the same object: comparing rows would open every client.

    Args:
        rows ([`ClientDatasets`]):
            Where the rows lie; the three methods above make it.
        partitioning (`dict[str, Any]`, *optional*):
            How the rows were given away, for cards: `"partitioner"` and its settings.
        origin ([`DatasetSource`], *optional*):
            The data set on the Hub that was cut.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset
    >>> reviews = Dataset.from_dict(
    ...     {"movie": ["Up", "Heat", "Up", "Heat", "Up"], "text": ["a", "b", "c", "d", "e"], "label": [1, 0, 1, 1, 0]}
    ... )
    >>> clients = FederatedDataset.from_column(reviews, "movie")
    >>> clients
    FederatedDataset({
        num_clients: 2,
        num_rows: 5 (2 to 3 a client, median 2.5),
        columns: ['movie', 'text', 'label'],
        partitioning: {'partitioner': 'from_column', 'column': 'movie', 'min_rows': None}
    })
    >>> clients["Up"]["text"][:]
    ['a', 'c', 'e']
    >>> clients.remove_columns("movie").map(lambda row: {"length": len(row["text"])})["Heat"][0]
    {'text': 'b', 'label': 0, 'length': 1}

    ```
    """

    def __init__(
        self,
        rows: ClientDatasets,
        partitioning: dict[str, Any] | None = None,
        origin: DatasetSource | None = None,
    ) -> None:
        self._rows = rows
        self.partitioning = partitioning
        self.origin = origin

    @classmethod
    def from_dataset(
        cls, dataset: Dataset | DatasetSource, partitioner: Partitioner, token: bool | str | None = None
    ) -> FederatedDataset:
        """
        Cuts a data set into clients.

        Args:
            dataset (`datasets.Dataset` or [`DatasetSource`]):
                The rows; they are not copied. A `DatasetSource` is loaded at the commit that its revision means now,
                which is then written beside the partition.
            partitioner ([`Partitioner`] or `flwr_datasets.partitioner.Partitioner`):
                Says which rows each client gets. One of Flower's is copied first, so that it can be used again.
            token (`bool` or `str`, *optional*):
                For a `DatasetSource`, as in `huggingface_hub`.

        Raises:
            `TypeError`: If the data set has splits or cannot be indexed.
            `ValueError`: If the partitioner cannot do it, or hands out rows that are not there, or a row twice.
        """
        rows, origin = load_source(dataset, "from_dataset", token)
        partitioner = adopt(partitioner)
        check_is_partitioner(partitioner)
        return cls.from_partition(rows, partitioner.partition(rows), partitioner, origin)

    @classmethod
    def from_partition(
        cls, dataset: Dataset, partition: Partition, partitioner: Partitioner, origin: DatasetSource | None = None
    ) -> FederatedDataset:
        """
        Takes the rows of a data set as a partitioner has given them away.

        Raises:
            `TypeError`: If the partitioner returned no [`Partition`].
            `ValueError`: If it hands out rows that are not there, or a row twice.
        """
        if not isinstance(partition, Partition):
            raise TypeError(f"{type(partitioner).__name__}.partition() must return a Partition, got {partition!r}.")
        partition.check_rows(len(dataset))
        partitioning = {"partitioner": type(partitioner).__name__, **partitioner.settings()}
        return cls(PartitionedDataset(dataset, partition), partitioning, origin)

    @classmethod
    def from_column(
        cls,
        dataset: Dataset | DatasetSource,
        column: str,
        min_rows: int | None = None,
        token: bool | str | None = None,
    ) -> FederatedDataset:
        """
        Makes a client of each value of a column: a speaker, a hospital, a movie.

        Clients are named `str(value)` and sorted by value, whatever the order of rows; a client's rows stay in their
        order.

        Args:
            dataset (`datasets.Dataset` or [`DatasetSource`]):
                The rows, as in [`~FederatedDataset.from_dataset`].
            column (`str`):
                The column that says whose a row is: strings, whole numbers, truth values or dates.
            min_rows (`int`, *optional*):
                Clients with fewer rows are left out, and their rows with them.
            token (`bool` or `str`, *optional*):
                For a `DatasetSource`, as in `huggingface_hub`.

        Raises:
            `ValueError`: If there is no such column, a row has no value in it, or no client has `min_rows` rows.
            `TypeError`: If the type of the column does not name things (floats, lists).
        """
        dataset, origin = load_source(dataset, "from_column", token)
        partition = NaturalPartitioner(column, min_size=min_rows or None).partition(dataset)
        partitioning = {"partitioner": "from_column", "column": column, "min_rows": min_rows}
        return cls(PartitionedDataset(dataset, partition), partitioning, origin)

    @classmethod
    def from_dict(cls, datasets: Mapping[Any, ClientData]) -> FederatedDataset:
        """
        Takes one data set for each client as it is.

        Args:
            datasets (`Mapping[str, datasets.Dataset]` or `datasets.DatasetDict`):
                Client id to rows. Whole numbers as ids become strings. A `datasets.IterableDataset` is accepted as a
                value: its number of rows is then `None`, and it cannot be pooled by [`~FederatedDataset.to_dataset`].

        Raises:
            `ValueError`: If there is no client, a client has no rows, two ids are the same, or clients differ in
                columns, types or the order of label names.
            `TypeError`: If an id is neither a string nor a whole number, or a value is not a data set.
        """
        if not isinstance(datasets, Mapping):
            raise TypeError(f"from_dict: expected a mapping from client id to Dataset, got {type(datasets).__name__}.")
        if not datasets:
            raise ValueError("from_dict: the mapping is empty, so there are no clients.")
        client_ids = [_id_from_key(key) for key in datasets]
        check_client_ids(client_ids)
        clients = dict(zip(client_ids, datasets.values(), strict=True))
        for client_id, dataset in clients.items():
            if not isinstance(dataset, (Dataset, IterableDataset)):
                raise TypeError(
                    f"from_dict: client {client_id!r} is a {type(dataset).__name__}, expected a datasets.Dataset."
                    " Lists of rows become one with Dataset.from_list(rows); of a DatasetDict, pass one split."
                )
        check_not_empty(clients)
        check_same_schema(clients)
        return cls(SeparateDatasets(clients))

    @classmethod
    def load_from_disk(
        cls,
        path: str | os.PathLike[str],
        clients: Sequence[str] | None = None,
        split: str = "train",
        source: Dataset | None = None,
    ) -> FederatedDataset:
        """
        Opens what [`~FederatedDataset.save_to_disk`] wrote.

        Rows are read when a client is opened. The files of the clients asked for are compared with their hashes.

        Args:
            path (`str`):
                The folder.
            clients (`Sequence[str]`, *optional*):
                Ids of the clients to open, in this order. All if left out.
            split (`str`, *optional*, defaults to `"train"`):
                The split.
            source (`datasets.Dataset`, *optional*):
                The rows that were cut, where only row numbers are stored and the rows are not on the Hub.

        Raises:
            `FileNotFoundError`: If the folder holds no federated data set.
            `PartitionFileError`: If a file is missing or is not the one that was written, or `source` are other rows.
            `KeyError`: If a client does not exist.
        """
        partition_file = open_folder(path)
        return cls.from_stored(partition_file, split, open_split(partition_file, Path(path), split, clients, source))

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        clients: Sequence[str] | None = None,
        split: str = "train",
        revision: str | None = None,
        token: bool | str | None = None,
        cache_dir: str | None = None,
        source: Dataset | None = None,
    ) -> FederatedDataset:
        """
        Downloads clients of a federated data set, and nothing of the others.

        Reads `partition.json`, then fetches the files of exactly these clients at the commit that it is of.

        Args:
            repo_id (`str`):
                The repository on the Hub.
            clients (`Sequence[str]`, *optional*):
                Ids of the clients, in this order. All if left out.
            split (`str`, *optional*, defaults to `"train"`):
                The split.
            revision (`str`, *optional*):
                A branch, tag or commit.
            token (`bool` or `str`, *optional*):
                As in `huggingface_hub`.
            cache_dir (`str`, *optional*):
                As in `huggingface_hub`.
            source (`datasets.Dataset`, *optional*):
                The rows that were cut, where only row numbers are published and the rows are not on the Hub.

        Raises:
            `FileNotFoundError`: If the repository holds no federated data set.
            `PartitionFileError`: If files are not those that were pushed, or `source` are other rows.
            `KeyError`: If a client does not exist.
        """
        partition_file, snapshot = read_hub_partition(repo_id, revision, token, cache_dir)
        rows = fetch_split(repo_id, partition_file, snapshot, split, clients, token, cache_dir, source)
        return cls.from_stored(partition_file, split, rows)

    @classmethod
    def from_fednlp_h5(
        cls,
        data_file: str | os.PathLike[str],
        partition_file: str | os.PathLike[str],
        method: str,
        split: str = "train",
    ) -> FederatedDataset:
        """
        Reads one split of a data set and a partition in the files of FedNLP. Needs `h5py` (extra `h5py`).

        The columns are those of [`hf_federated.data.fednlp`]; clients are in the order of their numbers.

        Args:
            data_file (`str`):
                The data, `<name>_data.h5`.
            partition_file (`str`):
                The partitions, `<name>_partition.h5`.
            method (`str`):
                The partition, for example `"niid_label_clients=100_alpha=1.0"`.
            split (`str`, *optional*, defaults to `"train"`):
                `"train"` or `"test"`; both at once with [`FederatedDatasetDict.from_fednlp_h5`].

        Raises:
            `ValueError`: If the partition or the split does not exist, names rows that are not there, or gives one
                away twice.
            `ImportError`: If h5py is not installed.
        """
        splits = read_fednlp(data_file, partition_file, method)
        if split not in splits:
            raise ValueError(f"{partition_file}: {method!r} has no split {split!r}. It has: {', '.join(splits)}.")
        return cls(splits[split], {"partitioner": "fednlp", "method": method})

    @classmethod
    def from_stored(cls, partition_file: PartitionFile, split: str, rows: ClientDatasets) -> FederatedDataset:
        """A split that was stored, with what `partition.json` says of where it comes from."""
        return cls(rows, partition_file.partitioning.get(split), partition_file.sources.get(split))

    def save_to_disk(
        self,
        path: str | os.PathLike[str],
        split: str = "train",
        label_column: str | None = None,
        index_only: bool = False,
        max_shard_size: int | str = "500MB",
    ) -> None:
        """
        Writes a folder that `load_from_disk` opens, and `datasets.load_dataset` too.

        `data/<client>/<split>-*.parquet`, `partition.json` and a card. The folder is complete or absent: a federated
        data set that is there already stays until the new one can take its place.

        Args:
            path (`str`):
                The folder. Anything in it but a federated data set is an error.
            split (`str`, *optional*, defaults to `"train"`):
                Name of the split.
            label_column (`str`, *optional*):
                Writes each client's rows of each label, of this column, into `partition.json` and the card.
            index_only (`bool`, *optional*, defaults to `False`):
                Writes row numbers instead of rows, for data that may not be copied.
            max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
                A client's rows are spread over files of about this size in memory.

        Raises:
            `FileExistsError`: If the folder holds something else.
            `TypeError`: If a client is an `IterableDataset`.
        """
        save_splits({split: self}, path, label_column, index_only, max_shard_size)

    def push_to_hub(
        self,
        repo_id: str,
        split: str = "train",
        private: bool | None = None,
        revision: str | None = None,
        token: bool | str | None = None,
        commit_message: str | None = None,
        label_column: str | None = None,
        index_only: bool = False,
        max_shard_size: int | str = "500MB",
    ) -> CommitInfo | None:
        """
        Publishes the data set as one commit: what [`~FederatedDataset.save_to_disk`] writes.

        A second push uploads only files that changed, and removes those of clients that are gone; other splits too,
        so that several are pushed together, as a [`FederatedDatasetDict`].

        Args:
            repo_id (`str`):
                The repository. It is made if there is none.
            split (`str`, *optional*, defaults to `"train"`):
                Name of the split.
            private (`bool`, *optional*):
                Whether a repository that is made is private. Its owner's default if left out. `True` refuses a
                repository that is there and public.
            revision (`str`, *optional*):
                A branch; it is made if there is none.
            token (`bool` or `str`, *optional*):
                As in `huggingface_hub`.
            commit_message (`str`, *optional*):
                Message of the commit.
            label_column (`str`, *optional*):
                Publishes each client's rows of each label. Think twice with private data: counts say something of
                each client.
            index_only (`bool`, *optional*, defaults to `False`):
                Publishes row numbers instead of rows.
            max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
                A client's rows are spread over files of about this size in memory.

        Returns:
            `CommitInfo` or `None`: The commit; `None` if the repository had all of it.

        Raises:
            `ValueError`: If the repository holds other data, or is public against `private=True`.
            `ConcurrentPushError`: If somebody else committed meanwhile; nothing was published.
        """
        return push_splits(
            {split: self},
            repo_id,
            private,
            revision,
            token,
            commit_message,
            label_column,
            index_only,
            max_shard_size,
        )

    def split_to_store(self) -> SplitToStore:
        """What `storage.py` writes of this data set."""
        return SplitToStore(self._rows, self.partitioning, self.origin)

    def __getitem__(self, client_id: str) -> Any:
        if client_id not in self._rows.positions:
            raise _unknown_client(client_id, self._rows.client_ids)
        return self._rows.open(client_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.client_ids)

    def __len__(self) -> int:
        return len(self._rows.client_ids)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._rows.positions

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        lines = [f"num_clients: {len(self)}", f"num_rows: {self._describe_sizes()}", f"columns: {self.column_names}"]
        if self.partitioning is not None:
            lines.append(f"partitioning: {self.partitioning}")
        return "FederatedDataset({\n    " + ",\n    ".join(lines) + "\n})"

    @property
    def client_ids(self) -> list[str]:
        """The clients' names, in their order."""
        return list(self._rows.client_ids)

    @property
    def num_rows(self) -> dict[str, Any]:
        """`dict[str, int]`: rows of each client, without opening one; `None` for an `IterableDataset`."""
        return dict(zip(self._rows.client_ids, self._rows.num_rows(), strict=True))

    @property
    def column_names(self) -> list[str]:
        """The columns that all clients have (empty if only iterable clients that do not know theirs)."""
        return list(self._rows.schema_dataset.column_names or [])

    @property
    def features(self) -> Features | None:
        """The types of the columns, with the label names."""
        return self._rows.schema_dataset.features

    @property
    def source(self) -> Dataset | None:
        """The data set that was cut; `None` if each client came with its own."""
        return self._rows.source if isinstance(self._rows, PartitionedDataset) else None

    @property
    def partition(self) -> Partition | None:
        """Which rows of [`~FederatedDataset.source`] each client has; `None` if each client came with its own."""
        return self._rows.partition if isinstance(self._rows, PartitionedDataset) else None

    def select_clients(self, client_ids: Sequence[str]) -> FederatedDataset:
        """
        A federated data set of a few of the clients, in the order given.

        Raises:
            `KeyError`: If a client does not exist; the message lists names that look alike.
            `ValueError`: If none is given, or one twice.
        """
        if isinstance(client_ids, str):
            raise TypeError(f"select_clients: expected a list of ids, got the string {client_ids!r}.")
        client_ids = list(client_ids)
        for client_id in client_ids:
            if client_id not in self:
                raise _unknown_client(client_id, self._rows.client_ids)
        if not client_ids:
            raise ValueError("select_clients: the list of ids is empty.")
        return FederatedDataset(self._rows.select(client_ids), self.partitioning, self.origin)

    def to_dataset(self) -> Dataset:
        """The rows of all clients in one `datasets.Dataset`, in the order of clients. Says no more whose they are."""
        return self._rows.pooled()

    def map(self, function: Callable[..., Any] | None = None, **kwargs: Any) -> FederatedDataset:
        """
        [`datasets.Dataset.map`] over all rows, keeping whose they are.

        A data set that was cut is mapped once, not client by client, and only the rows that a client has; a batched
        function then sees rows of several clients at a time. Clients of `from_dict` are mapped one after the other.

        Args:
            function (`Callable`, *optional*):
                As in `datasets.Dataset.map`. It has to return one row for each row.
            kwargs (*optional*):
                Passed on to `datasets.Dataset.map`.

        Raises:
            `ValueError`: If the number of rows changes, or clients that are mapped one after the other would share a
                cache.
        """
        for name in ("cache_file_name", "new_fingerprint"):
            if self.source is None and len(self) > 1 and kwargs.get(name) is not None:
                raise ValueError(f"map: each client is mapped on its own, and {name} would give all the first's rows.")
        return self._transform(lambda dataset: dataset.map(function, **kwargs), reads_rows=True)

    def remove_columns(self, column_names: str | list[str]) -> FederatedDataset:
        """Without these columns. Raises `ValueError` with the columns there are, if one does not exist."""
        self._check_columns(column_names)
        return self._transform(lambda dataset: dataset.remove_columns(column_names))

    def select_columns(self, column_names: str | list[str]) -> FederatedDataset:
        """With these columns only. Raises `ValueError` with the columns there are, if one does not exist."""
        self._check_columns(column_names)
        return self._transform(lambda dataset: dataset.select_columns(column_names))

    def rename_column(self, original_column_name: str, new_column_name: str) -> FederatedDataset:
        """With one column under another name. Raises `ValueError` if it does not exist, or the new name does."""
        self._check_columns(original_column_name)
        return self._transform(lambda dataset: dataset.rename_column(original_column_name, new_column_name))

    def cast_column(self, column: str, feature: Any) -> FederatedDataset:
        """With one column as another feature, for example `ClassLabel(names=["bad", "good"])`."""
        self._check_columns(column)
        return self._transform(lambda dataset: dataset.cast_column(column, feature))

    def _transform(self, function: Callable[[Any], Any], reads_rows: bool = False) -> FederatedDataset:
        return FederatedDataset(self._rows.transform(function, reads_rows), self.partitioning, self.origin)

    def _check_columns(self, columns: str | list[str]) -> None:
        if self.column_names:  # an IterableDataset may not know its columns before it is read
            check_columns(self.column_names, [columns] if isinstance(columns, str) else columns)

    def _describe_sizes(self) -> str:
        sizes = [size for size in self.num_rows.values() if size is not None]
        if len(sizes) < len(self):
            return f"unknown for {len(self) - len(sizes)} iterable clients, {sum(sizes)} in the others"
        return f"{sum(sizes)} ({min(sizes)} to {max(sizes)} a client, median {float(np.median(sizes)):g})"


def check_is_partitioner(partitioner: object) -> None:
    """Raises `TypeError` if it is something else."""
    if not isinstance(partitioner, Partitioner):
        raise TypeError(
            f"from_dataset: expected a Partitioner, got {partitioner!r}. For example: IidPartitioner(num_clients=10)."
        )


def load_source(dataset: Any, method: str, token: bool | str | None = None) -> tuple[Dataset, DatasetSource | None]:
    """
    The rows that are to be cut and, if they were named by where they lie, that place at its commit.

    Args:
        dataset (`datasets.Dataset` or [`DatasetSource`]): What a user passed.
        method (`str`): To whom, for the error.
        token (`bool` or `str`, *optional*): For a `DatasetSource`.

    Raises:
        `TypeError`: If it is neither.
    """
    if isinstance(dataset, DatasetSource):
        origin = dataset.resolved(token)
        return origin.load(token), origin
    _check_is_dataset(dataset, method)
    return dataset, None


def _check_is_dataset(dataset: object, method: str) -> None:
    if isinstance(dataset, DatasetDict):
        raise TypeError(
            f"{method}: got a DatasetDict with the splits {list(dataset)}. Pass one of them; if its entries are the"
            " clients, use FederatedDataset.from_dict."
        )
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{method}: expected a datasets.Dataset, got {type(dataset).__name__}. Rows have to be numbered to be"
            " given away, so an IterableDataset has to be saved as a Dataset first."
        )


def _id_from_key(key: object) -> str:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return str(int(key))
    raise TypeError(
        f"from_dict: a client id must be a string or a whole number, got {key!r} ({type(key).__name__}). Convert it to"
        " a string that names the client."
    )


def _unknown_client(client_id: object, known: Sequence[str]) -> KeyError:
    near = difflib.get_close_matches(str(client_id), known, n=3)
    hint = f"Did you mean {', '.join(map(repr, near))}?" if near else f"There are {len(known)}, first {known[0]!r}."
    return KeyError(f"There is no client {client_id!r}. {hint}")
