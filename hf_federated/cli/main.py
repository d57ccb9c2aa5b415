"""The entry point `hf-federated`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_federated.cli import audit, certificates, inspection, partition, split_merge, split_run
from hf_federated.experiments import benchmark
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.grid import BenchmarkSection, PlannedRun
from hf_federated.experiments.recipe import check_recipe, choices, load_recipe, partitioner_has_seed, sections
from hf_federated.experiments.recipe_schema import RecipeField, dataclass_fields, type_name
from hf_federated.experiments.recipe_yaml import read_values
from hf_federated.server.round_loop import RoundFailedError


INTRODUCTIONS = {
    "model": "the model that every client starts from",
    "data": "the rows, and which of them are held out to test on",
    "task": "a task of hf_federated.tasks, by its name, and its arguments",
    "partition": "a partitioner, by its name, and its arguments; left out for data that belong to clients already",
    "training": "any field of transformers.TrainingArguments; a step of the run is a round",
    "federation": "any field of hf_federated.FederatedConfig",
    "split": "in place of federation: any field of hf_federated.SplitConfig; a step of the run is an optimizer step",
    "card": "any argument of Trainer.create_model_card",
    "public": "training rows that are set aside for distillation",
    "": "beside the sections",
}


def _describe(section: str, item: RecipeField) -> str:
    """One field as two or more lines of help: name, type and default, then what it is."""
    default = "required" if item.required else f"default {_as_yaml(item.default)}"
    head = f"    {f'{section}.' if section else ''}{item.name}: {type_name(item.annotation)} ({default})"
    lines = textwrap.wrap(head, 100, subsequent_indent=" " * 8)
    # The first sentence; TrainingArguments go on for paragraphs.
    sentence = " ".join(item.help.split()).partition(". ")[0].rstrip(".")
    if sentence:
        lines += textwrap.wrap(sentence, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _as_yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false", "": '""'}
    return words[value] if isinstance(value, (bool, str, type(None))) and value in words else str(value)


def recipe_help() -> str:
    """Every section and field of a recipe with its type and default, as `--help` prints them."""
    parts = ["fields of a recipe (each can be given with --set):"]
    for section, fields in sections().items():
        parts.append(f"\n  {section or 'other fields'}: {INTRODUCTIONS[section]}")
        parts += [_describe(section, item) for item in fields.values()]
    for section, classes in choices().items():
        parts.append(f"\n  {section}: {INTRODUCTIONS[section]}")
        parts.append(f"    {section}.name: {' | '.join(classes)}")
        for name, fields in classes.items():
            parts.append(f"\n    with {section}.name: {name}")
            parts += [_describe(section, item) for item in fields.values()]
    return "\n".join(parts)


def benchmark_help() -> str:
    """Every field of a recipe's section `benchmark`, as `--help` prints them."""
    fields = dataclass_fields(BenchmarkSection).values()
    return "\n".join(["fields of the section benchmark:", *(_describe("benchmark", item) for item in fields)])


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
    _add_train(commands)
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


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe: a YAML file with the sections model, data, training, federation and card.",
    )
    train.add_argument("recipe", metavar="RECIPE", help="the YAML file")
    train.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a field, for example training.learning_rate=5e-4; the value is YAML; may be repeated",
    )
    train.add_argument("--output-dir", metavar="DIR", help="instead of the recipe's training.output_dir")
    train.further_help = recipe_help


def _benchmark(arguments: argparse.Namespace) -> int:
    def execute(planned: PlannedRun, folder: Path) -> dict[str, Any]:
        from hf_federated.experiments.execution import (
            measure,  # takes a second, which reports and mistakes need not wait for
        )

        # A folder for each recipe that the run ever had: what is found in it is of this one.
        return measure(planned.values, planned.method, folder / planned.digest[:12])

    return benchmark.benchmark(arguments, read_values, check_recipe, execute, partitioner_has_seed)


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
            return _benchmark(arguments)
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
        # Training takes a second to import; a mistake in the recipe should not wait for it.
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        from hf_federated.cli.train import train

        train(recipe, arguments.output_dir)
    except CommandError as error:
        print(f"hf-federated: error: {error}", file=sys.stderr)
        return 2
    except RoundFailedError as error:
        print(f"hf-federated: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
