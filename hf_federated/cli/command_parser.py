"""A command of `hf-federated`, and its parser, which imports the command when it is used."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """
    A command of `hf-federated`.

    The function of the module that executes the command has the name of the command, with `_` in place of `-`. It
    returns the exit code, or `None` for success.

    Args:
        module (`str`): Module of `hf_federated.cli`.
        help (`str`): One line for `hf-federated --help`.
        description (`str`): Text for the help of the command.
        add_arguments (`str`, *optional*, defaults to `"add_arguments"`): Function of the module that adds the
            arguments of the command to a parser.
    """

    module: str
    help: str
    description: str
    add_arguments: str = "add_arguments"

    def load(self, name: str) -> Any:
        """Import the module of the command and return one of its functions."""
        return getattr(importlib.import_module(f"hf_federated.cli.{self.module}"), name)


class CommandParser(argparse.ArgumentParser):
    """
    The parser of one command. The arguments of the command are added when the parser is used.

    Args:
        command ([`Command`]): The command.
        kwargs: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, command: Command, **kwargs: Any) -> None:
        # An abbreviation could match options of a partitioner, which depend on `--partitioner`.
        super().__init__(description=command.description, allow_abbrev=False, **kwargs)
        self.command = command
        # Computes a further help text, which is expensive, when the help is printed.
        self.further_help: Callable[[], str] | None = None
        self._is_complete = False

    def add_command_arguments(self, argv: Sequence[str] = ()) -> None:
        """
        Add the arguments of the command. Only the first call has an effect.

        Args:
            argv (`Sequence[str]`, *optional*): The arguments that follow the command. The options of `partition`
                depend on them.
        """
        if not self._is_complete:
            self._is_complete = True
            self.command.load(self.command.add_arguments)(self, argv)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the arguments of the command and parse the command line."""
        self.add_command_arguments(args or ())
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Return the help of the arguments and the further help text."""
        further = "" if self.further_help is None else f"\n{self.further_help()}\n"
        return super().format_help() + further
