"""`FederatedDataset`: one dataset for each client, opened on access.

The rows of the source are not copied. A partition is kept as row numbers. The view of a client is built on access and
not kept, so the memory does not grow with the number of clients. The modules in `storage` and `hub.py` define the
format on disk and on the Hub. A `FederatedDatasetDict` holds several splits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from datasets import Dataset, IterableDataset

from .client_datasets import ClientData, PartitionedDataset, SeparateDatasets
from .client_ids import check_client_ids, id_from_key
from .federated_dataset_storage import FederatedDatasetStorageMixin
from .federated_dataset_transforms import FederatedDatasetTransformsMixin
from .federated_splits import FederatedSplits
from .fednlp import read_fednlp
from .partitioners.base import Partition, Partitioner
from .partitioners.flower import as_partitioner
from .partitioners.natural import NaturalPartitioner
from .source import DatasetSource, load_source
from .split_stream import split_stream
from .torch_datasets import is_map_style, is_torch_dataset, kind_of
from .train_test_split import check_sizes, split_clients


class FederatedDataset(FederatedDatasetTransformsMixin, FederatedDatasetStorageMixin):
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
        settings = {"partitioner": "from_column", "column": column, "min_rows": min_rows, "keep_column": keep_column}
        if isinstance(dataset, IterableDataset):
            if min_rows is not None:
                raise ValueError(
                    f"from_column: min_rows={min_rows}, but the number of rows of a client of an IterableDataset is"
                    " unknown. Leave min_rows out, and leave small clients out of `clients`."
                )
            return cls(SeparateDatasets(split_stream(dataset, column, clients, keep_column)), settings)
        dataset, origin = load_source(dataset, "from_column", token)
        partitioner = NaturalPartitioner(column, min_size=min_rows or None, keep_column=keep_column)
        partition = partitioner.partition(dataset)
        rows = _without_naming_columns(dataset, partitioner)
        federated = cls(PartitionedDataset(rows, partition), settings, origin)
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

    def train_test_split(
        self,
        test_size: float | int | None = None,
        train_size: float | int | None = None,
        shuffle: bool = True,
        stratify_by_column: str | None = None,
        seed: int = 0,
    ) -> FederatedDatasetDict:
        """
        Split the rows of each client into training rows and test rows, as [`datasets.Dataset.train_test_split`].

        A client keeps at least one training row: a client with one row has no test row and is missing in the split
        `test`. Both splits keep the order of the rows. The draw depends on the seed and the id of the client only, so
        a client has the same test rows whichever other clients exist. Rows are not copied.

        Args:
            test_size (`float` or `int`, *optional*):
                Share of the rows of each client (rounded up), or number of rows of each client. Defaults to the rows
                that `train_size` leaves, or to 0.25 without `train_size`.
            train_size (`float` or `int`, *optional*):
                Share of the rows of each client (rounded down), or number of rows of each client. Defaults to the rows
                that `test_size` leaves.
            shuffle (`bool`, *optional*, defaults to `True`):
                Whether to draw the test rows. Otherwise, they follow the training rows.
            stratify_by_column (`str`, *optional*):
                A column of class labels, strings, integers, booleans or dates. Training rows and test rows of a client
                get the same share of each value, up to rounding. Rows without a value form one more stratum.
            seed (`int`, *optional*, defaults to `0`):
                Random seed of the draw.

        Returns:
            [`FederatedDatasetDict`]: The splits `train` and `test`.

        Raises:
            `ValueError`: If a size is invalid, if a client has too few rows for a number of rows, if no client has a
                test row, or if the column does not exist or `shuffle=False` with it.
            `TypeError`: If a client is a stream, or if the column type cannot define strata.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated import FederatedDataset
        >>> rows = Dataset.from_dict({"site": ["a"] * 10 + ["b"] * 4, "text": [f"text {i}" for i in range(14)]})
        >>> splits = FederatedDataset.from_column(rows, "site").train_test_split(test_size=0.2)
        >>> splits.num_rows
        {'train': {'a': 8, 'b': 3}, 'test': {'a': 2, 'b': 1}}

        ```
        """
        if test_size is None and train_size is None:
            test_size = 0.25
        check_sizes(test_size, train_size)
        if stratify_by_column is not None and not shuffle:
            raise ValueError(
                f"train_test_split: stratify_by_column={stratify_by_column!r} draws rows, but shuffle=False. Remove"
                " one of the two arguments."
            )
        self._check_not_streams("train_test_split")
        strata = None if stratify_by_column is None else self._ranked(stratify_by_column, "train_test_split")[0]
        parts = split_clients(self.num_rows, test_size, train_size, strata, seed if shuffle else None)
        return FederatedDatasetDict({split: self._with_rows(self.rows.take(rows)) for split, rows in parts.items()})


class FederatedDatasetDict(FederatedSplits[FederatedDataset]):
    """
    The splits of a federated dataset: a dictionary from split name to [`FederatedDataset`].

    A client may lack a split, for example a small client without test rows. The client is then missing in the dataset
    of this split. The class has the methods of `datasets.DatasetDict`, such as `map` and `remove_columns`, and applies
    them to all splits.

    Example:

    ```python
    >>> from datasets import Dataset, DatasetDict
    >>> from hf_federated import FederatedDatasetDict, IidPartitioner
    >>> train = Dataset.from_dict({"text": [f"text {i}" for i in range(8)]})
    >>> test = Dataset.from_dict({"text": ["one", "two"]})
    >>> clients = FederatedDatasetDict.from_dataset(DatasetDict(train=train, test=test), IidPartitioner(2))
    >>> clients.num_rows
    {'train': {'0': 4, '1': 4}, 'test': {'0': 1, '1': 1}}
    >>> clients.client("1")["test"]["text"][:]
    ['two']

    ```
    """

    dataset_class = FederatedDataset


def _without_naming_columns(dataset: Dataset, partitioner: Partitioner) -> Dataset:
    """Drop the columns that only name the client of a row. At least one column remains."""
    naming = [column for column in dict.fromkeys(partitioner.naming_columns) if column in dataset.column_names]
    if not naming or len(naming) == len(dataset.column_names):
        return dataset
    return dataset.remove_columns(naming)
