"""`FederatedSplits`: the methods of `FederatedDatasetDict`, for any class of splits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from datasets import Dataset, DatasetDict
from huggingface_hub import CommitInfo

from .client_ids import check_known, check_requested_clients
from .federated_dataset_transforms import FederatedDatasetTransformsMixin
from .fednlp import read_fednlp, write_fednlp
from .hub import fetch_split, read_hub_partition
from .partitioners.base import Partitioner
from .partitioners.flower import as_partitioner
from .source import load_source
from .storage.folder import StorageOptions, open_folder, open_split
from .storage.partition_file import PartitionFile, check_split_name
from .storage.publishing import push_splits, save_splits


if TYPE_CHECKING:
    from typing_extensions import Self


# The class of the splits.
Clients = TypeVar("Clients", bound=FederatedDatasetTransformsMixin)


class FederatedSplits(dict[str, Clients]):
    """
    A dictionary from split name to the clients of the split, whose class is the attribute `dataset_class`.

    [`FederatedDatasetDict`] has an example.
    """

    dataset_class: ClassVar[Any]

    def __init__(self, *args: Any, **kwargs: Clients) -> None:
        super().__init__(*args, **kwargs)
        for split, clients in self.items():
            check_split_name(split)
            if not isinstance(clients, self.dataset_class):
                raise TypeError(
                    f"FederatedDatasetDict: the split {split!r} is a {type(clients).__name__}, expected a"
                    " FederatedDataset."
                )

    @classmethod
    def from_dataset(
        cls, dataset: Mapping[str, Any], partitioner: Partitioner, token: bool | str | None = None
    ) -> Self:
        """
        Partition all splits of a dataset, so that a client has the same proportions in each split.

        Args:
            dataset (`datasets.DatasetDict` or a mapping from split to [`DatasetSource`]):
                The splits. A partitioner that fits a model to the data fits it on the first split.
            partitioner ([`Partitioner`]): Assigns the rows to clients.
            token (`bool` or `str`, *optional*): The token for `DatasetSource`s, as in `huggingface_hub`.

        Raises:
            `TypeError`: If `dataset` is not a mapping with at least one split.
            `ValueError`: If the partitioner cannot partition the splits.
        """
        if not isinstance(dataset, Mapping) or not dataset:
            raise TypeError(
                "FederatedDatasetDict.from_dataset: expected a DatasetDict with splits, got"
                f" {type(dataset).__name__}. Use FederatedDataset.from_dataset for a single dataset."
            )
        partitioner = as_partitioner(partitioner)
        loaded = {
            split: load_source(rows, "FederatedDatasetDict.from_dataset", token) for split, rows in dataset.items()
        }
        partitions = partitioner.partition_splits({split: rows for split, (rows, _) in loaded.items()})
        return cls(
            {
                split: cls.dataset_class.from_partition(rows, partitions[split], partitioner, origin)
                for split, (rows, origin) in loaded.items()
            }
        )

    @classmethod
    def from_dict(cls, clients: Mapping[Any, Mapping[str, Dataset]]) -> Self:
        """
        Create a federated dataset from the splits of each client.

        Args:
            clients (`Mapping[str, datasets.DatasetDict]`): Client id to the splits of this client. A client may lack a
                split.

        Raises:
            `ValueError`, `TypeError`: As in [`FederatedDataset.from_dict`], for each split.
        """
        splits: dict[str, dict[Any, Dataset]] = {}
        for client_id, client_splits in clients.items():
            for split, rows in client_splits.items():
                splits.setdefault(split, {})[client_id] = rows
        return cls({split: cls.dataset_class.from_dict(rows) for split, rows in splits.items()})

    @classmethod
    def load_from_disk(
        cls,
        path: str | os.PathLike[str],
        clients: Sequence[str] | None = None,
        sources: Mapping[str, Dataset] | None = None,
    ) -> Self:
        """
        Load all splits of a folder. See [`FederatedDataset.load_from_disk`].

        Args:
            path (`str`): The folder.
            clients (`Sequence[str]`, *optional*): Ids of the clients to load. Defaults to all clients.
            sources (`Mapping[str, datasets.Dataset]`, *optional*): For each split, the rows that were partitioned.
        """
        partition_file = open_folder(path)

        def read(split: str, chosen: Sequence[str] | None) -> Any:
            return open_split(partition_file, Path(path), split, chosen, (sources or {}).get(split))

        return cls._from_stored(partition_file, clients, read)

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        clients: Sequence[str] | None = None,
        revision: str | None = None,
        token: bool | str | None = None,
        cache_dir: str | None = None,
        sources: Mapping[str, Dataset] | None = None,
    ) -> Self:
        """
        Download all splits of some or all clients. The other arguments are those of [`FederatedDataset.from_hub`].

        Args:
            sources (`Mapping[str, datasets.Dataset]`, *optional*): For each split, the rows that were partitioned.
        """
        partition_file, snapshot = read_hub_partition(repo_id, revision, token, cache_dir)

        def fetch(split: str, chosen: Sequence[str] | None) -> Any:
            source = (sources or {}).get(split)
            return fetch_split(repo_id, partition_file, snapshot, split, chosen, token, cache_dir, source)

        return cls._from_stored(partition_file, clients, fetch)

    @classmethod
    def from_fednlp_h5(
        cls, data_file: str | os.PathLike[str], partition_file: str | os.PathLike[str], method: str
    ) -> Self:
        """Read all splits of FedNLP files. Arguments and errors as in [`FederatedDataset.from_fednlp_h5`]."""
        splits = read_fednlp(data_file, partition_file, method)
        partitioning = {"partitioner": "fednlp", "method": method}
        return cls({split: cls.dataset_class(rows, partitioning) for split, rows in splits.items()})

    def to_fednlp_h5(
        self,
        data_file: str | os.PathLike[str],
        partition_file: str | os.PathLike[str],
        method: str,
        task_type: str,
    ) -> None:
        """
        Write the splits `train` and `test` to files in the format of FedNLP. Requires `h5py` (extra `h5py`).

        Clients are numbered in order, unless their ids already are `0`, `1`, ….

        Args:
            data_file (`str`): The data file to write.
            partition_file (`str`): The partition file to write.
            method (`str`): Name of the partition in the file.
            task_type (`str`): A task of [`hf_federated.data.fednlp`]. The dataset must have the columns of the task.

        Raises:
            `ValueError`: If the task is unknown, if a column is missing, or if there is a split other than `train` and
                `test`.
            `ImportError`: If h5py is not installed.
        """
        rows = {split: clients.rows for split, clients in self.items()}
        write_fednlp(rows, data_file, partition_file, method, task_type)

    @classmethod
    def _from_stored(
        cls, partition_file: PartitionFile, clients: Sequence[str] | None, read: Callable[..., Any]
    ) -> Self:
        if clients is not None:
            check_requested_clients(clients)
            check_known(clients, dict.fromkeys(client.client_id for client in partition_file.clients))
        splits = {}
        for split in partition_file.splits:
            available = {client.client_id for client in partition_file.clients_of(split)}
            chosen = None if clients is None else [client_id for client_id in clients if client_id in available]
            if chosen != []:
                splits[split] = cls.dataset_class.from_stored(partition_file, split, read(split, chosen))
        return cls(splits)

    @property
    def client_ids(self) -> list[str]:
        """The clients of all splits. They are ordered by the first split that contains them."""
        return list(dict.fromkeys(client_id for clients in self.values() for client_id in clients))

    @property
    def num_rows(self) -> dict[str, dict[str, Any]]:
        """Number of rows of each client, for each split."""
        return {split: clients.num_rows for split, clients in self.items()}

    @property
    def column_names(self) -> dict[str, list[str]]:
        """The columns of each split."""
        return {split: clients.column_names for split, clients in self.items()}

    def client(self, client_id: str) -> DatasetDict:
        """
        Return the splits of one client.

        Raises:
            `KeyError`: If no split contains the client.
        """
        self._check_clients([client_id])
        return DatasetDict({split: clients[client_id] for split, clients in self.items() if client_id in clients})

    def select_clients(self, client_ids: Sequence[str]) -> Self:
        """Return some of the clients, in the given order. Raises `KeyError` if no split contains a client."""
        self._check_clients(client_ids)
        chosen = {split: [i for i in client_ids if i in clients] for split, clients in self.items()}
        return type(self)({split: self[split].select_clients(ids) for split, ids in chosen.items() if ids})

    def map(self, function: Callable[..., Any] | None = None, **kwargs: Any) -> Self:
        """Apply [`FederatedDataset.map`] to all splits."""
        return self._each(lambda clients: clients.map(function, **kwargs))

    def filter(
        self, function: Callable[..., Any] | None = None, drop_empty_clients: bool = False, **kwargs: Any
    ) -> Self:
        """Apply [`FederatedDataset.filter`] to all splits."""
        return self._each(lambda clients: clients.filter(function, drop_empty_clients, **kwargs))

    def shuffle(self, seed: int = 0, buffer_size: int = 1000) -> Self:
        """Apply [`FederatedDataset.shuffle`] to all splits."""
        return self._each(lambda clients: clients.shuffle(seed, buffer_size))

    def with_transform(
        self, transform: Callable[..., Any], columns: list[str] | None = None, output_all_columns: bool = False
    ) -> Self:
        """Apply [`FederatedDataset.with_transform`] to all splits."""
        return self._each(lambda clients: clients.with_transform(transform, columns, output_all_columns))

    def with_format(
        self,
        type: str | None = None,
        columns: list[str] | None = None,
        output_all_columns: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Apply [`FederatedDataset.with_format`] to all splits."""
        return self._each(lambda clients: clients.with_format(type, columns, output_all_columns, **kwargs))

    def class_encode_column(self, column: str, include_nulls: bool = False) -> Self:
        """
        Convert a column to `ClassLabel` in all splits, with the same class names in all splits and for all clients.

        The names are the sorted values of all splits. Arguments and errors as in
        [`FederatedDataset.class_encode_column`].
        """
        names: set[str] = set().union(*(clients.class_names(column, include_nulls) for clients in self.values()))
        return self._each(lambda clients: clients.encode_classes(column, sorted(names), include_nulls))

    def remove_columns(self, column_names: str | list[str]) -> Self:
        """Remove columns from all splits."""
        return self._each(lambda clients: clients.remove_columns(column_names))

    def select_columns(self, column_names: str | list[str]) -> Self:
        """Keep only these columns in all splits."""
        return self._each(lambda clients: clients.select_columns(column_names))

    def rename_column(self, original_column_name: str, new_column_name: str) -> Self:
        """Rename a column in all splits."""
        return self._each(lambda clients: clients.rename_column(original_column_name, new_column_name))

    def rename_columns(self, column_mapping: dict[str, str]) -> Self:
        """Rename several columns in all splits."""
        return self._each(lambda clients: clients.rename_columns(column_mapping))

    def cast_column(self, column: str, feature: Any) -> Self:
        """Cast a column to another feature in all splits."""
        return self._each(lambda clients: clients.cast_column(column, feature))

    def save_to_disk(
        self,
        path: str | os.PathLike[str],
        label_column: str | None = None,
        index_only: bool = False,
        max_shard_size: int | str = "500MB",
    ) -> None:
        """Write all splits to one folder. Arguments and errors as in [`FederatedDataset.save_to_disk`]."""
        save_splits(self, path, StorageOptions(label_column, index_only, max_shard_size))

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        revision: str | None = None,
        token: bool | str | None = None,
        commit_message: str | None = None,
        label_column: str | None = None,
        index_only: bool = False,
        max_shard_size: int | str = "500MB",
    ) -> CommitInfo | None:
        """Push all splits in one commit. Arguments and errors as in [`FederatedDataset.push_to_hub`]."""
        options = StorageOptions(label_column, index_only, max_shard_size)
        return push_splits(self, repo_id, options, private, revision, token, commit_message)

    def _check_clients(self, client_ids: Sequence[str]) -> None:
        check_known(client_ids, dict.fromkeys(self.client_ids), f" in any of the splits {list(self)}")

    def _each(self, function: Callable[[Clients], Clients]) -> Self:
        return type(self)({split: function(clients) for split, clients in self.items()})
