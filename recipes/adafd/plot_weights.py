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
from hf_federated.data.plots.matplotlib_helpers import display_name, new_figure
from hf_federated.experiments.run_log import read_records


PREFIX = "weight/"
# By run and round, what each client weighed.
Weights = dict[str, dict[int, dict[str, float]]]


def mean_weights(records: list[dict[str, Any]]) -> tuple[list[str], Weights]:
    """All clients, and what they weighed on average over seeds. Of one run and seed the last record counts."""
    seeds: dict[str, dict[int, dict[int, dict[str, float]]]] = {}
    for record in records:
        own = {
            entry["round"]: {
                name.removeprefix(PREFIX): value for name, value in entry.items() if name.startswith(PREFIX)
            }
            for entry in record["history"]
        }
        own = {number: weights for number, weights in own.items() if weights}
        if own:  # a later record of the same run and seed takes the place of an earlier one
            seeds.setdefault(record["run"], {})[record["seed"]] = own
    clients = sorted(
        {client for by_seed in seeds.values() for own in by_seed.values() for w in own.values() for client in w}
    )
    found: Weights = {}
    for run, by_seed in seeds.items():
        for number in sorted({number for own in by_seed.values() for number in own}):
            # A seed without such a round says nothing of it; a client that took no part in one weighed nothing.
            of_seeds = [own[number] for own in by_seed.values() if number in own]
            means = {client: np.mean([weights.get(client, 0.0) for weights in of_seeds]) for client in clients}
            found.setdefault(run, {})[number] = {client: float(mean) for client, mean in means.items()}
    return clients, found


def draw(clients: list[str], weights: Weights, path: Path) -> None:
    """A panel for each run: clients from top to bottom, rounds from left to right, darker for more weight."""
    height = 1.4 + 0.4 * len(clients)
    figure, axes = new_figure(0.8 + 2.2 * len(weights), height, ncols=len(weights), sharey=True, squeeze=False)
    for axis, (run, rounds) in zip(axes[0], weights.items(), strict=True):
        values = np.array([[own[client] for own in rounds.values()] for client in clients])
        image = axis.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axis.set(title=display_name(run), xlabel="round")
        axis.set_xticks(range(len(rounds)), list(rounds))
        axis.set_yticks(range(len(clients)), [display_name(client) for client in clients])
        for (client, place), value in np.ndenumerate(values):
            color = "white" if value > 0.5 else "black"
            axis.text(place, client, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=list(axes[0]), label="weight")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with runs.jsonl, as `hf-federated benchmark` writes it")
    options = parser.parse_args()
    clients, weights = mean_weights(read_records(options.folder))
    if not weights:
        raise SystemExit(f"No run in {options.folder} says what its clients weighed.")
    rows = [
        [run, number, *(f"{own[client]:.3f}" for client in clients)]
        for run, rounds in weights.items()
        for number, own in rounds.items()
    ]
    print(table(["run", "round", *clients], rows, numeric=True))
    draw(clients, weights, options.folder / "weights.png")


if __name__ == "__main__":
    main()
