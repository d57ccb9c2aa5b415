"""A command of `hf-federated`, and its parser, which imports the command when it is used."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
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
        examples (`tuple[str, ...]`, *optional*): Command lines for the end of the help.
        has_recipe (`bool`, *optional*, defaults to `False`): Whether `--help SECTION` describes the fields of a
            recipe.
    """

    module: str
    help: str
    description: str
    add_arguments: str = "add_arguments"
    examples: tuple[str, ...] = ()
    has_recipe: bool = False

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
        super().__init__(description=command.description, allow_abbrev=False, add_help=False, **kwargs)
        self.command = command
        self._is_complete = False
        with_section: dict[str, Any] = {"nargs": "?", "metavar": "SECTION"} if command.has_recipe else {"nargs": 0}
        of_section = (
            ", or describe the fields of a section of a recipe, and exit" if command.has_recipe else " and exit"
        )
        self.add_argument("-h", "--help", action=_HelpAction, help=f"show this help{of_section}", **with_section)

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
        """Return the help of the arguments, the sections of a recipe, and examples."""
        parts = [super().format_help()]
        if self.command.has_recipe:
            from hf_federated.cli.field_help import sections_help

            parts.append(sections_help(self.prog))
        if self.command.examples:
            parts.append("\n".join(["examples:", *(f"  {example}" for example in self.command.examples)]) + "\n")
        return "\n".join(parts)

    def format_section(self, section: str) -> str:
        """Return the help of the fields of a section. An unknown section ends the command."""
        from hf_federated.cli.field_help import section_help

        try:
            return section_help(section)
        except ValueError as error:
            self.error(str(error))


class _HelpAction(argparse.Action):
    """`--help`, and `--help SECTION` for the fields of a recipe."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_section(values) if isinstance(values, str) else parser.format_help(), end="")
        parser.exit()
