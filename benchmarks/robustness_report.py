"""Tables and the picture of `robustness.py`."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt


SCORES = {"accuracy": "accuracy", "attack_success": "success of the backdoor"}
# Aggregations without a defense, and those of Flower.
NOT_DRAWN = ("Flower", "fedopt", "fedprox", "scaffold")
# Order of the rows.
AGGREGATIONS = (
    "fedavg",
    "median",
    "trimmed mean",
    "geometric median",
    "Krum",
    "multi-Krum",
    "norm-bounded mean",
    "centered clipping",
    "FLTrust",
)
ATTACKS = (
    "none",
    "sign flip",
    "scaled flip",
    "ALIE",
    "inner product",
    "min-max",
    "label flip",
    "backdoor",
    "free rider",
)
TITLES = {"iid": "IID", "dirichlet": "label Dirichlet, α = 0.5"}

# Values of one score by (partition, share, aggregation, attack), one for each seed.
Cells = dict[tuple[str, float, str, str], list[float]]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the results of all runs. A failed run has a key `error`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells_of(results: Sequence[dict[str, Any]], score: str) -> Cells:
    """
    Group the values of a score.

    Args:
        results (`Sequence[dict[str, Any]]`): Results of runs.
        score (`str`): `"accuracy"` or `"attack_success"`.
    """
    cells: Cells = defaultdict(list)
    for result in results:
        # A federation whose round fails has no model to use.
        value = result.get(score, 0.0 if score == "accuracy" else float("nan"))
        cells[result["partition"], result["share"], result["aggregation"], result["attack"]].append(100 * value)
    shares = {share for _, share, _, _ in cells}
    for (partition, _, aggregation, attack), values in list(cells.items()):
        if attack == "none":  # the attack-free runs belong to every share
            cells |= {(partition, share, aggregation, attack): values for share in shares}
    return cells


def table(cells: Cells, partition: str, share: float) -> str:
    """
    Format the means over the seeds as a Markdown table.

    Args:
        cells (`dict`): Values by (partition, share, aggregation, attack).
        partition (`str`): `"iid"` or `"dirichlet"`.
        share (`float`): Share of hostile clients.
    """
    attacks, aggregations = names(cells, partition, share)
    lines = ["| aggregation | " + " | ".join(attacks) + " |", "|---" * (len(attacks) + 1) + "|"]
    for aggregation in aggregations:
        values = [cells.get((partition, share, aggregation, attack), []) for attack in attacks]
        shown = [f"{statistics.fmean(value):.1f}" if value else "" for value in values]
        lines.append("| " + " | ".join([aggregation, *shown]) + " |")
    return "\n".join(lines)


def names(cells: Cells, partition: str, share: float) -> tuple[list[str], list[str]]:
    """Return the attacks and the aggregations of a table, in the order of the results."""
    keys = [key for key in cells if key[:2] == (partition, share)]
    return (
        _in_order({attack for _, _, _, attack in keys}, ATTACKS),
        _in_order({aggregation for _, _, aggregation, _ in keys}, AGGREGATIONS),
    )


def _in_order(names: set[str], order: Sequence[str]) -> list[str]:
    """Sort names by their position in an order. Other names follow alphabetically."""
    return [name for name in order if name in names] + sorted(names - set(order))


def best_rules(cells: Cells, partition: str, share: float) -> str:
    """Name the best robust aggregation for each attack, and its distance to the attack-free mean in points."""
    attacks, aggregations = names(cells, partition, share)
    baseline = statistics.fmean(cells[partition, share, "fedavg", "none"])
    lines = []
    for attack in attacks:
        scores = {
            aggregation: statistics.fmean(cells[partition, share, aggregation, attack])
            for aggregation in aggregations
            if not aggregation.startswith("fed") and (partition, share, aggregation, attack) in cells
        }
        if scores and attack != "none":
            best = max(scores, key=lambda name: scores[name])
            lines.append(f"{attack}: {best} {scores[best]:.1f} ({scores[best] - baseline:+.1f})")
    worst = {
        aggregation: min(statistics.fmean(cells[partition, share, aggregation, attack]) for attack in attacks)
        for aggregation in aggregations
        if all((partition, share, aggregation, attack) in cells for attack in attacks)
    }
    ordered = sorted(worst, key=lambda name: -worst[name])
    lines.append("worst attack: " + ", ".join(f"{name} {worst[name] - baseline:+.1f}" for name in ordered))
    return "\n".join(lines)


def draw(accuracy: Cells, success: Cells, path: str) -> None:
    """
    Draw a heat map for each partition and share: points lost to the attack-free mean.

    Args:
        accuracy, success (`dict`): Values of the two scores.
        path (`str`): PNG file to write.
    """
    shares = sorted({share for _, share, _, _ in accuracy})
    partitions = [partition for partition in TITLES if any(key[0] == partition for key in accuracy)]
    figure, axes = plt.subplots(
        len(partitions), len(shares), figsize=(5.2 * len(shares), 4.6 * len(partitions)), squeeze=False, sharey=True
    )
    for row, partition in zip(axes, partitions, strict=True):
        for axis, share in zip(row, shares, strict=True):
            attacks, aggregations = names(accuracy, partition, share)
            baseline = statistics.fmean(accuracy[partition, share, "fedavg", "none"])
            columns = [*attacks, "backdoor success"]
            points = [[float("nan")] * len(columns) for _ in aggregations]
            for y, aggregation in enumerate(aggregations):
                for x, attack in enumerate(attacks):
                    if values := accuracy.get((partition, share, aggregation, attack)):
                        points[y][x] = statistics.fmean(values) - baseline
                if values := success.get((partition, share, aggregation, "backdoor")):
                    points[y][-1] = -statistics.fmean(values)
            image = axis.imshow(points, cmap="RdYlGn", vmin=-40, vmax=0, aspect="auto")
            for y, line in enumerate(points):
                for x, value in enumerate(line):
                    if value != value:
                        continue
                    is_success = x == len(columns) - 1
                    text = f"{abs(value):.0f}" if is_success or abs(value) < 0.5 else f"{value:+.0f}"
                    luminance = sum(image.cmap(image.norm(value))[:3]) / 3
                    color = "white" if luminance < 0.35 else "black"
                    axis.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
            axis.axvline(len(attacks) - 0.5, color="black", linewidth=1)
            axis.set_xticks(range(len(columns)), columns, rotation=55, ha="right", fontsize=8)
            axis.set_yticks(range(len(aggregations)), aggregations, fontsize=8)
            axis.set_title(f"{TITLES[partition]}, {share:.0%} hostile (without attack: {baseline:.1f} %)", fontsize=9)
    figure.suptitle(
        "Test accuracy in points relative to FedAvg without attack. Last column: success of the backdoor in %"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(path: Path, picture: str | None) -> None:
    """
    Print the tables, and draw the picture.

    Args:
        path (`pathlib.Path`): Output of `robustness.py run`.
        picture (`str`, *optional*): PNG file to write.
    """
    results = read_results(path)
    groups = {
        "": [result for result in results if "without" not in result["aggregation"] and not is_size(result)],
        "attacks against the size of an update: ": [result for result in results if is_size(result)],
    }
    for title, group in groups.items():
        if not group:
            continue
        cells = {score: cells_of(group, score) for score in SCORES}
        for partition, share in sorted({key[:2] for key in cells["accuracy"]}, reverse=True):
            print(f"\n### {title}{TITLES[partition]}, {share:.0%} hostile: accuracy\n")
            print(table(cells["accuracy"], partition, share))
            if not title:
                print("\n" + best_rules(cells["accuracy"], partition, share))
        for score, values in cells.items():
            if score == "attack_success" and not title:
                print_backdoors(values)
    failed = [result for result in results if "error" in result]
    print(f"\n{len(results)} runs, {len(failed)} with a failed round")
    print_differences(results)
    if picture is not None:
        own = [result for result in groups[""] if not result["aggregation"].startswith(NOT_DRAWN)]
        draw(cells_of(own, "accuracy"), cells_of(own, "attack_success"), picture)


def is_size(result: dict[str, Any]) -> bool:
    """Whether the attack of a result is one against the size of an update."""
    return result["attack"] in ("1e30", "NaN", "x100", "x-100")


def print_backdoors(cells: Cells) -> None:
    """Print the share of triggered examples that are classified as the target, without and with the backdoor."""
    for partition in TITLES:
        shares = sorted({share for part, share, _, _ in cells if part == partition})
        if not shares:
            continue
        print(f"\n### {TITLES[partition]}: success of the backdoor\n")
        print("| aggregation | none | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
        print("|---" * (len(shares) + 2) + "|")
        for aggregation in names(cells, partition, shares[0])[1]:
            values = [cells.get((partition, shares[0], aggregation, "none"), [])]
            values += [cells.get((partition, share, aggregation, "backdoor"), []) for share in shares]
            shown = [f"{statistics.fmean(value):.1f}" if value else "" for value in values]
            print("| " + " | ".join([aggregation, *shown]) + " |")


def print_differences(results: Sequence[dict[str, Any]]) -> None:
    """Print how far the results of Flower's rules are from the results of this library, for the same updates."""
    differences: dict[str, list[float]] = defaultdict(list)
    for result in results:
        differences[result["aggregation"]] += result.get("differences", [])
    for name, values in differences.items():
        if values:
            others = sum(value > 1e-3 for value in values)
            middle = statistics.median(values)
            print(f"{name}: {len(values)} rounds, {others} with another result, median difference {middle:.1e}")
