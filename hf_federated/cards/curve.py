"""The learning curve of a card, as an SVG file next to the card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from ..reporting.html_page import Curve
from ..reporting.metric_names import is_metric
from ..reporting.svg_file import Panel, svg_file
from .card_record import CardRecord
from .tables import metric_name


CURVE_NAME = "learning_curve.svg"


def learning_curve(record: CardRecord, steps: Sequence[Mapping[str, Any]], step_name: str) -> str | None:
    """
    Return the content of the SVG file: the metric of the run, and the training loss.

    The metric is `metric_for_best_model`, the metric of the comparison with baselines, or the first metric. Baselines
    are dashed lines.

    Args:
        record ([`~hf_federated.cards.card_record.CardRecord`]): The run.
        steps (`Sequence[Mapping[str, Any]]`): The logged values of each step.
        step_name (`str`): What a step is, such as `"round"`.

    Returns:
        `str`, *optional*: `None` if no value has two steps.
    """
    key = "step" if step_name != "round" else step_name
    comparison = record.comparison or {}
    names = dict.fromkeys(name for logs in steps for name in logs if is_metric(name))
    wanted = [record.results.get("best_by"), comparison.get("metric")]
    metric = next((name for each in wanted if each for name in (each, f"eval_{each}") if name in names), None)
    metric = metric or next((name for name in names if name != "eval_loss"), "eval_loss")
    references = {
        {"local": "local-only"}.get(name, name): value
        for name, result in comparison.get("baselines", {}).items()
        if isinstance(value := result["metrics"].get(metric.removeprefix("eval_")), (int, float))
    }
    panels = []
    for name, title in ((metric, metric_name(metric)), ("loss", "Training loss")):
        points = [(float(logs[key]), float(logs[name])) for logs in steps if isinstance(logs.get(name), (int, float))]
        if len(points) > 1:
            lines = references if name == metric else {}
            panels.append(Panel(title, step_name, [Curve("this model", points)], lines))
    return svg_file(panels) if panels else None


def save_card(text: str, curve: str | None, directory: str | Path) -> None:
    """
    Write `README.md`, and the learning curve that it shows, into a directory.

    Args:
        text (`str`): The text of the card.
        curve (`str`, *optional*): The content of the SVG file.
        directory (`str` or `pathlib.Path`): The directory.
    """
    ModelCard(text).save(Path(directory) / "README.md")
    if curve is not None:
        (Path(directory) / CURVE_NAME).write_text(curve, encoding="utf-8")
