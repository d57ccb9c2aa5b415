"""`hf-federated inspect`: print the statistics of a federated dataset and plot them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.utils.printable import printable


if TYPE_CHECKING:
    from hf_federated.data import FederatedDataset, PartitionFile


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument(
        "data", metavar="DATA", help="a federated dataset: a folder written by `partition`, or a Hub id"
    )
    parser.add_argument("--split", help="the split to inspect (default: train, or else the first split)")
    parser.add_argument("--revision", help="branch, tag or commit of a dataset on the Hub")
    parser.add_argument("--label-column", help="the column of the labels (default: `label`, if it exists)")
    parser.add_argument("--text-column", help="the column of the texts, to compare vocabularies (slower)")
    parser.add_argument("--output", metavar="DIR", help="folder for the plots (default: no plots)")


def inspect(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the data cannot be read, or a column does not exist.
    """
    from hf_federated.data import (
        describe_partition,
        jensen_shannon_divergence,
        plot_divergence,
        plot_label_shares,
        plot_sizes,
        plot_text_map,
    )

    with command_errors(arguments.data):
        clients = open_clients(arguments.data, arguments.split, arguments.revision)
        label_column = arguments.label_column or ("label" if _has_class_labels(clients) else None)
        statistics = describe_partition(clients, label_column, arguments.text_column)
    if clients.partitioning is not None:
        print(printable(", ".join(f"{name}: {value}" for name, value in clients.partitioning.items())))
    print(f"columns: {printable(', '.join(clients.column_names))}\n\n{statistics.to_markdown()}")
    if arguments.output is None:
        return
    folder = Path(arguments.output)
    with command_errors(f"--output {arguments.output}"):
        folder.mkdir(parents=True, exist_ok=True)
        plots: dict[str, Callable[[Path], None]] = {"sizes": lambda path: plot_sizes(statistics.sizes, path)}
        labels = statistics.labels
        if labels is not None:
            plots["labels"] = lambda path: plot_label_shares(labels, path)
            if len(clients) > 1:
                divergence = jensen_shannon_divergence(labels.shares)
                plots["divergence"] = lambda path: plot_divergence(divergence, path, clients.client_ids)
        if arguments.text_column is not None:
            plots["texts"] = lambda path: plot_text_map(clients, path, arguments.text_column)
        for name, plot in plots.items():
            plot(folder / f"{name}.png")
            print(folder / f"{name}.png")


def _has_class_labels(clients: FederatedDataset) -> bool:
    """Whether the column `label` exists and contains class labels, not numbers such as amounts."""
    from hf_federated.data.labels import read_labels

    if "label" not in clients.column_names:
        return False
    try:
        read_labels(clients[clients.client_ids[0]], "label")
    except (TypeError, ValueError):
        return False
    return True


def open_clients(data: str, split: str | None, revision: str | None) -> FederatedDataset:
    """
    Open a split of a federated dataset in a folder or on the Hub.

    Args:
        data (`str`): A folder or Hub id.
        split (`str`, *optional*): Name of the split. Defaults to [`default_split`].
        revision (`str`, *optional*): Branch, tag or commit on the Hub.

    Raises:
        CommandError: If a local path does not exist, or is not a federated dataset.
    """
    from hf_federated.data import FederatedDataset
    from hf_federated.data.hub import fetch_split, read_hub_partition
    from hf_federated.data.storage.folder import open_folder, open_split
    from hf_federated.data.storage.partition_file import PARTITION_FILE
    from hf_federated.experiments.data.files import hub_errors, is_missing_path, suggest_path

    if Path(data).exists() and not (Path(data) / PARTITION_FILE).is_file():
        raise _not_partitioned(data)
    if Path(data).is_dir():
        stored = open_folder(data)
        split = split or default_split(stored)
        return FederatedDataset.from_stored(stored, split, open_split(stored, Path(data), split))
    if data.count("/") != 1 or is_missing_path(data):
        raise CommandError(f"the folder {data} does not exist{suggest_path(data)}.")
    with hub_errors("DATA", data):
        try:
            stored, snapshot = read_hub_partition(data, revision)
        except FileNotFoundError as error:
            if type(error) is not FileNotFoundError:  # an error of the Hub
                raise
            raise _not_partitioned(data) from error
        split = split or default_split(stored)
        return FederatedDataset.from_stored(stored, split, fetch_split(data, stored, snapshot, split))


def _not_partitioned(data: str) -> CommandError:
    is_folder = Path(data).is_dir()
    files = " (--client-per-file in place of --partitioner NAME if each file is a client)" if is_folder else ""
    return CommandError(
        f"{data} is not a federated dataset: its examples are not partitioned into clients. Run `hf-federated"
        f" partition {shlex.quote(data)} --partitioner NAME --output DIR` first{files}, and inspect DIR."
    )


def default_split(stored: PartitionFile) -> str:
    """The split `train` if it exists, otherwise the first split."""
    return "train" if "train" in stored.splits else stored.splits[0]
