"""`hf-federated inspect`: the table and the pictures of a federated data set."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hf_federated.data import (
    FederatedDataset,
    PartitionFile,
    describe_partition,
    jensen_shannon_divergence,
    plot_divergence,
    plot_label_shares,
    plot_sizes,
    plot_text_map,
)
from hf_federated.data.hub import fetch_split, read_hub_partition
from hf_federated.data.labels import read_labels
from hf_federated.data.storage.folder import open_folder, open_split
from hf_federated.experiments.data_files import is_absent
from hf_federated.experiments.errors import CommandError, command_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("data", metavar="DATA", help="a folder that `partition` wrote, or its repository on the Hub")
    parser.add_argument("--split", help="the split to look at (default: train, or the first)")
    parser.add_argument("--revision", help="a branch, tag or commit on the Hub")
    parser.add_argument("--label-column", help="the column with the labels (default: `label`, if there is one)")
    parser.add_argument("--text-column", help="the column with the texts, to compare words (slower)")
    parser.add_argument("--output", metavar="DIR", help="where the pictures go (default: none are drawn)")


def inspect(arguments: argparse.Namespace) -> None:
    """
    Carries the command out.

    Raises:
        CommandError: If the data cannot be read, or a column does not exist.
    """
    with command_errors(arguments.data):
        clients = open_clients(arguments.data, arguments.split, arguments.revision)
        label_column = arguments.label_column or ("label" if _holds_classes(clients) else None)
        statistics = describe_partition(clients, label_column, arguments.text_column)
    if clients.partitioning is not None:
        print(", ".join(f"{name}: {value}" for name, value in clients.partitioning.items()))
    print(f"columns: {', '.join(clients.column_names)}\n\n{statistics.to_markdown()}")
    if arguments.output is None:
        return
    folder = Path(arguments.output)
    with command_errors(f"--output {arguments.output}"):
        folder.mkdir(parents=True, exist_ok=True)
        pictures: dict[str, Callable[[Path], None]] = {"sizes": lambda path: plot_sizes(statistics.sizes, path)}
        labels = statistics.labels
        if labels is not None:
            pictures["labels"] = lambda path: plot_label_shares(labels, path)
            if len(clients) > 1:
                divergence = jensen_shannon_divergence(labels.shares)
                pictures["divergence"] = lambda path: plot_divergence(divergence, path, clients.client_ids)
        if arguments.text_column is not None:
            pictures["texts"] = lambda path: plot_text_map(clients, path, arguments.text_column)
        for name, draw in pictures.items():
            draw(folder / f"{name}.png")
            print(folder / f"{name}.png")


def _holds_classes(clients: FederatedDataset) -> bool:
    """Whether the column `label` exists and holds classes, and not amounts, say."""
    if "label" not in clients.column_names:
        return False
    try:
        read_labels(clients[clients.client_ids[0]], "label")
    except (TypeError, ValueError):
        return False
    return True


def open_clients(data: str, split: str | None, revision: str | None) -> FederatedDataset:
    """
    A split of a federated data set in a folder or on the Hub.

    Raises:
        CommandError: If a local path does not exist.
    """
    if Path(data).is_dir():
        stored = open_folder(data)
        split = split or first_split(stored)
        return FederatedDataset.from_stored(stored, split, open_split(stored, Path(data), split))
    if data.count("/") != 1 or is_absent(data):
        raise CommandError(f"there is no folder {data}.")
    stored, snapshot = read_hub_partition(data, revision)
    split = split or first_split(stored)
    return FederatedDataset.from_stored(stored, split, fetch_split(data, stored, snapshot, split))


def first_split(stored: PartitionFile) -> str:
    """`train` where there is one."""
    return "train" if "train" in stored.splits else stored.splits[0]
