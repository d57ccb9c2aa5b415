"""Tests of the pieces of HTML pages."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hf_federated.reporting.html_page import (
    MAX_CURVES,
    Curve,
    escape,
    facts,
    heading,
    line_chart,
    nice_ticks,
    page,
    paragraph,
    pictures,
    progress_bar,
    table,
)


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202ex\r\n\x00"


class Reader(HTMLParser):
    """Collects the tags, the names of attributes, and the text of a page, and checks that tags are closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(content)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def test_hostile_text_becomes_text_everywhere_on_a_page():
    chart = line_chart([Curve(HOSTILE, [(1, 2), (2, 3)])] * 2, HOSTILE, HOSTILE, {HOSTILE: 2.5})
    parts = [
        heading(HOSTILE),
        paragraph(HOSTILE),
        facts({HOSTILE: HOSTILE}),
        progress_bar(0.3),
        table([HOSTILE], [[HOSTILE]], {(0, 0): HOSTILE}),
        pictures([chart]),
    ]
    content = page(HOSTILE, parts)
    reader = Reader(content)
    assert "script" not in reader.tags
    assert not {name for name in reader.attributes if name.startswith("on")}
    assert reader.text.count("<script>alert(1)</script>") >= 10
    assert not set(content) & {"\x1b", "\u202e", "\r", "\x00"}


def test_a_page_requests_nothing_and_follows_the_color_scheme():
    content = page("run", [line_chart([Curve("a", [(1, 2)])], "loss", "round")])
    assert not {"script", "link", "img", "iframe", "a"} & set(Reader(content).tags)
    assert "http://" not in content and "https://" not in content and "url(" not in content
    assert "default-src 'none'" in content
    assert "prefers-color-scheme:dark" in content


def test_a_page_is_read_again_only_while_the_run_lasts():
    assert 'http-equiv="refresh" content="5"' in page("run", [], refresh=5)
    assert 'http-equiv="refresh"' not in page("run", [])


def polylines(figure: str) -> list[list[tuple[float, float]]]:
    svg = ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")])
    lines = [line.attrib["points"] for line in svg.iter("polyline")]
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in lines]


def test_points_lie_at_their_share_of_the_axes():
    (line,) = polylines(line_chart([Curve("a", [(0, 0), (5, 2), (10, 1)])], "loss", "round"))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.3)
    assert y1 < y2 < y0


def test_values_that_are_not_finite_are_left_out():
    points = [(1, math.nan), (2, 0.5), (3, math.inf), (4, 0.25), (5, 1e300)]
    (line,) = polylines(line_chart([Curve("a", points)], "loss", "round"))
    assert len(line) == 2
    assert "no values yet" in line_chart([Curve("a", [(1, math.nan)])], "loss", "round")


@pytest.mark.parametrize("value", [0.0, 3.0, -1e29, 1e-12])
def test_a_constant_curve_lies_in_the_middle(value):
    (line,) = polylines(line_chart([Curve("a", [(1, value), (2, value)])], "loss", "round"))
    assert [y for _, y in line] == pytest.approx([116.0, 116.0])


def test_long_and_many_curves_stay_small():
    curves = [Curve(f"run {number}", [(x, x + number) for x in range(20_000)]) for number in range(30)]
    figure = line_chart(curves, "loss", "round")
    lines = polylines(figure)
    assert len(lines) == MAX_CURVES
    assert {len(line) for line in lines} == {300}
    assert "and 12 more curves" in figure
    assert len(figure) < 150_000


@pytest.mark.parametrize("low, high", [(0, 1), (0.31, 0.92), (-5, 5), (0, 1e30), (7.0001, 7.0002), (-1e-9, 1e-9)])
def test_ticks_are_few_and_inside_the_range(low, high):
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    width = high - low
    assert all(low - 1e-6 * width <= tick <= high + 1e-6 * width for tick in ticks)


def test_numbers_of_a_table_are_aligned_to_the_right():
    content = table(["site", "examples"], [["north", None], ["south", 12]], {(1, 1): "best"})
    assert '<td class="n best">12</td>' in content
    assert "<td>south</td>" in content


def test_a_long_name_is_cut():
    assert len(escape("x" * 10**6)) == 200


def test_rounds_have_whole_ticks():
    chart = line_chart([Curve("loss", [(1, 0.9), (2, 0.7)])], "training loss", "round")
    ticks = re.findall(r'text-anchor="middle">([^<]+)</text>', chart)
    assert ticks == ["1", "2", "round"]
