"""Plot the weight of each client in each round, by run, from the records of a benchmark (AdaFD, figure 4).

    python recipes/adafd/plot_weights.py recipes/adafd/results/beta

The script reads `runs.jsonl` in the folder, prints the means over seeds and plots them to `weights.png` in the same
folder. It skips runs of methods without client weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from hf_federated.cards.tables import table
from hf_federated.data.plots.matplotlib_helpers import display_name, new_figure
from hf_federated.experiments.benchmark.run_log import read_records


PREFIX = "weight/"
# Weight of each client, by run and round.
Weights = dict[str, dict[int, dict[str, float]]]


def mean_weights(records: list[dict[str, Any]]) -> tuple[list[str], Weights]:
    """
    Compute the mean weight of each client over seeds.

    Args:
        records (`list[dict[str, Any]]`): Records of a benchmark. If a run and seed has several, the last one counts.

    Returns:
        `tuple[list[str], dict[str, dict[int, dict[str, float]]]]`: The sorted client ids, and the mean weight by run,
        round and client. A round's mean is over the seeds that have the round; a client that did not take part in a
        round has the weight 0.
    """
    weights_by_run: dict[str, dict[int, dict[int, dict[str, float]]]] = {}
    for record in records:
        rounds = {
            entry["round"]: {
                name.removeprefix(PREFIX): value for name, value in entry.items() if name.startswith(PREFIX)
            }
            for entry in record["history"]
        }
        rounds = {number: weights for number, weights in rounds.items() if weights}
        if rounds:
            weights_by_run.setdefault(record["run"], {})[record["seed"]] = rounds
    clients = sorted(
        {
            client
            for by_seed in weights_by_run.values()
            for rounds in by_seed.values()
            for weights in rounds.values()
            for client in weights
        }
    )
    mean_by_run: Weights = {}
    for run, by_seed in weights_by_run.items():
        for number in sorted({number for rounds in by_seed.values() for number in rounds}):
            round_weights = [rounds[number] for rounds in by_seed.values() if number in rounds]
            means = {client: np.mean([weights.get(client, 0.0) for weights in round_weights]) for client in clients}
            mean_by_run.setdefault(run, {})[number] = {client: float(mean) for client, mean in means.items()}
    return clients, mean_by_run


def draw(clients: list[str], weights: Weights, path: Path) -> None:
    """Draw one panel for each run, with a row for each client and a column for each round; darker is more weight."""
    height = 1.4 + 0.4 * len(clients)
    figure, axes = new_figure(0.8 + 2.2 * len(weights), height, ncols=len(weights), sharey=True, squeeze=False)
    for axis, (run, rounds) in zip(axes[0], weights.items(), strict=True):
        values = np.array([[weights_of_round[client] for weights_of_round in rounds.values()] for client in clients])
        image = axis.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axis.set(title=display_name(run), xlabel="round")
        axis.set_xticks(range(len(rounds)), list(rounds))
        axis.set_yticks(range(len(clients)), [display_name(client) for client in clients])
        for (row, column), value in np.ndenumerate(values):
            color = "white" if value > 0.5 else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=list(axes[0]), label="weight")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of `hf-federated benchmark`, with runs.jsonl")
    options = parser.parse_args()
    clients, weights = mean_weights(read_records(options.folder))
    if not weights:
        raise SystemExit(f"No run in {options.folder} has client weights. Use the folder of a benchmark of AdaFD.")
    rows = [
        [run, number, *(f"{weights_of_round[client]:.3f}" for client in clients)]
        for run, rounds in weights.items()
        for number, weights_of_round in rounds.items()
    ]
    print(table(["run", "round", *clients], rows, numeric=True))
    draw(clients, weights, options.folder / "weights.png")


if __name__ == "__main__":
    main()
