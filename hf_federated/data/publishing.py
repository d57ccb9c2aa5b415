"""Saving and pushing splits: files, counts and the card together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import CommitInfo

from .card import render_dataset_card
from .hub import README, push_folder
from .label_counts import count_labels
from .partition_file import PartitionFile
from .storage import LabelCounts, SplitToStore, save_folder, write_files


def save_splits(
    splits: Mapping[str, SplitToStore],
    path: str | os.PathLike[str],
    label_column: str | None = None,
    index_only: bool = False,
    max_shard_size: int | str = "500MB",
) -> None:
    """Writes splits to a folder. Arguments and errors as in [`FederatedDataset.save_to_disk`]."""
    save_folder(path, lambda folder: _write(folder, splits, None, None, label_column, index_only, max_shard_size))


def push_splits(
    splits: Mapping[str, SplitToStore],
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    token: bool | str | None = None,
    commit_message: str | None = None,
    label_column: str | None = None,
    index_only: bool = False,
    max_shard_size: int | str = "500MB",
) -> CommitInfo | None:
    """Publishes splits as one commit. Arguments and errors as in [`FederatedDataset.push_to_hub`]."""

    def write(folder: Path, card: str | None) -> PartitionFile:
        return _write(folder, splits, repo_id, card, label_column, index_only, max_shard_size)

    return push_folder(write, repo_id, private, revision, token, commit_message)


def _write(
    folder: Path,
    splits: Mapping[str, SplitToStore],
    repo_id: str | None,
    card: str | None,
    label_column: str | None,
    index_only: bool,
    max_shard_size: int | str,
) -> PartitionFile:
    counts = None
    if label_column is not None:
        names, by_split = count_labels({split: to_store.rows for split, to_store in splits.items()}, label_column)
        counts = LabelCounts(label_column, names, by_split)
    partition_file = write_files(folder, splits, counts, max_shard_size, index_only)
    (folder / README).write_text(render_dataset_card(partition_file, repo_id, existing=card), encoding="utf-8")
    return partition_file
