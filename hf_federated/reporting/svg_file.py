"""An SVG file with line charts side by side and one legend, for Markdown and for model cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .html_page import Chart, Curve, escape


@dataclass(frozen=True)
class Panel:
    """
    A chart of a picture.

    Args:
        title (`str`): What the vertical axis shows.
        x_name (`str`): What the horizontal axis shows.
        curves (`Sequence[Curve]`): The curves.
        references (`Mapping[str, float]`): Name to value of dashed horizontal lines.
    """

    title: str
    x_name: str
    curves: Sequence[Curve]
    references: Mapping[str, float] = field(default_factory=dict)


_TITLE, _GAP, _ROW, _PER_ROW = 24, 20, 20, 4
_STYLE = """
svg{--bg:#fff;--dim:#4c5560;--line:#d5dae0;--c0:#2f6aa8;--c1:#d1495b;--c2:#1f7a35;--c3:#8a6d00;--c4:#0b7f97;--c5:#9b2f72}
@media(prefers-color-scheme:dark){svg{--bg:#14171b;--dim:#aab4bf;--line:#363d45;--c0:#79b0ea;--c1:#f2808f;--c2:#6fc983;
--c3:#dcbf4f;--c4:#5fc9df;--c5:#e08cc0}}
text{fill:var(--dim);font:11px system-ui,sans-serif}.t{font-size:14px}
"""


def svg_file(panels: Sequence[Panel]) -> str:
    """
    Return the content of an SVG file that needs no other file. It follows the color scheme of the reader.

    Args:
        panels (`Sequence[Panel]`): The charts, at least one.

    Example:

    ```python
    >>> from hf_federated.reporting.html_page import Curve
    >>> from hf_federated.reporting.svg_file import Panel, svg_file

    >>> svg_file([Panel("loss by round", "round", [Curve("run", [(1, 0.9), (2, 0.7)])])]).startswith("<svg")
    True
    ```
    """
    charts = [(panel.title, Chart(panel.curves, panel.title, panel.x_name, panel.references)) for panel in panels]
    width = len(charts) * (Chart.width + _GAP) - _GAP
    legend = max((chart.legend for _, chart in charts), key=len)
    legend = legend if len(legend) > 1 else []
    num_rows = -(-len(legend) // (_PER_ROW * len(charts)))
    height = _TITLE + Chart.height + 10 + _ROW * num_rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="var(--bg)"/>',
    ]
    for number, (title, chart) in enumerate(charts):
        left = number * (Chart.width + _GAP)
        parts.append(f'<text class="t" x="{left + 8}" y="17">{escape(title)}</text>')
        parts.append(f'<g transform="translate({left},{_TITLE})">{chart.content}</g>')
    column = width / (_PER_ROW * len(charts))
    for number, (name, style) in enumerate(legend):
        x, y = column * (number % (_PER_ROW * len(charts))) + 8, height - _ROW * num_rows
        y += _ROW * (number // (_PER_ROW * len(charts)))
        parts.append(f'<path d="M{x:.0f} {y + 8}h26" fill="none" stroke-width="2" {style}/>')
        parts.append(f'<text x="{x + 32:.0f}" y="{y + 12}">{escape(name, 24)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
