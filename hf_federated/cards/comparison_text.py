"""The comparison of a run with its baselines: the table that a recipe prints at its end, and a section of its card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .log_history import to_json_value
from .tables import table


_LABELS = {"centralized": "centralized", "local": "local-only (mean of {})"}


def comparison_facts(results: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """
    Return what a card states about the baselines of a run, without results of single clients.

    Args:
        results (`Mapping[str, Any]`, *optional*): The content of `results.json`. A server of a network has no
            baselines.

    Returns:
        `dict[str, Any]`, *optional*: `None` for a run without baselines.
    """
    if results is None or not results.get("baselines"):
        return None
    baselines = {
        name: {key: value for key, value in result.items() if key != "clients"}
        for name, result in results["baselines"].items()
    }
    federated = {key: value for key, value in results["federated"].items() if key != "clients"}
    names = ("metric", "lower_is_better", "num_test_rows", "num_test_clients", "strategy")
    facts = {**{name: results.get(name) for name in names}, "baselines": baselines, "federated": federated}
    return to_json_value(facts)


def comparison_heading(results: Mapping[str, Any]) -> str:
    """Return the line above the table: the metric, and the examples on which all models were tested."""
    title, num_held_out = results["metric"].replace("_", " "), results["num_test_clients"]
    clients = "" if num_held_out is None else f" of {num_held_out} held-out client{'' if num_held_out == 1 else 's'}"
    return f"{title[0].upper()}{title[1:]} on the same {results['num_test_rows']} examples{clients}:"


def comparison_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Return the header and the rows of the table: one row for each baseline, and one for the trained model."""
    metric = results["metric"]

    def cells(label: str, result: Mapping[str, Any]) -> list[str]:
        spread = f" ±{_number(result['spread'].get(metric))}" if result.get("spread") else ""
        sizes = [f"{result[name] / 1e6:.1f} MB" if name in result else "-" for name in ("bytes_up", "bytes_down")]
        seconds = "-" if result["seconds"] is None else f"{result['seconds']:.0f}"
        return [label, f"{_number(result['metrics'][metric])}{spread}", f"{result['num_epochs']:.2f}", *sizes, seconds]

    rows = [["", metric.replace("_", " "), "epochs", "bytes up", "bytes down", "seconds"]]
    for name, result in results["baselines"].items():
        rows.append(cells(_LABELS[name].format(result["num_clients"]), result))
    rows.append(cells(_trained(results), results["federated"]))
    return rows


def comparison_differences(results: Mapping[str, Any]) -> list[str]:
    """Return one line for each further test split, and the difference from each baseline."""
    federated, metric, trained = results["federated"], results["metric"], _trained(results)
    lines = [
        f"{trained} on the split {split}: {_number(metrics[metric])}"
        for split, metrics in federated.get("further_tests", {}).items()
    ]
    for name, result in results["baselines"].items():
        values = federated["metrics"][metric], result["metrics"][metric]
        if not all(isinstance(value, (int, float)) for value in values):
            continue  # A value that is not finite is a text in JSON.
        difference = values[0] - values[1]
        # Metrics for which lower values are better are not between 0 and 1, so they have no percentage points.
        shown = f"{difference:+.2f}" if results["lower_is_better"] else f"{100 * difference:+.1f} points"
        lines.append(f"{trained} minus {_LABELS[name].partition(' ')[0]}: {shown}")
    return lines


def comparison_section(results: Mapping[str, Any] | None) -> str:
    """
    Return the section of a card, or an empty text for a run without baselines.

    Args:
        results (`Mapping[str, Any]`, *optional*): The values of [`comparison_facts`].
    """
    if results is None:
        return ""
    header, *rows = comparison_rows(results)
    lines = [f"- {line}" for line in comparison_differences(results)]
    return "\n\n".join([comparison_heading(results), table(header, rows, numeric=True), "\n".join(lines)])


def _trained(results: Mapping[str, Any]) -> str:
    strategy = results.get("strategy")
    return "federated" if strategy is None else f"split ({strategy})"


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else str(value)
