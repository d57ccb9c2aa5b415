"""AdaFD, figure 4: what each client weighed in each round, by run, from the records of a benchmark.

    python recipes/adafd/plot_weights.py recipes/adafd/results/beta

Reads `runs.jsonl` in the folder, prints the means over seeds and draws them as `weights.png` beside it. Runs whose
clients are not weighed (a method that has no such weights) are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from hf_federated.cards.tables import table
from hf_federated.cli.run_log import read_records
from hf_federated.data.figures import new_figure, shown_name


PREFIX = "weight/"
Weights = dict[str, tuple[list[str], np.ndarray]]


def mean_weights(records: list[dict[str, Any]]) -> Weights:
    """By run: its clients, and the mean of their weights over seeds, of shape `(rounds, clients)`."""
    seeds: dict[str, dict[int, dict[tuple[int, str], float]]] = {}
    for record in records:
        own = {
            (entry["round"], name.removeprefix(PREFIX)): value
            for entry in record["history"]
            for name, value in entry.items()
            if name.startswith(PREFIX)
        }
        if own:  # a later record of the same run and seed takes the place of an earlier one
            seeds.setdefault(record["run"], {})[record["seed"]] = own
    found: Weights = {}
    for run, by_seed in seeds.items():
        rounds = sorted({number for own in by_seed.values() for number, _ in own})
        clients = list(dict.fromkeys(client for own in by_seed.values() for _, client in own))
        # A client that took no part in a round weighed nothing.
        grid = [[[own.get((number, name), 0.0) for name in clients] for number in rounds] for own in by_seed.values()]
        found[run] = (clients, np.mean(grid, axis=0))
    return found


def draw(weights: Weights, path: Path) -> None:
    """A panel for each run: clients from top to bottom, rounds from left to right, darker for more weight."""
    height = 1.4 + 0.4 * max(len(clients) for clients, _ in weights.values())
    figure, axes = new_figure(0.8 + 2.2 * len(weights), height, ncols=len(weights), sharey=True, squeeze=False)
    for axis, (run, (clients, values)) in zip(axes[0], weights.items(), strict=True):
        image = axis.imshow(values.T, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axis.set(title=shown_name(run), xlabel="round")
        axis.set_xticks(range(len(values)), range(1, len(values) + 1))
        axis.set_yticks(range(len(clients)), [shown_name(client) for client in clients])
        for (number, client), value in np.ndenumerate(values):
            color = "white" if value > 0.5 else "black"
            axis.text(number, client, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=list(axes[0]), label="weight")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with runs.jsonl, as `hf-federated benchmark` writes it")
    options = parser.parse_args()
    weights = mean_weights(read_records(options.folder))
    if not weights:
        raise SystemExit(f"No run in {options.folder} says what its clients weighed.")
    columns = list(dict.fromkeys(client for clients, _ in weights.values() for client in clients))
    rows = [
        [
            run,
            number,
            *(f"{values[number - 1][clients.index(name)]:.3f}" if name in clients else "" for name in columns),
        ]
        for run, (clients, values) in weights.items()
        for number in range(1, len(values) + 1)
    ]
    print(table(["run", "round", *columns], rows, numeric=True))
    draw(weights, options.folder / "weights.png")


if __name__ == "__main__":
    main()
