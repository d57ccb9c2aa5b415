"""Save splits to disk and push splits to the Hub, including label counts, pictures and the dataset card."""

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
from ..plots.partition_plots import plot_divergence, plot_label_shares
from ..plots.size_plots import plot_sizes
from ..statistics.label_statistics import LabelCounts, jensen_shannon_divergence, label_counts
from .card import render_dataset_card
from .folder import PICTURES, README, StorageOptions, save_folder, write_files
from .partition_file import PartitionFile


if TYPE_CHECKING:
    from ..client_mapping import ClientMapping

logger = logging.get_logger(__name__)

# With more clients, the picture of all pairs takes longer than all other steps and shows no more detail.
MAX_COMPARED_CLIENTS = 1000


def save_splits(splits: Mapping[str, ClientMapping], path: str | os.PathLike[str], options: StorageOptions) -> None:
    """Write splits to a folder. Errors as in [`FederatedDataset.save_to_disk`]."""
    save_folder(path, lambda folder: _write(folder, splits, options, None, RepositoryState(), None))


def push_splits(
    splits: Mapping[str, ClientMapping],
    repo_id: str,
    options: StorageOptions,
    private: bool | None,
    revision: str | None,
    token: bool | str | None,
    commit_message: str | None,
) -> CommitInfo | None:
    """Push splits in one commit. Further arguments and errors as in [`FederatedDataset.push_to_hub`]."""

    def write(folder: Path, state: RepositoryState) -> PartitionFile:
        return _write(folder, splits, options, repo_id, state, token)

    return push_folder(write, repo_id, private, revision, token, commit_message)


def _write(
    folder: Path,
    splits: Mapping[str, ClientMapping],
    options: StorageOptions,
    repo_id: str | None,
    state: RepositoryState,
    token: bool | str | None,
) -> PartitionFile:
    counts = None if options.label_column is None else count_splits(splits, options.label_column)
    partition_file = write_files(folder, splits, options, counts, token)
    split, clients = next(iter(splits.items()))
    pictures = draw_pictures(folder, clients, None if counts is None else counts[split], split)
    text = render_dataset_card(partition_file, repo_id, pictures, state.card, state.client_names)
    (folder / README).write_text(text, encoding="utf-8")
    return partition_file


def count_splits(splits: Mapping[str, ClientMapping], label_column: str) -> dict[str, LabelCounts]:
    """
    Count the labels of all splits, with the same label order in each split.

    The labels are the names of a `ClassLabel`, or otherwise the values that occur in any split, sorted as strings.

    Raises:
        `ValueError`, `TypeError`: As in [`label_counts`].
    """
    counted = {split: label_counts(clients, label_column) for split, clients in splits.items()}
    names = list(dict.fromkeys(name for counts in counted.values() for name in counts.label_names))
    features = next(iter(splits.values())).features
    if features is None or not isinstance(features[label_column], ClassLabel):
        names = sorted(names)
    position = {name: column for column, name in enumerate(names)}
    aligned = {}
    for split, counts in counted.items():
        columns = np.zeros((len(counts.client_ids), len(names)), dtype=np.int64)
        columns[:, [position[name] for name in counts.label_names]] = counts.counts
        aligned[split] = LabelCounts(counts.client_ids, names, columns)
    return aligned


def draw_pictures(
    folder: Path, clients: ClientMapping, counts: LabelCounts | None, split: str
) -> list[tuple[str, str]]:
    """
    Draw the pictures of the card: rows per client and, if counts are published, label shares and client divergence.

    Returns:
        `list[tuple[str, str]]`: Caption and path of each picture. Empty if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        logger.info(
            "The card has no pictures, because matplotlib is not installed (pip install 'hf-federated[plots]')."
        )
        return []
    (folder / "pictures").mkdir()
    pictures = [(f"Rows per client, {split}", PICTURES["sizes"])]
    plot_sizes([size for size in clients.num_rows.values() if size is not None], folder / PICTURES["sizes"])
    if counts is not None:
        pictures.append((f"Share of each label in the rows of each client, {split}", PICTURES["labels"]))
        plot_label_shares(counts, folder / PICTURES["labels"])
        if 1 < len(clients) <= MAX_COMPARED_CLIENTS:
            pictures.append((f"Jensen-Shannon divergence between clients, {split}", PICTURES["divergence"]))
            divergence = jensen_shannon_divergence(counts.shares)
            plot_divergence(divergence, folder / PICTURES["divergence"], clients.client_ids)
    return pictures
