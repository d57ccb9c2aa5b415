"""FedDRS, figure 4 (a, b): how pseudo-samples become their pseudo-label while they descend, by the adversary.

    python recipes/feddrs/sample_quality.py --output-dir recipes/feddrs/results/figure4_quality
    python recipes/feddrs/sample_quality.py --set model.name_or_path=DIR --set federation.num_rounds=1 ...

Trains `table1_encoder.yaml` as FedAvg, takes the mean of all clients, and lets the samples of each client descend from
the same starts for each adversary. Writes `quality.json` and `quality.png`: the mean cross-entropy of the samples with
their pseudo-label after so many steps, by the client's model (lower: of better quality) and by the server's (higher:
more adversarial), averaged over clients; a line is the mean over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hf_federated.cards.tables import table
from hf_federated.distillation import pseudo_sampler
from hf_federated.distillation.pseudo_samples import Logits, adversarial_loss, descend, label_loss
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.recipe import load_recipe
from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves


RECIPE = Path(__file__).parent / "table1_encoder.yaml"
ADVERSARIES = {"none": (0.0, "ce"), "CE, λ = 0.01": (0.01, "ce"), "CE, λ = 0.1": (0.1, "ce"), "CE, λ = 1": (1.0, "ce"),
               "KL, λ = 0.1": (0.1, "kl")}  # fmt: skip
# The script makes samples of its own; the algorithm brings the models together and makes as few as it can.
SETTINGS = (
    "federation.distillation_kwargs={post_only: true, post_num_iterations: 1, sampling: adversarial, num_steps: 1, "
    "num_samples: SAMPLES, sample_length: LENGTH, server_learning_rate: 1.0e-12}"
)
# The cross-entropies of a descent, by the client's and the server's model: of shape (steps + 1, 2).
Curve = list[tuple[float, float]]


def descent(
    start: torch.Tensor,
    labels: torch.Tensor,
    teacher: Logits,
    student: Logits,
    adversary: tuple[float, str],
    num_steps: int,
    step_size: float,
) -> Curve:
    """What both models say of samples while these descend."""
    weight, kind = adversary
    found, samples = [], start.detach()
    said: dict[int, float] = {}

    def watched(who: int, model: Logits) -> Logits:
        def logits(moved: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            out = model(moved, labels)
            said[who] = float(label_loss(out.detach(), labels)) / len(labels)
            return out

        return logits

    both = watched(0, teacher), watched(1, student)

    def loss(moved: torch.Tensor) -> torch.Tensor:
        return adversarial_loss(moved, labels, *both, weight, kind)

    for step in range(num_steps + 1):
        said.clear()
        moved = descend(samples, loss, 1, step_size) if step < num_steps else samples
        with torch.no_grad():
            for who in {0, 1} - set(said):  # not asked by the loss, or at the end
                both[who](samples, labels)
        found.append((said[0], said[1]))
        samples = moved
    return found


@contextmanager
def watching(num_steps: int, step_size: float) -> Iterator[dict[str, list[Curve]]]:
    """The descents, by adversary and client, from every start that FedDRS makes meanwhile."""
    found: dict[str, list[Curve]] = {name: [] for name in ADVERSARIES}

    def watched(
        start: torch.Tensor, labels: torch.Tensor, teacher: Logits, student: Logits, *own: Any
    ) -> torch.Tensor:
        for name, adversary in ADVERSARIES.items():
            found[name].append(descent(start, labels, teacher, student, adversary, num_steps, step_size))
        return adversarial_loss(start, labels, teacher, student, *own)

    with patch.object(pseudo_sampler, "adversarial_loss", watched):
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="change a field of the recipe")
    parser.add_argument("--output-dir", default="outputs/feddrs-quality")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--step-size", type=float, default=0.1)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--sample-length", type=int, default=16)
    options = parser.parse_args()
    sizes = SETTINGS.replace("SAMPLES", str(options.num_samples)).replace("LENGTH", str(options.sample_length))
    output = Path(options.output_dir)
    # Of each adversary and seed: mean over clients, of shape (steps + 1, 2).
    curves: dict[str, list[np.ndarray]] = {name: [] for name in ADVERSARIES}
    for seed in options.seeds:
        settings = ["federation.distillation=feddrs", sizes, f"training.output_dir={output}", f"training.seed={seed}"]
        run = build_run(load_recipe(RECIPE, [*settings, "training.eval_strategy=no", *options.settings]))
        with watching(options.num_steps, options.step_size) as found:
            run.trainer.train()
        for name, clients in found.items():
            curves[name].append(np.mean(clients, axis=0))
    names = ("the client's model", "the server's model")
    rows = []
    for name, seeds in curves.items():
        ends = np.array(seeds)[:, [0, -1]]
        rows.append([name, *(f"{ends[:, place, who].mean():.3f}" for who in (0, 1) for place in (0, 1))])
    print(table(["adversary", *(f"{own}, {when}" for own in names for when in ("start", "end"))], rows, numeric=True))
    output.mkdir(parents=True, exist_ok=True)
    panels = [
        CurvePanel(
            f"by {own}",
            "cross-entropy",
            {name: [dict(enumerate(each[:, who].tolist())) for each in seeds] for name, seeds in curves.items()},
            step_name="step of descent",
        )
        for who, own in enumerate(names)
    ]
    plot_learning_curves(panels, output / "quality.png")
    written = {"options": {key: own for key, own in vars(options).items() if key != "output_dir"}}
    written["curves"] = {name: np.round(seeds, 5).tolist() for name, seeds in curves.items()}
    (output / "quality.json").write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
