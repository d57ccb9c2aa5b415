"""`hf-federated watch`: show a run while it lasts, in a terminal or as a page."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.text import aligned_rows
from hf_federated.reporting.html_page import short_number
from hf_federated.reporting.run_log import RoundEntry
from hf_federated.reporting.run_page import run_page
from hf_federated.reporting.run_tables import client_table, duration, round_table, size, subtitle
from hf_federated.reporting.run_view import WATCHED, RunView, is_training, read_run, run_folder
from hf_federated.utils.printable import MAX_LENGTH, printable
from hf_federated.utils.storage import write_private


# Cursor to the top left, and erase the rest of the line, the rest of the screen or all of it. All terminals know them.
_HOME, _END_OF_LINE, _END_OF_SCREEN, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"
_MAX_METRICS = 4
_MAX_ID = 24
_BAR = 30
# The lines of the screen that are not rows of a table.
_OTHER_LINES = 12


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("folder", metavar="DIR", help="output folder of the run, or of all parties")
    parser.add_argument("--once", action="store_true", help="print the run once and exit")
    parser.add_argument(
        "--output", metavar="FILE", help="also write the page of the run to this HTML file, and again when it changes"
    )
    parser.add_argument(
        "--interval",
        type=float,
        metavar="SECONDS",
        default=1.0,
        help="seconds between two looks at the files (default: %(default)s)",
    )


def watch(arguments: argparse.Namespace) -> int:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Returns:
        `int`: `0` if the run is complete, or was running when the command ended, else `1`.

    Raises:
        CommandError: If the folder contains no run, or a file is damaged.
    """
    if not arguments.interval > 0:
        raise CommandError(f"--interval is {arguments.interval}, but must be more than 0.")
    with command_errors(arguments.folder):
        folder = run_folder(Path(arguments.folder))
    if arguments.once:
        run = _read(folder, arguments.output)
        print("\n".join(describe(run)))
    else:
        run = _follow(folder, arguments)
    return 0 if run.state in ("running", "complete", "saved") else 1


def _follow(folder: Path, arguments: argparse.Namespace) -> RunView:
    """Show the run until it ends or the user presses Ctrl+C. Return what was shown last."""
    is_screen, num_shown = sys.stdout.isatty(), 0
    run = _read(folder, arguments.output)
    if run.state != "running":
        print("\n".join(describe(run)))
        return run
    print(_CLEAR if is_screen else "", end="")
    with contextlib.suppress(KeyboardInterrupt):
        for run in _views(folder, arguments):
            if is_screen:
                _show_on_screen(run)
            else:
                _print_rounds(run, num_shown)
                num_shown = run.num_finished
        if not is_screen:
            print(_headline(run))
    return run


def _read(folder: Path, output: str | None) -> RunView:
    with command_errors(str(folder)):
        run = read_run(folder)
    if output is not None:
        with command_errors(f"--output {output}"):
            write_private(Path(output), run_page(run).encode())
    return run


def _views(folder: Path, arguments: argparse.Namespace) -> Iterator[RunView]:
    """Yield the run at once and after each pause, until it ends."""
    stamp: list[object] = []
    while True:
        # Taken before the files are read: what changes meanwhile is read after the next pause.
        if (found := _stamp(folder)) != stamp:
            run, stamp = _read(folder, arguments.output), found
        yield run
        if run.state != "running":
            return
        time.sleep(arguments.interval)


def _show_on_screen(run: RunView) -> None:
    """Draw a terminal anew from its top."""
    lines = describe(run, max_lines=shutil.get_terminal_size().lines - 1)
    print(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in lines) + _END_OF_SCREEN, end="", flush=True)


def _print_rounds(run: RunView, num_shown: int) -> None:
    """Print one line for each round that is over and not shown yet."""
    for entry in run.finished:
        if entry.number > num_shown:
            print(_line(run, entry), flush=True)


def _line(run: RunView, entry: RoundEntry) -> str:
    """One line about a round, for an output that is no terminal."""
    values = {name: entry.logs[name] for name in ("loss", *run.metrics[:_MAX_METRICS]) if name in entry.logs}
    shown = [f"{printable(name, 40)}={short_number(value)}" for name, value in values.items()]
    counts = {"clients": entry.num_done, "failed": entry.num_failed}
    shown += [f"{name}={count}" for name, count in counts.items() if count is not None]
    return f"{run.step_name} {entry.number} of {run.start.num_rounds}: {' '.join(shown)}"


def _stamp(folder: Path) -> list[object]:
    """What changes when the run writes, or when its process ends."""
    stamps: list[object] = [is_training(folder)]
    for name in WATCHED:
        try:
            found = os.stat(folder / name)
            stamps.append((found.st_mtime_ns, found.st_size))
        except OSError:
            stamps.append(None)
    return stamps


def describe(run: RunView, max_lines: int | None = None, now: float | None = None) -> list[str]:
    """
    Describe a run as lines of plain text.

    Args:
        run ([`RunView`]): The run.
        max_lines (`int`, *optional*): Number of lines of the screen. By default, all rounds and clients are shown.
        now (`float`, *optional*): Now, in seconds since 1970.
    """
    now = time.time() if now is None else now
    share = min(1.0, run.num_finished / max(run.start.num_rounds, 1))
    filled = round(_BAR * share)
    progress = f"[{'#' * filled}{'.' * (_BAR - filled)}] {100 * share:.0f} %"
    if (each := run.seconds_per_round()) is not None:
        progress += f", {duration(each)} a {run.step_name}"
    if (left := run.seconds_left(now)) is not None:
        progress += f", about {duration(left)} left"
    lines = [_headline(run), printable(subtitle(run)), progress]
    if run.state == "running":
        lines.append(f"last change {duration(max(0.0, now - run.updated))} ago")
    if run.bytes_down is not None:
        lines.append(f"bytes: {size(run.bytes_down)} to clients, {size(run.bytes_up)} from clients")
    if counts := run.counts():
        lines.append("clients: " + ", ".join(f"{number} {state}" for state, number in counts.items()))
    rows = None if max_lines is None else max(max_lines - _OTHER_LINES, 4)
    lines += ["", *_round_lines(run, None if rows is None else rows // 2)]
    if run.clients:
        lines += ["", *_client_lines(run, None if rows is None else rows - rows // 2, now)]
    width = shutil.get_terminal_size().columns if max_lines is not None else None
    return [line[:width] for line in lines[:max_lines]]


def _headline(run: RunView) -> str:
    return f"{printable(run.name)}: {printable(run.state)}"


def _round_lines(run: RunView, max_rows: int | None) -> list[str]:
    if not run.rounds:
        return [f"No {run.step_name} has begun."]
    return _aligned(*round_table(run, max_rows, _MAX_METRICS), max_length=40, has_numbers=True)


def _client_lines(run: RunView, max_rows: int | None, now: float) -> list[str]:
    header, rows = client_table(run, now, max_rows)
    for row in rows:
        row[0] = printable(row[0], _MAX_ID)
    hidden = max(run.start.num_clients, len(run.clients)) - len(rows)
    return _aligned(header, rows) + ([f"and {hidden} more clients"] if hidden else [])


def _aligned(
    header: Sequence[str], rows: Sequence[Sequence[object]], max_length: int = MAX_LENGTH, has_numbers: bool = False
) -> list[str]:
    cells = [["-" if cell is None else printable(cell, max_length) for cell in row] for row in (header, *rows)]
    return aligned_rows(cells, has_numbers)
