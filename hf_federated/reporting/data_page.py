"""The findings of `hf-federated check` as one self-contained HTML page with pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..data.checks import Finding, Report
from ..data.checks.report import grouped, num_sites
from .html_page import NUM_COLORS, escape, facts, heading, page, paragraph, pictures, table


# Number of sites in a picture, and of places of one kind in a table.
MAX_SITES, MAX_PLACES = 40, 100
_WIDTH, _LEFT, _RIGHT, _ROW = 460, 120, 60, 20
# The classes of `html_page` with the colors of failed, late and finished clients.
SEVERITY_CLASSES = {"error": "failed", "warning": "late", "note": "absent"}


def data_page(report: Report, path: str) -> str:
    """
    Return the page.

    Args:
        report ([`Report`]): The findings and the counts of rows and labels.
        path (`str`): The path that was checked, for the title.

    Example:

    ```python
    >>> from hf_federated.data.checks import Report
    >>> from hf_federated.data.checks.site_table import Columns
    >>> from hf_federated.reporting.data_page import data_page

    >>> report = Report([], Columns(("text",), "label"), {"north": 3}, {"train": 3}, {"fine": {"north": 3}})
    >>> "no findings" in data_page(report, "sites")
    True

    ```
    """
    counts = {f"{name}s": str(len(report.of_severity(name))) for name in SEVERITY_CLASSES}
    rows = {f"{split} rows": f"{count:,}" for split, count in report.num_rows.items()}
    body = [facts({**rows, "sites": str(len(report.sites)), **counts})]
    sites = report.sites
    if len(sites) > MAX_SITES:
        sites = dict(sorted(sites.items(), key=lambda item: -item[1]))
    charts = [bar_chart(sites, "Training rows of each site")] if sites else []
    if report.labels:
        num_labels = sum(sum(counts.values()) for counts in report.labels.values())
        unit = "tags" if num_labels > sum(report.sites.values()) else "rows"
        charts.append(
            stacked_chart(_by_site(report, sites), list(report.labels), f"Share of each label ({unit}) at each site")
        )
    body.append(pictures(charts))
    groups = grouped(report.findings)
    body += [heading("Findings"), _kinds(groups) if groups else paragraph("no findings")]
    for group in groups:
        body += _group(group)
    if report.notes:
        body += [heading("How files were read"), *(paragraph(text, is_dim=True) for text in report.notes)]
    if report.skipped:
        body += [heading("Not checked"), *(paragraph(text, is_dim=True) for text in report.skipped)]
    return page(f"Check of {path}", body)


def bar_chart(values: Mapping[str, int], title: str) -> str:
    """
    Return a figure with one horizontal bar for each name.

    Args:
        values (`Mapping[str, int]`): The length of the bar of each name. The picture has the first 40 names,
            and states how many there are in addition.
        title (`str`): The title of the figure.
    """
    shown = dict(list(values.items())[:MAX_SITES])
    longest = max(shown.values(), default=1) or 1
    parts = []
    for number, (name, value) in enumerate(shown.items()):
        width = max(1.0, value / longest * (_WIDTH - _LEFT - _RIGHT))
        parts.append(_name(number, name))
        parts.append(_bar(_LEFT, number, width, "var(--c0)", f"{name}: {value:,}"))
        parts.append(f'<text x="{_LEFT + width + 6:.1f}" y="{_middle(number)}">{value:,}</text>')
    return _figure(title, parts, len(shown), len(values) - len(shown))


def stacked_chart(counts: Mapping[str, Mapping[str, int]], labels: Sequence[str], title: str) -> str:
    """
    Return a figure with one bar for each name, which the shares of the labels divide.

    Args:
        counts (`Mapping[str, Mapping[str, int]]`): Number of rows of each label by name.
        labels (`Sequence[str]`): The labels. The most frequent ones have a color, and the others share the last one.
        title (`str`): The title of the figure.
    """
    totals = {label: sum(row.get(label, 0) for row in counts.values()) for label in labels}
    ordered = sorted(labels, key=lambda label: -totals[label])
    named = ordered if len(ordered) <= NUM_COLORS else ordered[: NUM_COLORS - 1]
    shown = dict(list(counts.items())[:MAX_SITES])
    parts = []
    for number, (name, row) in enumerate(shown.items()):
        parts.append(_name(number, name))
        total, left = sum(row.values()) or 1, float(_LEFT)
        cells = [(label, row.get(label, 0)) for label in named]
        cells.append(("other labels", total - sum(count for _, count in cells)))
        for color, (label, count) in enumerate(cells):
            if count > 0:
                width = count / total * (_WIDTH - _LEFT - _RIGHT)
                text = f"{name}, {label}: {count:,} ({100 * count / total:.0f} %)"
                parts.append(_bar(left, number, width, f"var(--c{min(color, NUM_COLORS - 1)})", text))
                left += width
    legend = [*named, *(["other labels"] if len(named) < len(ordered) else [])]
    return _figure(title, parts, len(shown), len(counts) - len(shown), legend)


def _by_site(report: Report, sites: Mapping[str, int]) -> dict[str, dict[str, int]]:
    by_site: dict[str, dict[str, int]] = {site: {} for site in sites}
    for label, places in report.labels.items():
        for site, count in places.items():
            by_site.setdefault(site, {})[label] = count
    return by_site


def _kinds(groups: Sequence[Sequence[Finding]]) -> str:
    rows = [
        [group[0].severity, group[0].kind, sum(item.count for item in group) or None, num_sites(group)]
        for group in groups
    ]
    classes = {(number, 0): SEVERITY_CLASSES[group[0].severity] for number, group in enumerate(groups)}
    return table(["severity", "finding", "rows", "sites"], rows, classes)


def _group(group: Sequence[Finding]) -> list[str]:
    rows = [[item.place or None, item.count or None, item.message] for item in group[:MAX_PLACES]]
    body = [
        heading(f"{group[0].severity}: {group[0].kind}"),
        table(["place", "rows", "finding"], rows, max_length=600),
    ]
    if len(group) > MAX_PLACES:
        body.append(paragraph(f"and {len(group) - MAX_PLACES} more"))
    return [*body, *(paragraph(cure) for cure in dict.fromkeys(item.cure for item in group) if cure)][: MAX_PLACES + 2]


def _name(number: int, name: str) -> str:
    return (
        f'<text x="{_LEFT - 8}" y="{_middle(number)}" text-anchor="end">{escape(_visible(name or "all"), 20)}</text>'
    )


def _visible(name: str) -> str:
    """The name, in quotes if whitespace around it would be invisible."""
    return name if name == " ".join(name.split()) else repr(name)


def _middle(number: int) -> int:
    return number * _ROW + 15


def _bar(left: float, number: int, width: float, color: str, hint: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{number * _ROW + 4}" width="{width:.1f}" height="{_ROW - 6}" fill="{color}">'
        f"<title>{escape(hint)}</title></rect>"
    )


def _figure(title: str, parts: Sequence[str], num_rows: int, num_hidden: int, legend: Sequence[str] = ()) -> str:
    height = num_rows * _ROW + 8
    more = f"<p class=dim>and {num_hidden} more</p>" if num_hidden else ""
    items = "".join(
        f'<li><svg viewBox="0 0 26 8"><rect width="26" height="8" fill="var(--c{min(number, NUM_COLORS - 1)})"/></svg>'
        f"{escape(_visible(name), 60)}</li>"
        for number, name in enumerate(legend)
    )
    svg = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    shown = f'<ul class="legend">{items}</ul>' if items else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{shown}{more}</figure>"
