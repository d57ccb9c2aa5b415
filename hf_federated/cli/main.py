"""The entry point of the command line interface `hf-federated`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from hf_federated.cli import audit, benchmark, certificates, inspection, partition, split_merge, split_run, train
from hf_federated.cli.field_help import benchmark_help, recipe_help
from hf_federated.experiments.errors import CommandError
from hf_federated.server.round_loop import RoundFailedError


# A command returns its exit code, or `None` for success.
COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": train.train,
    "benchmark": benchmark.benchmark,
    "partition": partition.partition,
    "inspect": inspection.inspect,
    "certificates": certificates.certificates,
    "audit": audit.audit,
    "split-server": split_run.split_server,
    "split-client": split_run.split_client,
    "split-merge": split_merge.split_merge,
}


class _CommandParser(argparse.ArgumentParser):
    """A parser with a further help text, which is computed only when the help is printed."""

    further_help: Callable[[], str] | None = None

    def format_help(self) -> str:
        further = "" if self.further_help is None else f"\n{self.further_help()}\n"
        return super().format_help() + further


def build_parser(partitioner: str | None = None) -> argparse.ArgumentParser:
    """
    Build the parser of `hf-federated` and its commands.

    Args:
        partitioner (`str`, *optional*): Name of the partitioner whose options are added to the command `partition`.
    """
    parser = argparse.ArgumentParser(prog="hf-federated", description="Federated learning with transformers.Trainer.")
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
        help="run a recipe with several algorithms and seeds",
        description="Execute the runs in the section benchmark of a recipe, and compare them with published results.",
    )
    benchmark.add_arguments(benchmark_parser)
    benchmark_parser.further_help = benchmark_help
    partition_parser = commands.add_parser(
        "partition",
        allow_abbrev=False,
        help="partition a dataset into clients",
        description="Partition a dataset into clients, and save them to a folder or push them to the Hub.",
    )
    partition.add_arguments(partition_parser, partitioner)
    inspect_parser = commands.add_parser(
        "inspect",
        help="inspect a federated dataset",
        description="Print and plot the number of examples and the labels of each client.",
    )
    inspection.add_arguments(inspect_parser)
    certificates_parser = commands.add_parser(
        "certificates",
        help="create certificates for the server and the clients of a split model",
        description="Create a private certificate authority, and certificates for the server and the clients of a"
        " split model. Run the command again to add clients.",
    )
    certificates.add_arguments(certificates_parser)
    audit_parser = commands.add_parser(
        "audit",
        help="measure how much text the hidden states of a split model reveal",
        description="Attack the hidden states and embedding gradients that a client of a split model sends, using"
        " local examples, and report how much of the text the attacks reconstruct.",
    )
    audit.add_arguments(audit_parser)
    for name, role in (("split-server", "the server's blocks"), ("split-client", "a client's blocks and examples")):
        run_parser = commands.add_parser(
            name,
            help=f"train a split model over a network: {role}",
            description=f"Train a recipe with a section `split` over a network, with {role} on this machine.",
        )
        split_run.add_arguments(run_parser, server=name == "split-server")
    merge_parser = commands.add_parser(
        "split-merge",
        help="build the full model from the parts of a split model",
        description="Build the full model, or its PEFT adapter, from the parts that server and clients saved.",
    )
    split_merge.add_arguments(merge_parser)
    return parser


def _named_partitioner(argv: Sequence[str] | None) -> str | None:
    """The value of `--partitioner`, which is needed before parsing, because it determines further options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--partitioner", nargs="?")
    return parser.parse_known_args(argv)[0].partitioner


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line interface.

    Args:
        argv (`Sequence[str]`, *optional*): The arguments. Defaults to the arguments of the process.

    Returns:
        `int`: The exit code: `0`, `1` if training failed, or `2` if the command cannot be executed.
    """
    arguments = build_parser(_named_partitioner(argv)).parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments) or 0
    except CommandError as error:
        print(f"hf-federated: error: {error}", file=sys.stderr)
        return 2
    except RoundFailedError as error:
        print(f"hf-federated: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
