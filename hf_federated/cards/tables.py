"""Format Markdown tables and numbers for reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..utils.printable import printable


T = TypeVar("T")

MAX_ROWS = 20


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numeric: bool = False) -> str:
    """
    Format a Markdown table.

    Args:
        header (`Sequence[str]`):
            Names of the columns.
        rows (`Sequence[Sequence[Any]]`):
            Cells of each row. `None` becomes an empty cell.
        numeric (`bool`, *optional*, defaults to `False`):
            Whether all columns except the first are aligned to the right.

    Example:

    ```python
    >>> from hf_federated.cards.tables import table
    >>> print(table(["Round", "Loss"], [[1, 0.51234]], numeric=True))
    | Round | Loss |
    |:---|---:|
    | 1 | 0.5123 |

    ```
    """
    alignment = [":---", *(("---:" if numeric else ":---") for _ in header[1:])]
    lines = [_line(header), "|" + "|".join(alignment) + "|"]
    lines += [_line([format_value(cell) for cell in row]) for row in rows]
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """Format a table cell. Floats have four decimals, or four significant digits if they are very small or large."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 0.001 <= abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


def format_count(value: int) -> str:
    """Format a count with separators between thousands."""
    return f"{value:,}"


def format_bytes(num_bytes: int) -> str:
    """
    Format a number of bytes in a suitable unit, with the exact number in parentheses.

    Example:

    ```python
    >>> from hf_federated.cards.tables import format_bytes
    >>> format_bytes(2_340_000)
    '2.34 MB (2,340,000 bytes)'

    ```
    """
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.2f} {unit} ({format_count(num_bytes)} bytes)"
    return f"{format_count(num_bytes)} bytes"


def subsample(rows: Sequence[T], limit: int = MAX_ROWS) -> list[T]:
    """Return at most `limit` evenly spaced rows, including the first and the last row."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (limit - 1))] for index in range(limit)]


def metric_name(key: str) -> str:
    """Return the displayed name of a metric: `eval_f1_macro` becomes `F1 macro`, `eval_loss` `Evaluation loss`."""
    if key == "eval_loss":  # the same table has the training loss
        return "Evaluation loss"
    if key == "eval_num_tokens":  # TRL counts the tokens of the training
        return "Training tokens"
    words = key.removeprefix("eval_").replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(printable(cell).replace("|", "\\|") for cell in cells) + " |"


def plural(value: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{format_count(value)} {noun}" + ("" if value == 1 else "s")
