"""The tables of a report as CSV, for a spreadsheet, or as LaTeX, for a paper."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence


# The suffix of the file of each format. The Markdown file is always written.
SUFFIXES = {"markdown": ".md", "csv": ".csv", "latex": ".tex"}
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
}
_IN_LATEX = re.compile("|".join(map(re.escape, _LATEX)))
_COLUMN = re.compile(r"(?<!\\)\|")

Table = list[list[str]]


def convert(report: str, format: str) -> str:
    """
    The tables of a report in another format. The text between the tables is left out.

    Args:
        report (`str`): The report as Markdown.
        format (`str`): `"csv"`: the tables one after the other, with an empty line between them. `"latex"`: a
            `tabular` for each table, with the rules of the package `booktabs`.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.reports.formats import convert

    >>> print(convert("# Title\\n\\n| run | score |\\n| --- | ----: |\\n| A_1 |  0.5 |\\n", "latex"))
    \\begin{tabular}{lr}
    \\toprule
    run & score \\\\
    \\midrule
    A\\_1 & 0.5 \\\\
    \\bottomrule
    \\end{tabular}

    ```
    """
    tables = list(_tables(report))
    if format == "csv":
        return "\n".join(_to_csv(rows) for _, rows in tables)
    return "\n\n".join(_to_latex(rule, rows) for rule, rows in tables)


def _tables(report: str) -> Iterator[tuple[list[str], Table]]:
    """The rule and the other rows of each Markdown table."""
    lines: list[str] = []
    for line in [*report.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            header, rule, *rows = [[cell.strip() for cell in _COLUMN.split(row)[1:-1]] for row in lines]
            yield rule, [[cell.replace(r"\|", "|") for cell in row] for row in [header, *rows]]
            lines = []


def _to_csv(rows: Table) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _to_latex(rule: Sequence[str], rows: Table) -> str:
    columns = "".join("r" if cell.endswith(":") else "l" for cell in rule)
    header, *body = [" & ".join(_IN_LATEX.sub(_escape, cell) for cell in row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"])


def _escape(match: re.Match[str]) -> str:
    return _LATEX[match[0]]
