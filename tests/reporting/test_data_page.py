"""The pictures of `hf-federated check`: the lengths of bars, and the largest sites of many."""

from __future__ import annotations

import re

from hf_federated.data.checks import Report
from hf_federated.data.checks.site_table import Columns
from hf_federated.reporting.data_page import bar_chart, data_page, stacked_chart


def bars(html: str) -> list[tuple[float, float]]:
    """The left end and the width of each bar."""
    return [(float(x), float(width)) for x, width in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', html)]


def test_bars_are_proportional_to_the_rows():
    (_, north), (_, south) = bars(bar_chart({"north": 300, "south": 75}, "rows"))
    assert abs(north - 4 * south) < 0.2


def test_stacked_bars_divide_a_row_by_the_shares_of_the_labels():
    html = stacked_chart({"north": {"a": 6, "b": 2}, "south": {"b": 1}}, ["a", "b"], "labels")
    (left, first), (middle, second), (_, whole) = bars(html)
    assert abs(first - 3 * second) < 0.3 and abs(middle - left - first) < 0.2 and abs(first + second - whole) < 0.2
    assert "north, a: 6 (75 %)" in html


def test_rare_labels_share_a_color():
    counts = {"north": {f"label {number}": 10 - number for number in range(9)}}
    html = stacked_chart(counts, list(counts["north"]), "labels")
    assert "other labels" in html and "label 4" in html and "label 5<" not in html
    assert len(bars(html)) == 6


def test_page_of_many_sites_shows_the_largest_and_escapes_names():
    sites = {f"<b>{number}": number for number in range(1, 101)}
    html = data_page(Report([], Columns(), sites, {"train": 5050}, {"x": sites}), "data")
    assert "&lt;b&gt;100<" in html and "&lt;b&gt;60<" not in html and "and 60 more" in html
    assert "<b>1" not in html.replace("<b>100</b>", "")
