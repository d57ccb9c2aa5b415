"""Plot the tasks of each client for each α of the paper (FedDRS, figure 3).

    python recipes/feddrs/draw_partitions.py --output recipes/feddrs/results/figure3_partitions.png

The script partitions the examples of `table1_encoder.yaml` at three of its scales, and plots the share of each task in
each client.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_federated.data import label_counts, plot_label_shares
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.recipe.recipe import load_recipe


RECIPE = Path(__file__).parent / "table1_encoder.yaml"
SCALES = {"α → 0": "default", "α = 0.05": "alpha-0.05", "α = 0.5": "alpha-0.5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="change a field of the recipe")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/feddrs-partitions.png"), help="file of the figure"
    )
    options = parser.parse_args()
    counts = {}
    for name, scale in SCALES.items():
        recipe = load_recipe(RECIPE, [f"scale={scale}", *options.settings])
        counts[name] = label_counts(load_raw_data(recipe).train, "task")
        sizes = counts[name].sizes
        print(f"{name}: {len(sizes)} clients of {min(sizes)} to {max(sizes)} examples")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plot_label_shares(counts, options.output)


if __name__ == "__main__":
    main()
