"""The page of a run: one self-contained HTML file, also while the run lasts."""

from __future__ import annotations

import html
import os
import time
from pathlib import Path

from ..utils.storage import replace_private
from .html_page import (
    Curve,
    facts,
    heading,
    line_chart,
    page,
    paragraph,
    pictures,
    progress_bar,
    short_number,
    table,
)
from .run_tables import MAX_METRICS, client_table, duration, metric_label, round_table, size, subtitle
from .run_view import RunView, read_run


# The page that a run with `live_report=True` writes. `Trainer.push_to_hub` does not upload it.
PAGE_NAME = "_live_report.html"
# Seconds after which a browser reads the page of a running run again.
REFRESH_SECONDS = 5
_MAX_ROUNDS = 20
_FRAME_HEIGHT = 620


class RunPage:
    """
    The page of a run in a notebook, as the last expression of a cell. Each display reads the files of the run.

    Args:
        folder (`str` or `os.PathLike`): Output folder of the run.

    Example:

    ```python
    >>> from hf_federated.reporting.run_page import RunPage

    >>> RunPage("outputs/run")  # doctest: +SKIP
    ```
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder

    def _repr_html_(self) -> str:
        return notebook_frame(read_run(self.folder))


def run_page(run: RunView, now: float | None = None) -> str:
    """
    Return the page of a run.

    Args:
        run ([`RunView`]): What the run has done so far.
        now (`float`, *optional*): Now, in seconds since 1970.
    """
    now = time.time() if now is None else now
    is_running = run.state == "running"
    body = [
        paragraph(subtitle(run)),
        progress_bar(run.num_finished / max(run.start.num_rounds, 1)),
        facts(_facts(run, now)),
        heading("Curves"),
        pictures(_pictures(run)),
        heading(f"{run.step_name.capitalize()}s"),
        _rounds(run),
    ]
    if run.clients:
        body += [heading("Clients"), _clients(run, now)]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    again = f" A browser reads it again every {REFRESH_SECONDS} seconds." if is_running else ""
    body.append(paragraph(f"Written at {written}.{again}", is_dim=True))
    return page(f"{run.name}: {run.state}", body, refresh=REFRESH_SECONDS if is_running else None)


def write_run_page(run: RunView, path: Path) -> None:
    """Replace the page of a run at once. Only the owner may read it, because it names the clients."""
    replace_private(path, run_page(run).encode())


def notebook_frame(run: RunView) -> str:
    """Return the page of a run in a frame, so that its style does not change the notebook."""
    content = html.escape(run_page(run).replace('<meta http-equiv="refresh"', '<meta name="refresh"'), quote=True)
    return f'<iframe srcdoc="{content}" sandbox="" style="width:100%;height:{_FRAME_HEIGHT}px;border:0"></iframe>'


def _facts(run: RunView, now: float) -> dict[str, str]:
    values = {run.step_name: f"{run.num_finished} / {run.start.num_rounds}"}
    for name in [*run.metrics[:3], "loss"]:
        if (value := run.last(name)) is not None:
            values["training loss" if name == "loss" else metric_label(name)] = short_number(value)
    values |= {
        f"time a {run.step_name}": duration(run.seconds_per_round()),
        "time left": duration(run.seconds_left(now)),
        "sent to clients": size(run.bytes_down),
        "received from clients": size(run.bytes_up),
    }
    counts = run.counts()
    values |= {f"clients {state}": str(number) for state, number in counts.items()}
    return {name: value for name, value in values.items() if value != "-"}


def _pictures(run: RunView) -> list[str]:
    step = run.step_name
    charts = [
        line_chart([Curve(metric_label(name), run.curve(name))], metric_label(name), step)
        for name in run.metrics[:MAX_METRICS]
    ]
    if loss := run.curve("loss"):
        charts.append(line_chart([Curve("training loss", loss)], "training loss", step))
    if not charts:
        return [line_chart([], "training loss", step)]
    seconds = [(entry.number, entry.seconds) for entry in run.finished if entry.seconds is not None]
    if len(seconds) > 1:
        charts.append(line_chart([Curve("seconds", seconds)], f"seconds a {step}", step, is_count=True))
    failed = [(entry.number, entry.num_failed) for entry in run.rounds if entry.num_failed is not None]
    if any(number for _, number in failed):
        charts.append(line_chart([Curve("failed", failed)], "failed or rejected clients", step, is_count=True))
    return charts


def _rounds(run: RunView) -> str:
    if not run.rounds:
        return paragraph(f"No {run.step_name} has begun.")
    header, rows = round_table(run, _MAX_ROUNDS)
    hidden = len(run.rounds) - len(rows)
    return table(header, rows[::-1]) + _more(hidden, f"earlier {run.step_name}s")


def _clients(run: RunView, now: float) -> str:
    header, rows = client_table(run, now)
    states = {(number, 1): str(row[1]) for number, row in enumerate(rows)}
    return table(header, rows, states) + _more(run.start.num_clients - len(rows), "more clients")


def _more(hidden: int, what: str) -> str:
    return paragraph(f"and {hidden} {what}", is_dim=True) if hidden > 0 else ""
