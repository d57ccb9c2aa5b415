"""Saving and pushing splits: files, counts, pictures and the card together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from datasets import ClassLabel
from huggingface_hub import CommitInfo
from transformers.utils import logging

from ..hub import RepositoryState, push_folder
from ..plots.partition_plots import plot_divergence, plot_label_shares, plot_sizes
from ..statistics.label_statistics import LabelCounts, jensen_shannon_divergence, label_counts
from .card import render_dataset_card
from .folder import PICTURES, README, PublishedCounts, save_folder, write_files
from .partition_file import PartitionFile


if TYPE_CHECKING:
    from ..federated_dataset import FederatedDataset

logger = logging.get_logger(__name__)

# Above this many clients the picture of all pairs takes longer to make than the rest, and shows no more.
MAX_COMPARED_CLIENTS = 1000


def save_splits(
    splits: Mapping[str, FederatedDataset],
    path: str | os.PathLike[str],
    label_column: str | None = None,
    index_only: bool = False,
    max_shard_size: int | str = "500MB",
) -> None:
    """Writes splits to a folder. Arguments and errors as in [`FederatedDataset.save_to_disk`]."""
    save_folder(
        path, lambda folder: _write(folder, splits, None, RepositoryState(), label_column, index_only, max_shard_size)
    )


def push_splits(
    splits: Mapping[str, FederatedDataset],
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

    def write(folder: Path, there: RepositoryState) -> PartitionFile:
        return _write(folder, splits, repo_id, there, label_column, index_only, max_shard_size, token)

    return push_folder(write, repo_id, private, revision, token, commit_message)


def _write(
    folder: Path,
    splits: Mapping[str, FederatedDataset],
    repo_id: str | None,
    there: RepositoryState,
    label_column: str | None,
    index_only: bool,
    max_shard_size: int | str,
    token: bool | str | None = None,
) -> PartitionFile:
    counts = None if label_column is None else count_splits(splits, label_column)
    stored = {split: clients.split_to_store() for split, clients in splits.items()}
    partition_file = write_files(folder, stored, counts, max_shard_size, index_only, token)
    split, clients = next(iter(splits.items()))
    of_split = None if counts is None else LabelCounts(clients.client_ids, counts.names, counts.counts[split])
    pictures = draw_pictures(folder, clients, of_split, split)
    text = render_dataset_card(partition_file, repo_id, pictures, there.card, there.client_names)
    (folder / README).write_text(text, encoding="utf-8")
    return partition_file


def count_splits(splits: Mapping[str, FederatedDataset], label_column: str) -> PublishedCounts:
    """
    Counts the labels of all splits, with the same labels in each.

    The labels are the names of a `ClassLabel`, otherwise the values that occur in any split, sorted as text.

    Raises:
        `ValueError`, `TypeError`: As [`label_counts`].
    """
    counted = {split: label_counts(clients, label_column) for split, clients in splits.items()}
    names = list(dict.fromkeys(name for counts in counted.values() for name in counts.label_names))
    features = next(iter(splits.values())).features
    if features is None or not isinstance(features[label_column], ClassLabel):
        names = sorted(names)
    position = {name: column for column, name in enumerate(names)}
    aligned = {}
    for split, counts in counted.items():
        aligned[split] = np.zeros((len(counts.client_ids), len(names)), dtype=np.int64)
        aligned[split][:, [position[name] for name in counts.label_names]] = counts.counts
    return PublishedCounts(label_column, names, aligned)


def draw_pictures(
    folder: Path, clients: FederatedDataset, counts: LabelCounts | None, split: str
) -> list[tuple[str, str]]:
    """
    Draws what the card shows: rows of each client and, where counts are published, labels and how clients differ.

    Returns:
        `list[tuple[str, str]]`: Caption and path of each picture; empty if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("The card has no pictures: they need matplotlib (pip install hf-federated[plots]).")
        return []
    (folder / "pictures").mkdir()
    pictures = [(f"Rows of each client, {split}", PICTURES["sizes"])]
    plot_sizes([size for size in clients.num_rows.values() if size is not None], folder / PICTURES["sizes"])
    if counts is not None:
        pictures.append((f"Share of each label in each client's rows, {split}", PICTURES["labels"]))
        plot_label_shares(counts, folder / PICTURES["labels"])
        if 1 < len(clients) <= MAX_COMPARED_CLIENTS:
            pictures.append((f"Jensen-Shannon divergence of every two clients, {split}", PICTURES["divergence"]))
            divergence = jensen_shannon_divergence(counts.shares)
            plot_divergence(divergence, folder / PICTURES["divergence"], clients.client_ids)
    return pictures
