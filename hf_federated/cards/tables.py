"""Markdown tables and numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar


T = TypeVar("T")

MAX_ROWS = 20


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numeric: bool = False) -> str:
    """
    A Markdown table.

    Args:
        header (`Sequence[str]`): Names of the columns.
        rows (`Sequence[Sequence[Any]]`): Cells; `None` becomes an empty cell.
        numeric (`bool`, *optional*, defaults to `False`): Whether all columns but the first align to the right.

    Example:

    ```python
    >>> from hf_federated.cards.tables import table
    >>> print(table(["Round", "Loss"], [[1, 0.51234]], numeric=True))
    | Round | Loss |
    |:---|---:|
    | 1 | 0.5123 |

    ```
    """
    marks = [":---", *(("---:" if numeric else ":---") for _ in header[1:])]
    lines = [_line(header), "|" + "|".join(marks) + "|", *(_line([number(cell) for cell in row]) for row in rows)]
    return "\n".join(lines)


def number(value: Any) -> str:
    """A value for a table: four decimals, or four digits where these would show nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 0.001 <= abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


def count(value: int) -> str:
    """A count with thousands set apart."""
    return f"{value:,}"


def size(num_bytes: int) -> str:
    """
    Bytes in a unit that reads well, and exactly.

    Example:

    ```python
    >>> from hf_federated.cards.tables import size
    >>> size(2_340_000)
    '2.34 MB (2,340,000 bytes)'

    ```
    """
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.2f} {unit} ({count(num_bytes)} bytes)"
    return f"{count(num_bytes)} bytes"


def thin(rows: Sequence[T], limit: int = MAX_ROWS) -> list[T]:
    """At most `limit` rows, evenly spaced, with the first and the last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (limit - 1))] for place in range(limit)]


def metric_name(key: str) -> str:
    """`eval_f1_macro` as `F1 macro`, and `eval_loss` as `Evaluation loss`, which stands beside the training loss."""
    if key == "eval_loss":
        return "Evaluation loss"
    words = key.removeprefix("eval_").replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def plural(value: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")
