"""The tables and the words about a run, for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .html_page import short_number
from .run_log import STATES, ClientEntry, RoundEntry
from .run_view import RunView


MAX_METRICS = 6
# A table: names of the columns, and rows. `None` is an empty cell.
Table = tuple[list[str], list[list[object]]]


def subtitle(run: RunView) -> str:
    """Return one line about the method, the clients and the rounds of a run."""
    start, step = run.start, run.step_name
    parts = [start.method] if start.method else []
    if start.num_clients:
        parts.append(f"{start.num_clients} client{'' if start.num_clients == 1 else 's'}")
    parts.append(f"{step} {run.num_finished} of {start.num_rounds} is over")
    if start.resumed:
        shown = ", ".join(map(str, start.resumed[-5:]))
        parts.append(f"resumed after {step} {shown}")
    stopped = " No process trains in the folder." if run.state == "stopped" else ""
    return f"{', '.join(parts)}.{stopped}"


def duration(seconds: float | None) -> str:
    """
    Format a number of seconds for a reader.

    Example:

    ```python
    >>> from hf_federated.reporting.run_tables import duration

    >>> duration(4.25), duration(95), duration(7260)
    ('4.2 s', '1 min 35 s', '2 h 1 min')
    ```
    """
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(num_bytes: int | None) -> str:
    """Format a number of bytes for a reader, such as `3.1 MB`."""
    if num_bytes is None:
        return "-"
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.1f} {unit}"
    return f"{num_bytes} B"


def metric_label(name: str) -> str:
    """Return the displayed name of a logged value, such as `accuracy` for `eval_accuracy`."""
    return "evaluation loss" if name == "eval_loss" else name.removeprefix("eval_").replace("_", " ")


def round_table(run: RunView, max_rows: int | None = None, max_metrics: int = MAX_METRICS) -> Table:
    """
    Return the last rounds of a run, the last one at the end. Columns without a value are left out.

    Args:
        run ([`RunView`]): The run.
        max_rows (`int`, *optional*): Largest number of rows.
        max_metrics (`int`, *optional*, defaults to 6): Largest number of metrics.
    """
    metrics = run.metrics[:max_metrics]
    header = [run.step_name, "training loss", *map(metric_label, metrics), "clients", "failed", "seconds", "bytes"]
    totals = {entry.number: _total(entry) for entry in run.rounds}
    rows: list[list[object]] = []
    for entry in run.rounds if max_rows is None else run.rounds[-max_rows:]:
        total, before = totals[entry.number], 0 if entry.number == 1 else totals.get(entry.number - 1)
        rows.append(
            [
                entry.number if entry.is_over else f"{entry.number} (not over)",
                *(number(entry.logs.get(name)) for name in ("loss", *metrics)),
                entry.num_done,
                entry.num_failed,
                None if entry.seconds is None else f"{entry.seconds:.1f}",
                None if total is None or before is None else size(total - before),
            ]
        )
    return _used_columns(header, rows)


def _ordered_clients(run: RunView) -> list[tuple[str, ClientEntry]]:
    """Return the clients of a run, those that need attention first."""
    order = {state: number for number, state in enumerate(STATES)}
    return sorted(run.clients.items(), key=lambda item: order.get(item[1].state, len(order)))


def client_table(run: RunView, now: float, max_rows: int | None = None) -> Table:
    """
    Return the clients of a run, those that need attention first. Columns without a value are left out.

    Args:
        run ([`RunView`]): The run.
        now (`float`): Now, in seconds since 1970.
        max_rows (`int`, *optional*): Largest number of rows.
    """
    header = ["client", "state", "since", "loss", "rounds", "failures", "received", "sent", "reason"]
    rows: list[list[object]] = []
    for name, client in _ordered_clients(run)[:max_rows]:
        shows_age = run.state == "running" and client.state != "waiting"
        rows.append(
            [
                name,
                client.state,
                duration(max(0.0, now - client.since)) if shows_age and client.since is not None else None,
                number(client.loss),
                client.num_rounds,
                client.num_failures or None,
                size(client.bytes_down),
                size(client.bytes_up),
                client.reason,
            ]
        )
    return _used_columns(header, rows)


def number(value: float | None) -> str | None:
    """Format a logged value for a column: with four decimals, unless it is very small or large."""
    if value is None:
        return None
    return f"{value:.4f}" if value == 0 or 0.001 <= abs(value) < 1000 else short_number(value)


def _used_columns(header: Sequence[str], rows: list[list[object]]) -> Table:
    used = [column for column in range(len(header)) if any(row[column] is not None for row in rows)]
    return [header[column] for column in used], [[row[column] for column in used] for row in rows]


def _total(entry: RoundEntry) -> int | None:
    return None if entry.bytes_down is None or entry.bytes_up is None else entry.bytes_down + entry.bytes_up
