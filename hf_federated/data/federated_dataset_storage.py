"""Save federated datasets to disk, push them to the Hub, and load them again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset
from huggingface_hub import CommitInfo

from .client_datasets import ClientDatasets
from .client_mapping import ClientMapping
from .hub import fetch_split, read_hub_partition
from .storage.folder import StorageOptions, open_folder, open_split
from .storage.partition_file import PartitionFile
from .storage.publishing import push_splits, save_splits


if TYPE_CHECKING:
    from typing_extensions import Self


class FederatedDatasetStorageMixin(ClientMapping):
    """The methods of [`FederatedDataset`] that read and write folders and Hub repositories."""

    @classmethod
    def from_stored(cls, partition_file: PartitionFile, split: str, rows: ClientDatasets) -> Self:
        """Create a federated dataset from one stored split and the metadata in `partition.json`."""
        return cls(rows, partition_file.partitioning.get(split), partition_file.sources.get(split))

    @classmethod
    def load_from_disk(
        cls,
        path: str | os.PathLike[str],
        clients: Sequence[str] | None = None,
        split: str = "train",
        source: Dataset | None = None,
    ) -> Self:
        """
        Load a folder that was written by [`~FederatedDataset.save_to_disk`].

        The rows of a client are read when the client is opened. The files of the requested clients are verified
        against their hashes.

        Args:
            path (`str`):
                The folder.
            clients (`Sequence[str]`, *optional*):
                Ids of the clients to load, in this order. Defaults to all clients.
            split (`str`, *optional*, defaults to `"train"`):
                The split.
            source (`datasets.Dataset`, *optional*):
                The rows that were partitioned. Required if the folder holds only row numbers and the rows are not on
                the Hub.

        Raises:
            `FileNotFoundError`: If the folder does not contain a federated dataset.
            `PartitionFileError`: If a file is missing or was changed, or if `source` has different rows.
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
    ) -> Self:
        """
        Download some or all clients of a federated dataset from the Hub.

        The method reads `partition.json` first. It then downloads only the files of the requested clients, at the
        commit of `partition.json`.

        Args:
            repo_id (`str`):
                The repository on the Hub.
            clients (`Sequence[str]`, *optional*):
                Ids of the clients to download, in this order. Defaults to all clients.
            split (`str`, *optional*, defaults to `"train"`):
                The split.
            revision (`str`, *optional*):
                A branch, tag or commit.
            token (`bool` or `str`, *optional*):
                As in `huggingface_hub`.
            cache_dir (`str`, *optional*):
                As in `huggingface_hub`.
            source (`datasets.Dataset`, *optional*):
                The rows that were partitioned. Required if the repository holds only row numbers and the rows are not
                on the Hub.

        Raises:
            `FileNotFoundError`: If the repository does not contain a federated dataset.
            `PartitionFileError`: If a file differs from the pushed file, or if `source` has different rows.
            `KeyError`: If a client does not exist.
        """
        partition_file, snapshot = read_hub_partition(repo_id, revision, token, cache_dir)
        rows = fetch_split(repo_id, partition_file, snapshot, split, clients, token, cache_dir, source)
        return cls.from_stored(partition_file, split, rows)

    def save_to_disk(
        self,
        path: str | os.PathLike[str],
        split: str = "train",
        label_column: str | None = None,
        index_only: bool = False,
        max_shard_size: int | str = "500MB",
    ) -> None:
        """
        Write the federated dataset to a folder that `load_from_disk` and `datasets.load_dataset` can read.

        The folder contains `data/<client>/<split>-*.parquet`, `partition.json` and a dataset card. An existing
        federated dataset in the folder is kept until the new dataset is complete, so the folder is never incomplete.

        Args:
            path (`str`):
                The folder. It must be new, be empty or contain only a federated dataset.
            split (`str`, *optional*, defaults to `"train"`):
                Name of the split.
            label_column (`str`, *optional*):
                The column with the labels. The number of rows per client and label is written to `partition.json` and
                the card.
            index_only (`bool`, *optional*, defaults to `False`):
                Write row numbers instead of rows, for data that must not be copied.
            max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
                Approximate size in memory of the rows in one file. The rows of a larger client are written to several
                files.

        Raises:
            `FileExistsError`: If the folder contains files that do not belong to a federated dataset.
            `TypeError`: If a client is an `IterableDataset`.
        """
        options = StorageOptions(label_column, index_only, max_shard_size)
        save_splits({split: self}, path, options)

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
        Push the files that [`~FederatedDataset.save_to_disk`] writes to the Hub, in one commit.

        A second push uploads only the changed files. It removes the files of clients and splits that are not part of
        the new push. To publish several splits, push them together as a [`FederatedDatasetDict`].

        Args:
            repo_id (`str`):
                The repository. It is created if it does not exist.
            split (`str`, *optional*, defaults to `"train"`):
                Name of the split.
            private (`bool`, *optional*):
                Whether a new repository is private. Defaults to the setting of its owner. With `True`, a push to an
                existing public repository is an error.
            revision (`str`, *optional*):
                A branch. It is created if it does not exist.
            token (`bool` or `str`, *optional*):
                As in `huggingface_hub`.
            commit_message (`str`, *optional*):
                Message of the commit.
            label_column (`str`, *optional*):
                The column with the labels. The number of rows per client and label is published. These counts reveal
                information about each client, so set this argument with care for private data.
            index_only (`bool`, *optional*, defaults to `False`):
                Publish row numbers instead of rows.
            max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
                Approximate size in memory of the rows in one file. The rows of a larger client are written to several
                files.

        Returns:
            `CommitInfo` or `None`: The commit, or `None` if the repository is already up to date.

        Raises:
            `ValueError`: If the repository contains other data, or is public although `private=True`.
            `ConcurrentPushError`: If the repository received another commit during the push. Nothing is published.
        """
        options = StorageOptions(label_column, index_only, max_shard_size)
        return push_splits({split: self}, repo_id, options, private, revision, token, commit_message)
