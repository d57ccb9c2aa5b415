"""Self-contained HTML pages: frame, tables, and curves as inline SVG. No script, no server, no network.

A page follows the color scheme of the reader (`prefers-color-scheme`). Its content security policy forbids scripts
and requests. The functions return HTML; each text that they receive as an argument is escaped with [`escape`].
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..utils.printable import printable


# Longest text of another party on a page.
MAX_TEXT = 200
# Curves of one picture differ in color, and then in dashes.
NUM_COLORS = 6
_DASHES = ("", "6 3", "2 2")
MAX_CURVES = NUM_COLORS * len(_DASHES)
# Points of a curve. A picture is 640 units wide, so more points are not visible.
MAX_POINTS = 300
# Larger values are left out, like NaN: a picture of one such value shows nothing else.
_MAX_MAGNITUDE = 1e30
# A cell with more characters is wrapped.
_LONG_CELL = 60
# With more points, a curve has no marks.
_MAX_MARKS = 40
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 260, 62, 14, 12, 40

_CSS = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5b6570;--line:#d5dae0;--soft:#f3f5f7;
--c0:#2f6aa8;--c1:#d1495b;--c2:#1f7a35;--c3:#8a6d00;--c4:#0b7f97;--c5:#9b2f72;
--ok:#1f7a35;--run:#2f6aa8;--late:#8a6d00;--bad:#c0344a;--off:#8b95a1}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e3e7eb;--dim:#9aa5b1;--line:#363d45;--soft:#1e2329;
--c0:#79b0ea;--c1:#f2808f;--c2:#6fc983;--c3:#dcbf4f;--c4:#5fc9df;--c5:#e08cc0;
--ok:#6fc983;--run:#79b0ea;--late:#dcbf4f;--bad:#f2808f;--off:#7b8691}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:16px 20px 40px;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.35rem;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:26px 0 8px}
p{margin:4px 0 8px}.dim{color:var(--dim)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{padding:3px 12px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--dim);white-space:nowrap}
td{white-space:nowrap}td.w{white-space:normal;min-width:16em}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}td.best{font-weight:700}
.facts{display:flex;flex-wrap:wrap;gap:8px;margin:12px 0;padding:0;list-style:none}
.facts li{background:var(--soft);border-radius:6px;padding:6px 12px;min-width:96px}
.facts b{display:block;font-size:1.1rem;font-variant-numeric:tabular-nums}.facts span{color:var(--dim);font-size:.8rem}
.bar{height:10px;border-radius:5px;background:var(--soft);overflow:hidden;margin:10px 0}
.bar i{display:block;height:100%;background:var(--run)}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;border:1px solid var(--line);border-radius:6px;padding:8px}
figcaption{font-size:.85rem;color:var(--dim)}
svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font:11px system-ui,sans-serif}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;padding:0;list-style:none;font-size:.82rem}
.legend svg{display:inline-block;width:26px;height:8px;vertical-align:middle;margin-right:4px}
.done{color:var(--ok)}.training{color:var(--run)}.late{color:var(--late)}.failed,.expelled{color:var(--bad)}
.absent,.waiting{color:var(--off)}
"""


@dataclass(frozen=True)
class Curve:
    """
    A named curve of a picture.

    Args:
        name (`str`): Name in the legend.
        points (`Sequence[tuple[float, float]]`): Horizontal and vertical positions, in ascending order.
    """

    name: str
    points: Sequence[tuple[float, float]]


def escape(text: object, max_length: int = MAX_TEXT) -> str:
    """
    Escape a text of another party for HTML, also as the value of an attribute.

    Control characters and marks that change the direction of writing become visible escape sequences.

    Args:
        text (`object`): The text.
        max_length (`int`, *optional*, defaults to 200): Largest number of characters. A longer text ends in `…`.

    Example:

    ```python
    >>> from hf_federated.reporting.html_page import escape

    >>> escape("<b onclick='x'>north")
    '&lt;b onclick=&#x27;x&#x27;&gt;north'
    ```
    """
    return html.escape(printable(text, max_length), quote=True)


def page(title: str, body: Iterable[str], refresh: int | None = None) -> str:
    """
    Return a complete page.

    Args:
        title (`str`): Title of the window and first heading.
        body (`Iterable[str]`): HTML of the page, from the functions of this module.
        refresh (`int`, *optional*): Seconds after which a browser reads the page again.

    Example:

    ```python
    >>> from hf_federated.reporting.html_page import page, table

    >>> page("Sites", [table(["site", "examples"], [["north", 120]])]).startswith("<!doctype html>")
    True
    ```
    """
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:d}">'
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">{again}'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, is_dim: bool = False) -> str:
    """Return a paragraph. A dim paragraph is an explanation."""
    return f"<p{' class=dim' if is_dim else ''}>{escape(text, 2000)}</p>"


def facts(values: Mapping[str, str]) -> str:
    """Return a row of tiles, each with a value and its name."""
    return (
        '<ul class="facts">'
        + "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in values.items())
        + "</ul>"
    )


def progress_bar(share: float) -> str:
    """Return a bar that is filled to a share from 0 to 1."""
    return f'<div class="bar"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></div>'


def table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    classes: Mapping[tuple[int, int], str] | None = None,
    max_length: int = MAX_TEXT,
) -> str:
    """
    Return a table. A column is aligned to the right if its first cell with a value is a number or starts with a digit.

    Args:
        header (`Sequence[object]`): Names of the columns.
        rows (`Iterable[Sequence[object]]`): Cells. `None` is an empty cell.
        classes (`Mapping[tuple[int, int], str]`, *optional*): Class of a cell by row and column, such as `"best"`.
        max_length (`int`, *optional*, defaults to 200): Largest number of characters of a cell.
    """
    rows, classes = [list(row) for row in rows], classes or {}
    numeric = [
        _is_number(next((row[column] for row in rows if row[column] is not None), "")) for column in range(len(header))
    ]
    cells = "".join(
        f"<th{' class=n' if right else ''}>{escape(name)}</th>" for name, right in zip(header, numeric, strict=True)
    )
    lines = [f"<tr>{cells}</tr>"]
    for number, row in enumerate(rows):
        parts = []
        for column, (cell, right) in enumerate(zip(row, numeric, strict=True)):
            text = "" if cell is None else escape(cell, max_length)
            marks = ("n" if right else "", "w" if len(text) > _LONG_CELL else "", classes.get((number, column), ""))
            names = " ".join(filter(None, marks))
            parts.append(f'<td class="{escape(names)}">{text}</td>' if names else f"<td>{text}</td>")
        lines.append(f"<tr>{''.join(parts)}</tr>")
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _is_number(cell: object) -> bool:
    return isinstance(cell, (int, float)) or str(cell).lstrip("+-~")[:1].isdigit()


def pictures(figures: Iterable[str]) -> str:
    """Return figures in a grid that follows the width of the window."""
    return f'<div class="pictures">{"".join(figures)}</div>'


def line_chart(
    curves: Sequence[Curve],
    title: str,
    x_name: str,
    references: Mapping[str, float] | None = None,
    is_count: bool = False,
) -> str:
    """
    Return a figure with curves as inline SVG. Points that are not finite are left out.

    Args:
        curves (`Sequence[Curve]`): The curves. The picture has the first 18, and names the number of the others.
        title (`str`): What the vertical axis shows.
        x_name (`str`): What the horizontal axis shows.
        references (`Mapping[str, float]`, *optional*): Name to value of dashed horizontal lines.
        is_count (`bool`, *optional*, defaults to `False`): Whether the vertical axis begins at 0 and has ticks at
            integers only.

    Example:

    ```python
    >>> from hf_federated.reporting.html_page import Curve, line_chart

    >>> "<polyline" in line_chart([Curve("loss", [(1, 0.9), (2, 0.7)])], "training loss", "round")
    True
    ```
    """
    chart = Chart(curves, title, x_name, references, is_count)
    if not chart.legend:
        return f"<figure><figcaption>{escape(title)}: no values yet</figcaption></figure>"
    more = f"<p class=dim>and {chart.num_hidden} more curves</p>" if chart.num_hidden else ""
    legend = _legend(chart.legend) if len(chart.legend) > 1 else ""
    box = f'viewBox="0 0 {Chart.width} {Chart.height}" role="img" aria-label="{escape(title)}"'
    return f"<figure><figcaption>{escape(title)}</figcaption><svg {box}>{chart.content}</svg>{legend}{more}</figure>"


class Chart:
    """
    The content of a line chart, of `width` × `height` units.

    Args:
        curves, title, x_name, references, is_count: See [`line_chart`].

    Attributes:
        content (`str`): Elements of SVG. Their colors are the variables `--c0` to `--c5`, `--dim` and `--line` of CSS.
        legend (`list[tuple[str, str]]`): Name and attributes of each drawn line. A curve has the style of its position
            in `curves`, also if another chart has fewer curves with values.
        num_hidden (`int`): Number of curves with values that are not drawn.
    """

    width, height = _WIDTH, _HEIGHT

    def __init__(
        self,
        curves: Sequence[Curve],
        title: str,
        x_name: str,
        references: Mapping[str, float] | None = None,
        is_count: bool = False,
    ) -> None:
        points = [_thin([point for point in curve.points if all(map(_is_shown, point))]) for curve in curves]
        drawn = [number for number, each in enumerate(points) if each and number < MAX_CURVES]
        self.num_hidden = sum(map(bool, points)) - len(drawn)
        self.legend: list[tuple[str, str]] = []
        self.content = ""
        if not drawn:
            return
        lines = {name: value for name, value in (references or {}).items() if _is_shown(value)}
        xs = [x for number in drawn for x, _ in points[number]]
        ys = [*(y for number in drawn for _, y in points[number]), *lines.values()]
        scale = _Scale(min(xs), max(xs), min(ys), max(ys), is_count)
        parts = scale.axes(x_name, counts_x=all(float(x).is_integer() for x in xs))
        for number in drawn:
            name, style = curves[number].name, _style(number)
            parts.append(_curve(points[number], scale, style, name if len(drawn) > 1 else title))
            self.legend.append((name, style))
        for number, (name, value) in enumerate(lines.items()):
            style = f'stroke="var(--dim)" stroke-dasharray="{4 + 2 * number} 4"'
            y = scale.y(value)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" fill="none" stroke-width="1.5" {style}/>')
            self.legend.append((f"{name} {short_number(value)}", style))
        self.content = "".join(parts)


def _is_shown(value: float) -> bool:
    return abs(value) <= _MAX_MAGNITUDE  # A comparison with NaN is false.


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 26 8"><path d="M0 4H26" fill="none" stroke-width="2" {style}/></svg>{escape(name, 60)}'
        "</li>"
        for name, style in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _style(number: int) -> str:
    dash = _DASHES[number // NUM_COLORS % len(_DASHES)]
    return f'stroke="var(--c{number % NUM_COLORS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _curve(points: Sequence[tuple[float, float]], scale: _Scale, style: str, name: str) -> str:
    places = [(scale.x(x), scale.y(y)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{line}" fill="none" stroke-width="1.8" {style}/>']
    if len(points) <= _MAX_MARKS:
        color = style.partition('"')[2].partition('"')[0]
        for (x, y), (left, value) in zip(places, points, strict=True):
            hint = escape(f"{name}: {short_number(value)} at {short_number(left)}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"><title>{hint}</title></circle>')
    return "".join(parts)


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `MAX_POINTS` evenly spaced points, with the first and the last."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


class _Scale:
    """Maps values to positions in a picture, with a margin above and below the curves."""

    def __init__(self, left: float, right: float, bottom: float, top: float, is_count: bool) -> None:
        self.left, self.right = (left, right) if right > left else (left - 0.5, left + 0.5)
        self.is_count = is_count
        margin = 0.06 * (top - bottom) or 0.05 * abs(top) or 0.5
        self.bottom, self.top = 0.0 if is_count else bottom - margin, top + margin

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self.top - value) / (self.top - self.bottom) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_name: str, counts_x: bool) -> list[str]:
        """Grid lines, ticks and the name of the horizontal axis, whose ticks are integers if `counts_x` is set."""
        parts = []
        for value in nice_ticks(self.bottom, self.top):
            if self.is_count and not value.is_integer():
                continue
            y = self.y(value)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="var(--line)"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short_number(value)}</text>')
        for value in nice_ticks(self.left, self.right):
            if counts_x and not value.is_integer():
                continue
            x = self.x(value)
            parts.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{short_number(value)}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
        return parts


def nice_ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """
    Return round numbers from `low` to `high`.

    Example:

    ```python
    >>> from hf_federated.reporting.html_page import nice_ticks

    >>> nice_ticks(0.31, 0.92)
    [0.4, 0.6, 0.8]
    ```
    """
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def short_number(value: float) -> str:
    """
    Format a number with at most four significant digits, and a large number with a unit prefix.

    Example:

    ```python
    >>> from hf_federated.reporting.html_page import short_number

    >>> short_number(0.84375), short_number(12), short_number(2_500_000)
    ('0.8438', '12', '2.5M')
    ```
    """
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"
