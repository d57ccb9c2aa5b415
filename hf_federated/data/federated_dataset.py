"""`FederatedDataset`: one dataset for each client, opened on access.

The rows of the source are not copied. A partition is kept as row numbers. The view of a client is built on access and
not kept, so the memory does not grow with the number of clients. The modules in `storage` and `hub.py` define the
format on disk and on the Hub. A `FederatedDatasetDict` holds several splits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset

from .client_datasets import ClientData, ClientDatasets, PartitionedDataset, SeparateDatasets
from .client_ids import check_client_ids, check_id_list, id_from_key, unknown_client
from .federated_dataset_storage import FederatedDatasetStorageMixin
from .federated_dataset_transforms import FederatedDatasetTransformsMixin
from .fednlp import read_fednlp
from .partitioners.base import Partition, Partitioner
from .partitioners.flower import as_partitioner
from .partitioners.natural import NaturalPartitioner
from .remote_datasets import RemoteDatasets
from .source import DatasetSource, load_source
from .split_stream import split_stream
from .storage.folder import SplitToStore
from .storage.partition_file import PartitionFile
from .torch_datasets import concatenate, is_map_style, is_torch_dataset, kind_of


class FederatedDataset(FederatedDatasetTransformsMixin, FederatedDatasetStorageMixin, Mapping[str, ClientData]):
    """
    A lazy mapping from client id to the `datasets.Dataset` of this client.

    Create one with [`~FederatedDataset.from_dataset`] (a partitioner assigns the rows to clients),
    [`~FederatedDataset.from_column`] (the value of a column names the client of a row) or
    [`~FederatedDataset.from_dict`] (each client already has a dataset). Iteration follows the order of the clients.
    All clients have the same columns, types and label names. Two federated datasets are equal only if they are the
    same object, because a comparison of rows would open every client.

    Args:
        rows ([`ClientDatasets`]):
            The datasets of the clients, as the three methods above create them.
        partitioning (`dict[str, Any]`, *optional*):
            The partitioning method for dataset cards: `"partitioner"` and its settings.
        origin ([`DatasetSource`], *optional*):
            The dataset on the Hub that was partitioned.

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
        num_rows: 5 (2 to 3 per client, median 2.5),
        columns: ['text', 'label'],
        partitioning: {'partitioner': 'from_column', 'column': 'movie', 'min_rows': None, 'keep_column': False}
    })
    >>> clients["Up"]["text"][:]
    ['a', 'c', 'e']
    >>> clients.map(lambda row: {"length": len(row["text"])})["Heat"][0]
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
        Partition a dataset into clients.

        Columns that only name the client of a row are dropped ([`NaturalPartitioner`] and partitioners that contain
        one), because clients must not train on their names. `NaturalPartitioner(column, keep_column=True)` keeps the
        column.

        Args:
            dataset (`datasets.Dataset` or [`DatasetSource`]):
                The rows. They are not copied. A `DatasetSource` is loaded at the current commit of its revision, and
                this commit is stored together with the partition.
            partitioner ([`Partitioner`] or `flwr_datasets.partitioner.Partitioner`):
                Assigns the rows to clients. A partitioner of Flower is copied first, so it can be used again.
            token (`bool` or `str`, *optional*):
                The token for a `DatasetSource`, as in `huggingface_hub`.

        Raises:
            `TypeError`: If `dataset` has several splits or cannot be indexed.
            `ValueError`: If the partitioner cannot partition the dataset, or if it returns a row that does not exist
                or returns a row twice.
        """
        rows, origin = load_source(dataset, "from_dataset", token)
        partitioner = as_partitioner(partitioner)
        return cls.from_partition(rows, partitioner.partition(rows), partitioner, origin)

    @classmethod
    def from_partition(
        cls, dataset: Dataset, partition: Partition, partitioner: Partitioner, origin: DatasetSource | None = None
    ) -> FederatedDataset:
        """
        Create a federated dataset from the partition that a partitioner returned.

        Raises:
            `TypeError`: If the partitioner did not return a [`Partition`].
            `ValueError`: If the partition contains a row that does not exist, or contains a row twice.
        """
        if not isinstance(partition, Partition):
            raise TypeError(f"{type(partitioner).__name__}.partition() must return a Partition, got {partition!r}.")
        partition.check_rows(len(dataset))
        partitioning = {"partitioner": type(partitioner).__name__, **partitioner.settings()}
        rows = _without_naming_columns(dataset, partitioner)
        return cls(PartitionedDataset(rows, partition), partitioning, origin)

    @classmethod
    def from_column(
        cls,
        dataset: Dataset | IterableDataset | DatasetSource,
        column: str,
        min_rows: int | None = None,
        token: bool | str | None = None,
        keep_column: bool = False,
        clients: Sequence[str] | None = None,
    ) -> FederatedDataset:
        """
        Create one client for each value of a column, such as a speaker, a hospital or a movie.

        The id of a client is `str(value)`. The clients are sorted by value, independently of the order of the rows.
        The rows of a client keep their order.

        The column is dropped, because the name of a client is no feature of its examples. A trainer that trains on all
        columns, such as `SentenceTransformerTrainer`, would otherwise train on the name. `partition.json` and dataset
        cards record the name of the column. A stored or pushed dataset lacks the column, too: the files of a client
        are in a folder with its name. A column that is the only column of the dataset is kept.

        Args:
            dataset (`datasets.Dataset`, `datasets.IterableDataset` or [`DatasetSource`]):
                The rows, as in [`~FederatedDataset.from_dataset`]. With an `IterableDataset`, each client becomes a
                stream of the rows with its value. Each client reads the whole stream for this purpose, so streams
                that already are one per client, in `from_dict`, are faster.
            column (`str`):
                The column with the client of each row: strings, integers, booleans or dates.
            min_rows (`int`, *optional*):
                Clients with fewer rows are left out together with their rows.
            token (`bool` or `str`, *optional*):
                The token for a `DatasetSource`, as in `huggingface_hub`.
            keep_column (`bool`, *optional*, defaults to `False`):
                Whether the rows of the clients keep the column, for example because a later step reads it.
            clients (`Sequence[str]`, *optional*):
                Ids of the clients, in this order. Rows of other clients are left out. Defaults to all values of the
                column. Required for an `IterableDataset`, whose values are unknown before it is read.

        Raises:
            `ValueError`: If the column does not exist, if a row has no value in it, or if no client has `min_rows`
                rows. Also for an `IterableDataset` without `clients` or with `min_rows`.
            `KeyError`: If no row has the value of one of `clients`.
            `TypeError`: If the column type cannot name clients (floats, lists).
        """
        if isinstance(dataset, IterableDataset):
            if min_rows is not None:
                raise ValueError(
                    f"from_column: min_rows={min_rows}, but the number of rows of a client of an IterableDataset is"
                    " unknown. Leave min_rows out, and leave small clients out of `clients`."
                )
            streams = split_stream(dataset, column, clients, keep_column)
            of_stream = {"partitioner": "from_column", "column": column, "min_rows": None, "keep_column": keep_column}
            return cls(SeparateDatasets(streams), of_stream)
        dataset, origin = load_source(dataset, "from_column", token)
        partitioner = NaturalPartitioner(column, min_size=min_rows or None, keep_column=keep_column)
        partition = partitioner.partition(dataset)
        settings = {"column": column, "min_rows": min_rows, "keep_column": keep_column}
        rows = _without_naming_columns(dataset, partitioner)
        federated = cls(PartitionedDataset(rows, partition), {"partitioner": "from_column", **settings}, origin)
        return federated if clients is None else federated.select_clients(clients)

    @classmethod
    def from_dict(cls, datasets: Mapping[Any, ClientData]) -> FederatedDataset:
        """
        Create a federated dataset from one dataset for each client.

        Args:
            datasets (`Mapping[str, datasets.Dataset]` or `datasets.DatasetDict`):
                Client id to dataset. Integer ids are converted to strings. A value may also be a
                `datasets.IterableDataset`, or a `torch.utils.data.Dataset` (map-style or iterable). The columns of a
                dataset of torch, and the number of rows of an iterable dataset, are unknown, so methods that need
                them raise an error.

        Raises:
            `ValueError`: If the mapping is empty, if a client has no rows, if two ids are equal, or if clients differ
                in columns, types or the order of label names.
            `TypeError`: If an id is neither a string nor an integer, if a value is not a dataset, or if a map-style
                dataset has no length.
        """
        if not isinstance(datasets, Mapping):
            raise TypeError(f"from_dict: expected a mapping from client id to Dataset, got {type(datasets).__name__}.")
        if not datasets:
            raise ValueError("from_dict: the mapping is empty, so there are no clients. Pass at least one client.")
        client_ids = [id_from_key(key) for key in datasets]
        check_client_ids(client_ids)
        clients = dict(zip(client_ids, datasets.values(), strict=True))
        for client_id, dataset in clients.items():
            if not isinstance(dataset, (Dataset, IterableDataset)) and not is_torch_dataset(dataset):
                raise TypeError(
                    f"from_dict: client {client_id!r} is a {type(dataset).__name__}, expected a datasets.Dataset or a"
                    " torch.utils.data.Dataset. Convert a list of rows with Dataset.from_list(rows). Pass one split of"
                    " a DatasetDict."
                )
            if is_map_style(dataset) and not isinstance(dataset, Sized):
                raise TypeError(
                    f"from_dict: client {client_id!r} is a {kind_of(dataset)} without a length. Define `__len__`, or"
                    " make it a torch.utils.data.IterableDataset."
                )
        return cls(SeparateDatasets(clients))

    @classmethod
    def from_fednlp_h5(
        cls,
        data_file: str | os.PathLike[str],
        partition_file: str | os.PathLike[str],
        method: str,
        split: str = "train",
    ) -> FederatedDataset:
        """
        Read one split of a dataset and a partition from files in the format of FedNLP. Requires `h5py` (extra `h5py`).

        The columns are described in [`hf_federated.data.fednlp`]. The clients are sorted by number.

        Args:
            data_file (`str`):
                The data file, `<name>_data.h5`.
            partition_file (`str`):
                The partition file, `<name>_partition.h5`.
            method (`str`):
                Name of the partition, for example `"niid_label_clients=100_alpha=1.0"`.
            split (`str`, *optional*, defaults to `"train"`):
                `"train"` or `"test"`. [`FederatedDatasetDict.from_fednlp_h5`] reads both splits.

        Raises:
            `ValueError`: If the partition or the split does not exist, or if the partition contains a row that does
                not exist or contains a row twice.
            `ImportError`: If h5py is not installed.
        """
        splits = read_fednlp(data_file, partition_file, method)
        if split not in splits:
            raise ValueError(f"{partition_file}: {method!r} has no split {split!r}. It has: {', '.join(splits)}.")
        return cls(splits[split], {"partitioner": "fednlp", "method": method})

    @classmethod
    def from_stored(cls, partition_file: PartitionFile, split: str, rows: ClientDatasets) -> FederatedDataset:
        """Create a federated dataset from one stored split and the metadata in `partition.json`."""
        return cls(rows, partition_file.partitioning.get(split), partition_file.sources.get(split))

    def split_to_store(self) -> SplitToStore:
        """Return the content that `storage` writes for this federated dataset."""
        return SplitToStore(self._rows, self.partitioning, self.origin)

    def __getitem__(self, client_id: str) -> Any:
        if client_id not in self._rows.positions:
            raise unknown_client(client_id, self._rows.client_ids)
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
        """The ids of the clients, in order."""
        return list(self._rows.client_ids)

    @property
    def is_remote(self) -> bool:
        """Whether the clients are on other machines, so that their examples cannot be read."""
        return isinstance(self._rows, RemoteDatasets)

    @property
    def num_rows(self) -> dict[str, Any]:
        """`dict[str, int]`: Number of rows of each client. No client is opened. `None` for an `IterableDataset`."""
        return dict(zip(self._rows.client_ids, self._rows.num_rows(), strict=True))

    @property
    def column_names(self) -> list[str]:
        """The columns that all clients have. Empty if the columns are unknown before rows are read."""
        return self._rows.column_names

    @property
    def features(self) -> Features | None:
        """The types of the columns, including label names. `None` if they are unknown before rows are read."""
        return self._rows.features

    @property
    def naming_columns(self) -> list[str]:
        """The columns that name the client of a row, whether they were kept or dropped when it was partitioned."""
        return _naming_columns(self.partitioning or {})

    @property
    def source(self) -> Dataset | None:
        """The dataset that was partitioned, with the columns of the clients; `None` for separate datasets."""
        return self._rows.source if isinstance(self._rows, PartitionedDataset) else None

    @property
    def partition(self) -> Partition | None:
        """The rows of `source` that each client has; `None` if each client has a separate dataset."""
        return self._rows.partition if isinstance(self._rows, PartitionedDataset) else None

    def select_clients(self, client_ids: Sequence[str]) -> FederatedDataset:
        """
        Return a federated dataset with some of the clients, in the given order.

        Raises:
            `KeyError`: If a client does not exist. The message lists similar ids.
            `ValueError`: If `client_ids` is empty or contains an id twice.
            `TypeError`: If `client_ids` is a string.
        """
        client_ids = client_ids if isinstance(client_ids, str) else list(client_ids)
        check_id_list(client_ids)
        for client_id in client_ids:
            if client_id not in self:
                raise unknown_client(client_id, self._rows.client_ids)
        check_client_ids(client_ids)
        return FederatedDataset(self._rows.select(client_ids), self.partitioning, self.origin)

    def to_dataset(self) -> Dataset:
        """
        Return the rows of all clients in one `datasets.Dataset`, in the order of the clients.

        The client ids are lost, unless they are in a column.

        Raises:
            `TypeError`: If a client has an `IterableDataset` or a dataset of torch.
        """
        return self._rows.pooled()

    def pooled_examples(self) -> Any:
        """
        Return the examples of all clients for an evaluation.

        Returns:
            `datasets.Dataset` or `torch.utils.data.ConcatDataset`: [`~FederatedDataset.to_dataset`]. If a client has a
            map-style `torch.utils.data.Dataset`, a `ConcatDataset` of the same examples in the same order.
        """
        datasets = [self[client_id] for client_id in self] if isinstance(self._rows, SeparateDatasets) else []
        return concatenate(datasets) if any(map(is_map_style, datasets)) else self.to_dataset()

    def _with_rows(self, rows: ClientDatasets) -> FederatedDataset:
        return FederatedDataset(rows, self.partitioning, self.origin)

    def _describe_sizes(self) -> str:
        sizes = [size for size in self.num_rows.values() if size is not None]
        if len(sizes) < len(self):
            return f"unknown for {len(self) - len(sizes)} iterable clients, {sum(sizes)} for the remaining clients"
        return f"{sum(sizes)} ({min(sizes)} to {max(sizes)} per client, median {float(np.median(sizes)):g})"


def _naming_columns(partitioning: Mapping[str, Any]) -> list[Any]:
    """Read the columns that name the client of a row from the settings of a partitioner."""
    names_clients = partitioning.get("partitioner") in ("from_column", NaturalPartitioner.__name__)
    nested = [_naming_columns(value) for value in partitioning.values() if isinstance(value, Mapping)]
    return [*([partitioning.get("column")] if names_clients else []), *(column for part in nested for column in part)]


def _without_naming_columns(dataset: Dataset, partitioner: Partitioner) -> Dataset:
    """Drop the columns that only name the client of a row. At least one column remains."""
    naming = [column for column in dict.fromkeys(partitioner.naming_columns) if column in dataset.column_names]
    if not naming or len(naming) == len(dataset.column_names):
        return dataset
    return dataset.remove_columns(naming)
