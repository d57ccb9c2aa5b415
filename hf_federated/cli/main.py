# PYTHON_ARGCOMPLETE_OK
"""
The entry point of the command line interface `hf-federated`.

A command is imported when its arguments are parsed, and its libraries when it runs. `hf-federated --help` and tab
completion import neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from hf_federated.cli.command_parser import Command, CommandParser
from hf_federated.cli.recipe_options import INTERRUPTED
from hf_federated.experiments.errors import CommandError
from hf_federated.utils.errors import CheckpointError, RoundFailedError, UserError
from hf_federated.utils.printable import printable


COMMANDS = {
    "init": Command(
        "init",
        "write a first recipe",
        "Write a commented recipe from five answers: the data, the task, the model, the method, and where the clients "
        "are. The command prints the commands that train the recipe.",
        examples=(
            "hf-federated init",
            "hf-federated init recipe.yaml --data sites --clients files --method fedavg",
        ),
    ),
    "train": Command(
        "train",
        "train a recipe",
        "Train a recipe: a YAML file with the sections model, data, task, training and federation. A recipe can run "
        "code: `model.kwargs: {trust_remote_code: true}` runs the code of a model repository, and a name of the form "
        "`module:Class` imports the module, also from the current folder. Read the recipe of a stranger before you "
        "train it.",
        examples=(
            "hf-federated train recipe.yaml",
            "hf-federated train recipe.yaml --set federation.num_rounds=20 --output-dir outputs/long",
            "hf-federated train recipe.yaml --resume",
        ),
        has_recipe=True,
    ),
    "benchmark": Command(
        "benchmark",
        "run a recipe with several algorithms and seeds",
        "Execute the runs in the section benchmark of a recipe, and compare them with published results. A recipe can "
        "run code, see `hf-federated train --help`.",
        examples=(
            "hf-federated benchmark recipe.yaml --dry-run",
            "hf-federated benchmark recipe.yaml --seeds 0 1 2",
        ),
        has_recipe=True,
    ),
    "estimate": Command(
        "estimate",
        "estimate the memory, the bytes and the time of a recipe",
        "Estimate the parameters, the memory of the server and of a client, the bytes and round trips of a round or "
        "of an optimizer step, and the time at a given speed of devices and connections. The weights of models are "
        "not loaded. The data are read only if they are local and a number of clients, examples or labels is neither "
        "given nor part of the recipe. A recipe can run code, see `hf-federated train --help`.",
        examples=(
            "hf-federated estimate recipe.yaml",
            "hf-federated estimate recipe.yaml --num-clients 100 --num-examples 500 --json",
        ),
        has_recipe=True,
    ),
    "partition": Command(
        "partition",
        "partition a dataset into clients",
        "Partition a dataset into clients, and save them to a folder or push them to the Hub.",
        examples=(
            "hf-federated partition reviews.csv --partitioner natural --column site --output clients",
            "hf-federated partition sites/ --client-per-file --output clients",
            "hf-federated partition you/reviews --partitioner iid --num-clients 10 --push-to-hub you/reviews-10",
        ),
    ),
    "check": Command(
        "check",
        "find what is wrong in the examples of all sites",
        "Find missing texts and labels, duplicates within a site, between sites and between training and test, names "
        "of sites and labels that look alike, labels of one site, a label column of ids, columns that differ between "
        "sites, sites without rows or entities, and texts that the model cuts. The exit code is 1 if a finding is an "
        "error.",
        examples=(
            "hf-federated check sites/ --label-column label",
            "hf-federated check recipe.yaml --output check.html",
            "hf-federated check sites/ --fix clean",
        ),
    ),
    "inspect": Command(
        "inspection",
        "inspect a federated dataset",
        "Print and plot the number of examples and the labels of each client.",
        examples=(
            "hf-federated inspect clients",
            "hf-federated inspect clients --label-column label --output plots",
        ),
    ),
    "certificates": Command(
        "certificates",
        "create certificates for the server and the clients of a network",
        "Create a private certificate authority, and certificates for the server and the clients of a network. Run "
        "the command again to add clients.",
        examples=("hf-federated certificates certificates --server server.example.org --client north --client south",),
    ),
    "audit": Command(
        "audit",
        "measure what a client reveals by the data that it sends",
        "With a recipe, attack the parameters, adapters or predictions that its clients send: tokens, sequences, "
        "membership and canaries. With a model and a dataset, attack the hidden states and embedding gradients of a "
        "split model. Both attack local examples, and report what the attacks find.",
        examples=(
            "hf-federated audit recipe.yaml --output-dir outputs/audit",
            "hf-federated audit gpt2 texts.csv --output-dir outputs/audit",
        ),
        has_recipe=True,
    ),
    "serve": Command(
        "network",
        "train a recipe with clients on other machines: the server",
        "Train a recipe with clients on other machines, as the server. With a section `split`, this machine has the "
        "server's blocks. A recipe can run code, see `hf-federated train --help`.",
        "add_serve_arguments",
        examples=(
            "hf-federated serve recipe.yaml --certificates certificates --client north --client south",
            "hf-federated serve recipe.yaml --certificates certificates --resume",
        ),
        has_recipe=True,
    ),
    "join": Command(
        "network",
        "train a recipe with clients on other machines: a client",
        "Take part in the training of a recipe as a client. The examples stay on this machine. With a section "
        "`split`, this machine has a client's blocks. A recipe can run code, see `hf-federated train --help`.",
        "add_join_arguments",
        examples=(
            "hf-federated join recipe.yaml --client north --examples north.csv --certificates certificates",
            "hf-federated join recipe.yaml --client north --examples north.csv --certificates certificates --dry-run",
        ),
        has_recipe=True,
    ),
    "export-nvflare": Command(
        "export_nvflare",
        "write a recipe as a job of NVIDIA FLARE",
        "Write a recipe as a job of NVIDIA FLARE (extra `nvflare`). The clients are NVFlare sites with their own "
        "examples.",
        examples=("hf-federated export-nvflare recipe.yaml --output job",),
        has_recipe=True,
    ),
    "status": Command(
        "status",
        "show the round and the clients of a server",
        "Show the round, and for each client its state, when it was last heard, and the bytes that it received and "
        "sent since the server started.",
        "add_status_arguments",
        examples=("hf-federated status outputs/server",),
    ),
    "watch": Command(
        "watch",
        "show a run while it lasts",
        "Show the rounds, losses, metrics, clients and bytes of a run, of one process or of a server, and the time "
        "left. The view follows the files in the output folder until the run ends. `--output` also writes a page.",
        examples=("hf-federated watch outputs/run", "hf-federated watch outputs/run --once --output run.html"),
    ),
    "compare": Command(
        "compare",
        "compare runs in one table and one picture",
        "Compare finished or running runs of recipes and scripts: the settings that differ, metrics with the best "
        "values marked, bytes and time, and the curves by round and by bytes.",
        examples=("hf-federated compare outputs/fedavg outputs/fedprox --output comparison.html",),
    ),
    "expel": Command(
        "status",
        "expel a client from a run",
        "Tell a running server to disconnect a client and to refuse it from then on, also after a resume.",
        "add_expel_arguments",
        examples=("hf-federated expel outputs/server north",),
    ),
    "split-server": Command(
        "network",
        "deprecated name of serve",
        "Deprecated. Use `hf-federated serve`, which has the same options.",
        "add_serve_arguments",
    ),
    "split-client": Command(
        "network",
        "deprecated name of join",
        "Deprecated. Use `hf-federated join`, which has the same options.",
        "add_join_arguments",
    ),
    "split-merge": Command(
        "split_merge",
        "build the full model from the parts of a split model",
        "Build the full model, or its PEFT adapter, from the parts that server and clients saved.",
        examples=("hf-federated split-merge outputs/server outputs/north outputs/south --output-dir merged",),
    ),
}


def build_parsers() -> tuple[argparse.ArgumentParser, dict[str, CommandParser]]:
    """Build the parser of `hf-federated`, and return it with the parsers of its commands by name."""
    parser = argparse.ArgumentParser(prog="hf-federated", description="Federated learning with transformers.Trainer.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    parsers = {
        name: commands.add_parser(name, help=command.help, command=command) for name, command in COMMANDS.items()
    }
    return parser, parsers


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `hf-federated`."""
    return build_parsers()[0]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line interface.

    Args:
        argv (`Sequence[str]`, *optional*): The arguments. Defaults to the arguments of the process.

    Returns:
        `int`: The exit code: `0`, `1` if training failed, `2` if the command cannot be executed, `3` if the connection
        to the server ended, or `130` if the user interrupted the command.
    """
    parser, command_parsers = build_parsers()
    if "COMP_LINE" in os.environ:
        _complete(parser, command_parsers, os.environ["COMP_LINE"].split())
    arguments = parser.parse_args(argv)
    command = COMMANDS[arguments.command]
    # bitsandbytes warns at its import that a faster kernel for 4-bit weights on a CPU is not installed.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return command.load(arguments.command.replace("-", "_"))(arguments) or 0
    except (CommandError, CheckpointError, UserError) as error:
        text = f"hf-federated: error: {printable(error)}"
        code = error.exit_code if isinstance(error, UserError) else 2
    except RoundFailedError as error:
        text, code = f"hf-federated: error: {printable(error)}", 1
    except KeyboardInterrupt:
        text, code = "\nhf-federated: interrupted.", INTERRUPTED
    # The progress bar prints its last state when the trainer is deleted. The message must be the last line.
    gc.collect()
    print(text, file=sys.stderr)
    return code


def _complete(
    parser: argparse.ArgumentParser, command_parsers: Mapping[str, CommandParser], words: Sequence[str]
) -> None:
    """Answer a shell that asks for the completions of a command line, if argcomplete is installed."""
    try:
        import argcomplete
    except ImportError:
        return
    # argcomplete lists the options of a command before the parser of the command parses them.
    for position, word in enumerate(words):
        if word in command_parsers:
            command_parsers[word].add_command_arguments(words[position + 1 :])
            break
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
