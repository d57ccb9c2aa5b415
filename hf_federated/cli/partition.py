"""`hf-federated partition`: partition a dataset into clients, and save it to a folder or push it to the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_federated.cli.csv_options import add_csv_options, table_options
from hf_federated.experiments.errors import CommandError, command_errors


if TYPE_CHECKING:
    from hf_federated.data import FederatedDatasetDict
    from hf_federated.data.tables import TableOptions

# The names in `hf_federated.data.partitioners.PARTITIONERS`, without its import.
PARTITIONER_NAMES = (
    "feature-cluster",
    "iid",
    "label-dirichlet",
    "multi-domain",
    "natural",
    "per-class-dirichlet",
    "quantity-dirichlet",
)


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """
    Add the arguments of the command to a parser, and the options of the partitioner that the command line names.

    Args:
        parser (`argparse.ArgumentParser`): The parser of the command.
        argv (`Sequence[str]`, *optional*): The arguments that follow the command.
    """
    parser.add_argument(
        "data", metavar="DATA", help="a dataset: a Hub id, a folder, or a CSV, JSON, Parquet or Excel file"
    )
    parser.add_argument("--name", metavar="CONFIG", help="configuration of the dataset")
    parser.add_argument(
        "--split", help="the split to partition (default: all splits, each with the same proportions of clients)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a dataset on the Hub")
    assignment = parser.add_mutually_exclusive_group(required=True)
    assignment.add_argument("--partitioner", choices=PARTITIONER_NAMES, help="how examples are assigned to clients")
    assignment.add_argument(
        "--client-per-file",
        action="store_true",
        help="each file in the folder DATA is one client with the name of the file",
    )
    parser.add_argument("--output", metavar="DIR", help="the output folder")
    parser.add_argument("--overwrite", action="store_true", help="with --output: replace a federated dataset")
    parser.add_argument("--push-to-hub", metavar="REPO", help="the dataset repository to push to")
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: create a private repository")
    parser.add_argument("--index-only", action="store_true", help="write row indices instead of rows")
    parser.add_argument(
        "--publish-label-counts",
        metavar="COLUMN",
        help="also write the number of examples per label of each client, which reveals information about the clients",
    )
    add_csv_options(parser)
    partitioner = _named_partitioner(argv)
    if partitioner in PARTITIONER_NAMES:
        from hf_federated.cli.dataclass_options import add_dataclass_options
        from hf_federated.data.partitioners import PARTITIONERS

        add_dataclass_options(parser, PARTITIONERS[partitioner])
    else:
        parser.epilog = "Options of a partitioner: hf-federated partition --partitioner NAME --help"


def _named_partitioner(argv: Sequence[str]) -> str | None:
    """The value of `--partitioner`, which determines further options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--partitioner", nargs="?")
    return parser.parse_known_args(argv)[0].partitioner


def partition(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the data cannot be read, partitioned or written.
    """
    if (arguments.output is None) == (arguments.push_to_hub is None):
        raise CommandError("the destination is missing or ambiguous. Give either --output DIR or --push-to-hub REPO.")
    if arguments.private and arguments.push_to_hub is None:
        raise CommandError("--private is only allowed with --push-to-hub.")
    from hf_federated.data import describe_partition

    _check_output(arguments.output, arguments.overwrite)
    clients, label_column = _client_files(arguments) if arguments.client_per_file else _partitioned(arguments)
    with command_errors(arguments.data):
        statistics = describe_partition(next(iter(clients.values())), label_column)
    print(f"{next(iter(clients))}:\n{statistics.to_markdown()}")
    for split, dataset in list(clients.items())[1:]:
        print(f"{split}: {sum(dataset.num_rows.values())} examples of {len(dataset)} clients")
    for line in _findings(arguments, clients, label_column):
        print(line)
    content = {"label_column": arguments.publish_label_counts, "index_only": arguments.index_only}
    if arguments.output is not None:
        with command_errors(f"--output {arguments.output}"):
            clients.save_to_disk(arguments.output, **content)
        print(f"\nWrote {arguments.output}. {_next_step(arguments)}")
    else:
        with command_errors(f"--push-to-hub {arguments.push_to_hub}"):
            commit = clients.push_to_hub(arguments.push_to_hub, private=arguments.private or None, **content)
        print(
            f"\n{arguments.push_to_hub} is already up to date." if commit is None else f"\nPushed: {commit.commit_url}"
        )


def _findings(arguments: argparse.Namespace, clients: FederatedDatasetDict, label_column: str | None) -> list[str]:
    """A line for each kind of error or warning in the data."""
    from hf_federated.experiments.data.checked_clients import partition_lines
    from hf_federated.experiments.data.checked_data import DataOptions

    site_column = getattr(arguments, "column", None) if arguments.partitioner == "natural" else None
    options = DataOptions(arguments.data, label=label_column, site=site_column, table_options=table_options(arguments))
    return partition_lines(clients, options, label_column)


def _next_step(arguments: argparse.Namespace) -> str:
    """The command or the code that reads the written folder. Row numbers of local data need the data."""
    if arguments.index_only and Path(arguments.data).exists():
        return (
            "It contains row numbers without the rows. To load it with the rows, run in Python:"
            f" FederatedDataset.load_from_disk({arguments.output!r}, source=rows)"
        )
    return f"To inspect it, run: hf-federated inspect {arguments.output}"


def _partitioned(arguments: argparse.Namespace) -> tuple[FederatedDatasetDict, str | None]:
    """The clients that the partitioner creates, and the column of labels for the statistics."""
    from hf_federated.cli.dataclass_options import build_from_options
    from hf_federated.data import FederatedDatasetDict
    from hf_federated.data.partitioners import PARTITIONERS

    with command_errors(f"--partitioner {arguments.partitioner}"):
        partitioner = build_from_options(PARTITIONERS[arguments.partitioner], arguments)
    splits = load_splits(arguments.data, arguments.name, arguments.split, arguments.revision, table_options(arguments))
    with command_errors(arguments.data):
        clients = FederatedDatasetDict.from_dataset(splits, partitioner)
    return clients, getattr(partitioner, "label_column", arguments.publish_label_counts)


def _client_files(arguments: argparse.Namespace) -> tuple[FederatedDatasetDict, str | None]:
    """The clients in the files of a folder, and the column of labels for the statistics."""
    from hf_federated.data import FederatedDataset, FederatedDatasetDict
    from hf_federated.data.storage.partition_file import PARTITION_FILE
    from hf_federated.experiments.data.files import load_client_files

    for option, value in (("--name", arguments.name), ("--revision", arguments.revision)):
        if value is not None:
            raise CommandError(f"{option} is not allowed with --client-per-file, which reads local files.")
    if (Path(arguments.data) / PARTITION_FILE).is_file():
        raise CommandError(f"{arguments.data} is already partitioned. Give a folder with one file for each client.")
    datasets = load_client_files(Path(arguments.data), table_options(arguments))
    with command_errors(arguments.data):
        clients = FederatedDataset.from_dict(datasets)
    clients.partitioning = {"partitioner": "client per file"}
    return FederatedDatasetDict({arguments.split or "train": clients}), arguments.publish_label_counts


def _check_output(output: str | None, overwrite: bool) -> None:
    """Check before the data is loaded that the output folder is new, or that it may be replaced."""
    from hf_federated.data.storage.folder import check_replaceable
    from hf_federated.data.storage.partition_file import PARTITION_FILE

    if overwrite and output is None:
        raise CommandError("--overwrite is only allowed with --output.")
    if output is not None and not overwrite and (Path(output) / PARTITION_FILE).exists():
        raise CommandError(
            f"--output {output}: the folder contains a federated dataset. Choose another folder, or add --overwrite to"
            " replace the dataset."
        )
    if output is not None:
        with command_errors(f"--output {output}"):
            check_replaceable(output)


def load_splits(
    data: str, name: str | None, split: str | None, revision: str | None, options: TableOptions | None = None
) -> Mapping[str, Any]:
    """
    Load the splits of a local dataset, or resolve the splits of a dataset on the Hub.

    Args:
        data (`str`): A file, a folder, or a Hub id.
        name (`str`, *optional*): Configuration of the dataset.
        split (`str`, *optional*): Name of a split. Defaults to all splits.
        revision (`str`, *optional*): Branch, tag or commit of a dataset on the Hub.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Returns:
        `Mapping[str, datasets.Dataset or DatasetSource]`: A `Dataset` (local) or `DatasetSource` (Hub) by split.

    Raises:
        CommandError: If the dataset does not exist or cannot be read.
    """
    from datasets import get_dataset_split_names

    from hf_federated.data import DatasetSource
    from hf_federated.experiments.data.files import check_local_path, hub_errors, load_file
    from hf_federated.experiments.data.folders import load_named_splits

    path = Path(data)
    if path.exists() and revision is not None:
        raise CommandError(f"--revision is only allowed for datasets on the Hub, but {data} is a local path.")
    if path.is_file() and name is not None:
        raise CommandError(f"--name is only allowed for datasets with configurations, but {data} is a file.")
    check_local_path(data)
    with command_errors(data), hub_errors("DATA", data):
        if path.is_file():
            splits: Any = load_file(path, split or "train", options)
        elif path.is_dir():
            splits = load_named_splits(data, config=name, options=options)
        else:
            # Resolve the commit once, so that all splits are from the same commit.
            commit = DatasetSource(data, revision=revision).resolved().revision
            names = get_dataset_split_names(data, name, revision=commit)
            splits = {split_name: DatasetSource(data, split_name, name, commit) for split_name in names}
    if split is None:
        return splits
    if split not in splits:
        raise CommandError(f"{data} has no split {split!r}. Its splits are {', '.join(splits)}.")
    return {split: splits[split]}
