"""The entry point `hf-federated`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from hf_federated.cli import audit, benchmark, certificates, inspection, partition, split_merge, split_run, train
from hf_federated.cli.field_help import benchmark_help, recipe_help
from hf_federated.experiments.errors import CommandError
from hf_federated.server.round_loop import RoundFailedError


class _CommandParser(argparse.ArgumentParser):
    """Ends its help with a text that takes time to make: only when help is asked for."""

    further_help: Callable[[], str] | None = None

    def format_help(self) -> str:
        further = "" if self.further_help is None else f"\n{self.further_help()}\n"
        return super().format_help() + further


def build_parser(partitioner: str | None = None) -> argparse.ArgumentParser:
    """
    The parser of `hf-federated` and its commands.

    Args:
        partitioner (`str`, *optional*): The partitioner that the user named, whose options `partition` then has.
    """
    parser = argparse.ArgumentParser(
        prog="hf-federated", description="Federated learning around transformers.Trainer."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_CommandParser)
    train_parser = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe: a YAML file with the sections model, data, training, federation and card.",
    )
    train.add_arguments(train_parser)
    train_parser.further_help = recipe_help
    benchmark_parser = commands.add_parser(
        "benchmark",
        help="run a recipe under several algorithms and seeds",
        description="Make the runs that the section benchmark of a recipe lists, and compare them with the paper's.",
    )
    benchmark.add_arguments(benchmark_parser)
    benchmark_parser.further_help = benchmark_help
    partition_parser = commands.add_parser(
        "partition",
        allow_abbrev=False,
        help="cut a data set into clients",
        description="Cut a data set into clients, and save them to a folder or push them to the Hub.",
    )
    partition.add_arguments(partition_parser, partitioner)
    inspect_parser = commands.add_parser(
        "inspect",
        help="look at a federated data set",
        description="Print who has how many rows of what, and draw it.",
    )
    inspection.add_arguments(inspect_parser)
    certificates_parser = commands.add_parser(
        "certificates",
        help="make certificates for a split model's server and clients",
        description="Make a private certificate authority, and certificates that it signs for the server of a split"
        " model and for clients. Run it again to add clients.",
    )
    certificates.add_arguments(certificates_parser)
    audit_parser = commands.add_parser(
        "audit",
        help="measure what a split model's hidden states reveal",
        description="Attack the hidden states and embedding gradients that would leave a client of a split model, with"
        " rows that are at hand, and report how much of the text is read.",
    )
    audit.add_arguments(audit_parser)
    for name, what in (("split-server", "the server's blocks"), ("split-client", "a client's blocks and rows")):
        run_parser = commands.add_parser(
            name,
            help=f"train a split model over a network: {what}",
            description=f"Train a recipe with a section split over a network, with {what} on this machine.",
        )
        split_run.add_arguments(run_parser, server=name == "split-server")
    merge_parser = commands.add_parser(
        "split-merge",
        help="build the whole model from the parts of a split one",
        description="Build the ordinary whole model, or PEFT adapter, from what the parties of a split model saved.",
    )
    split_merge.add_arguments(merge_parser)
    return parser


def _named_partitioner(argv: Sequence[str] | None) -> str | None:
    """The partitioner in the arguments, whose options the parser needs to read the others."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--partitioner", nargs="?")
    return peek.parse_known_args(argv)[0].partitioner


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Args:
        argv (`Sequence[str]`, *optional*): The arguments; those of the process by default.

    Returns:
        `int`: The exit code: `0`, `1` if training failed, or `2` for a command that cannot be carried out.
    """
    arguments = build_parser(_named_partitioner(argv)).parse_args(argv)
    try:
        if arguments.command == "partition":
            partition.partition(arguments)
            return 0
        if arguments.command == "benchmark":
            return benchmark.benchmark(arguments)
        if arguments.command == "inspect":
            inspection.inspect(arguments)
            return 0
        if arguments.command == "audit":
            audit.audit(arguments)
            return 0
        if arguments.command in ("split-server", "split-client"):
            (split_run.split_server if arguments.command == "split-server" else split_run.split_client)(arguments)
            return 0
        if arguments.command == "split-merge":
            split_merge.split_merge(arguments)
            return 0
        if arguments.command == "certificates":
            certificates.certificates(arguments)
            return 0
        train.train(arguments)
    except CommandError as error:
        print(f"hf-federated: error: {error}", file=sys.stderr)
        return 2
    except RoundFailedError as error:
        print(f"hf-federated: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
