"""Markdown tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Collection[int]) -> str:
    """
    Format a Markdown table whose columns are also aligned in a terminal.

    Args:
        header (`Sequence[str]`): The names of the columns.
        rows (`Sequence[Sequence[str]]`): The cells of each row. A `|` in a cell has to be escaped.
        text_columns (`Collection[int]`): Indices of the columns that hold text. Text is aligned left, numbers are
            aligned right.

    Example:

    ```python
    >>> from hf_federated.data.markdown_table import markdown_table

    >>> print(markdown_table(["client", "rows"], [["a", "12"], ["b", "7"]], text_columns={0}))
    | client | rows |
    | ------ | ---: |
    | a      |   12 |
    | b      |    7 |

    ```
    """
    widths = [max(3, *(len(text) for text in column)) for column in zip(header, *rows, strict=True)]
    lines = [
        [
            text.ljust(widths[column]) if column in text_columns else text.rjust(widths[column])
            for column, text in enumerate(row)
        ]
        for row in [header, *rows]
    ]
    rule = ["-" * width if column in text_columns else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])
