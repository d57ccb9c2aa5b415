"""The findings as text: a table of the kinds, and the places of each kind."""

from __future__ import annotations

from collections.abc import Sequence

from ..markdown_table import markdown_table
from .doctor import Report
from .finding import Finding
from .site_table import TEST, TRAIN


# Number of places of a kind in a text.
MAX_PLACES = 5


def report_text(report: Report) -> str:
    """
    The findings of a report as text for a terminal.

    Args:
        report ([`Report`]): The report.
    """
    parts = [summary(report)]
    groups = grouped(report.findings)
    if groups:
        rows = [
            [group[0].severity, group[0].kind, str(sum(item.count for item in group) or ""), str(num_sites(group))]
            for group in groups
        ]
        parts.append(markdown_table(["severity", "finding", "rows", "sites"], rows, {0, 1}))
        parts += ["\n".join(group_lines(group)) for group in groups]
    if report.notes:
        parts.append("\n".join(["How files were read:", *(f"  {printable(text)}" for text in report.notes)]))
    if report.skipped:
        parts.append("\n".join(["Not checked:", *(f"  {printable(text)}" for text in report.skipped)]))
    return "\n\n".join(parts)


def summary(report: Report) -> str:
    """One line with the number of rows, sites and findings."""
    num_rows = report.num_rows
    tested = f" and {num_rows[TEST]} test rows" if num_rows.get(TEST) else ""
    named = {"texts": ", ".join(report.columns.texts), "labels": report.columns.label, "sites": report.columns.site}
    columns = "; ".join(f"{use} in {name}" for use, name in named.items() if name)
    found = ", ".join(
        f"{len(items)} {severity}{'' if len(items) == 1 else 's'}"
        for severity in ("error", "warning", "note")
        if (items := report.of_severity(severity))
    )
    sites = f" of {len(report.sites)} sites" if len(report.sites) != 1 else ""
    return printable(
        f"{num_rows.get(TRAIN, 0)} rows{sites}{tested}{f' ({columns})' if columns else ''}: {found or 'no findings'}."
    )


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The findings by severity and kind, in their order."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    return list(groups.values())


def group_lines(group: Sequence[Finding]) -> list[str]:
    """The lines of one kind: the first places, and what to do."""
    lines = [f"{group[0].severity}: {group[0].kind}"]
    lines += [f"  {printable(finding.placed_message)}" for finding in group[:MAX_PLACES]]
    if len(group) > MAX_PLACES:
        lines.append(f"  and {len(group) - MAX_PLACES} more")
    lines += [f"  {printable(cure)}" for cure in list(dict.fromkeys(item.cure for item in group))[:MAX_PLACES] if cure]
    return lines


def short_lines(findings: Sequence[Finding], command: str) -> list[str]:
    """
    One line for each kind of errors and warnings, for commands that do something else.

    Args:
        findings (`Sequence[Finding]`): The findings.
        command (`str`): The command that shows all findings, or an empty string.
    """
    lines = []
    for group in grouped([finding for finding in findings if finding.severity != "note"]):
        more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        first = group[0]
        lines.append(printable(f"{first.severity}: {first.kind}: {first.placed_message}{more}"))
    return [*lines, f"To see all findings, run: {command}"] if lines and command else lines


def printable(text: str) -> str:
    """The text without control characters. Its spaces are kept, because names can differ in spaces only."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def num_sites(group: Sequence[Finding]) -> int:
    """The number of sites, or of files for findings without a site."""
    return len({finding.site if finding.site is not None else finding.file for finding in group})
