"""FedDRS, figure 3: which tasks clients have, at each of the paper's α.

    python recipes/feddrs/draw_partitions.py --output recipes/feddrs/results/figure3_partitions.png

Cuts the rows of `table1_encoder.yaml` as its scales do, and draws each client's share of every task.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_federated.data import label_counts, plot_label_shares
from hf_federated.experiments.raw_data import load_raw_data
from hf_federated.experiments.recipe import load_recipe


RECIPE = Path(__file__).parent / "table1_encoder.yaml"
SCALES = {"α → 0": "default", "α = 0.05": "alpha-0.05", "α = 0.5": "alpha-0.5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="change a field of the recipe")
    parser.add_argument("--output", type=Path, default=Path("outputs/feddrs-partitions.png"), help="the picture")
    options = parser.parse_args()
    counts = {}
    for name, scale in SCALES.items():
        recipe = load_recipe(RECIPE, [f"scale={scale}", *options.settings])
        counts[name] = label_counts(load_raw_data(recipe).train, "task")
        sizes = counts[name].sizes
        print(f"{name}: {len(sizes)} clients of {min(sizes)} to {max(sizes)} rows")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plot_label_shares(counts, options.output)


if __name__ == "__main__":
    main()
