"""`hf-federated partition`: a data set from the Hub or from files, cut into clients and saved or pushed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import DatasetDict, get_dataset_split_names, load_dataset

from hf_federated.cli.dataclass_options import add_dataclass_options, build_from_options
from hf_federated.data import DatasetSource, FederatedDatasetDict, describe_partition
from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.experiments.data_files import check_one_format, is_absent, load_file
from hf_federated.experiments.errors import CommandError, command_errors


def add_arguments(parser: argparse.ArgumentParser, partitioner: str | None) -> None:
    """
    The command's options, with those of a partitioner.

    Args:
        parser (`argparse.ArgumentParser`): The command's parser.
        partitioner (`str`, *optional*): The partitioner that the user named.
    """
    parser.add_argument("data", metavar="DATA", help="a data set of the Hub, a folder, or a CSV, JSON or Parquet file")
    parser.add_argument("--name", metavar="CONFIG", help="the data set's configuration")
    parser.add_argument("--split", help="the split to cut (default: all, each client with the same proportions)")
    parser.add_argument("--revision", help="a branch, tag or commit of a data set of the Hub")
    parser.add_argument("--partitioner", required=True, choices=PARTITIONERS, help="how rows are given to clients")
    parser.add_argument("--output", metavar="DIR", help="the folder to write")
    parser.add_argument("--push-to-hub", metavar="REPO", help="the data set repository to push to")
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: a private repository")
    parser.add_argument("--index-only", action="store_true", help="write row numbers instead of rows")
    parser.add_argument(
        "--publish-label-counts",
        metavar="COLUMN",
        help="write each client's rows of each label beside the data; they say something of each client",
    )
    if partitioner in PARTITIONERS:
        add_dataclass_options(parser, PARTITIONERS[partitioner])
    else:
        parser.epilog = "The options of a partitioner: hf-federated partition --partitioner NAME --help"


def partition(arguments: argparse.Namespace) -> None:
    """
    Carries the command out.

    Raises:
        CommandError: If the data cannot be read, cut or written.
    """
    if (arguments.output is None) == (arguments.push_to_hub is None):
        raise CommandError("say where the clients go: either --output DIR or --push-to-hub REPO.")
    if arguments.private and arguments.push_to_hub is None:
        raise CommandError("--private is for --push-to-hub.")
    with command_errors(f"--partitioner {arguments.partitioner}"):
        partitioner = build_from_options(PARTITIONERS[arguments.partitioner], arguments)
    splits = load_splits(arguments.data, arguments.name, arguments.split, arguments.revision)
    with command_errors(arguments.data):
        clients = FederatedDatasetDict.from_dataset(splits, partitioner)
        label_column = getattr(partitioner, "label_column", arguments.publish_label_counts)
        statistics = describe_partition(next(iter(clients.values())), label_column)
    print(f"{next(iter(clients))}:\n{statistics.to_markdown()}")
    for split, others in list(clients.items())[1:]:
        print(f"{split}: {sum(others.num_rows.values())} rows of {len(others)} clients")
    if arguments.output is not None:
        with command_errors(f"--output {arguments.output}"):
            clients.save_to_disk(
                arguments.output, label_column=arguments.publish_label_counts, index_only=arguments.index_only
            )
        print(f"\nWritten to {arguments.output}. Look at it: hf-federated inspect {arguments.output}")
    else:
        with command_errors(f"--push-to-hub {arguments.push_to_hub}"):
            commit = clients.push_to_hub(
                arguments.push_to_hub,
                private=arguments.private or None,
                label_column=arguments.publish_label_counts,
                index_only=arguments.index_only,
            )
        print(f"\n{arguments.push_to_hub} had all of it." if commit is None else f"\nPushed: {commit.commit_url}")


def load_splits(data: str, name: str | None, split: str | None, revision: str | None) -> Mapping[str, Any]:
    """
    The splits that a user named: rows of local files, or where they lie on the Hub.

    Args:
        data (`str`): A file, a folder, or the id of a data set on the Hub.
        name (`str`, *optional*): Its configuration.
        split (`str`, *optional*): The split wanted; all if left out.
        revision (`str`, *optional*): A revision of a data set on the Hub.

    Returns:
        `Mapping[str, datasets.Dataset or DatasetSource]`: By split.

    Raises:
        CommandError: If there is no such data, or it cannot be read.
    """
    path = Path(data)
    if path.exists() and revision is not None:
        raise CommandError(f"--revision is for a data set of the Hub; {data} is here.")
    if path.is_file() and name is not None:
        raise CommandError(f"--name is for a data set with configurations; {data} is a file.")
    if is_absent(data):
        raise CommandError(f"there is no file or folder {data}.")
    with command_errors(data):
        if path.is_file():
            rows: Any = load_file(path, split or "train")
        elif path.is_dir():
            check_one_format(path)
            rows = load_dataset(data, name)
        else:
            # The commit once, so that all splits are of the same.
            commit = DatasetSource(data, revision=revision).resolved().revision
            there = get_dataset_split_names(data, name, revision=commit)
            rows = {one: DatasetSource(data, one, name, commit) for one in there}
    assert isinstance(rows, (DatasetDict, dict))
    if split is None:
        return rows
    if split not in rows:
        raise CommandError(f"{data} has no split {split!r}. It has: {', '.join(rows)}.")
    return {split: rows[split]}
