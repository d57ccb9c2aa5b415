"""Measure the quality of pseudo-samples during their optimization, for each adversary (FedDRS, figure 4 (a, b)).

    python recipes/feddrs/sample_quality.py --output-dir recipes/feddrs/results/figure4_quality
    python recipes/feddrs/sample_quality.py --set model.name_or_path=DIR --set federation.num_rounds=1 ...

The script trains `table1_encoder.yaml` with FedAvg and takes the mean of all clients. It then optimizes the samples of
each client by gradient descent from the same starts for each adversary. It writes `quality.json` and `quality.png`
with the mean cross-entropy of the samples with their pseudo-label after each step. The cross-entropy by the client's
model measures quality (lower is better); the cross-entropy by the server's model measures how adversarial the samples
are (higher is more adversarial). Values are averaged over clients; a line is the mean over seeds.
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
from hf_federated.distillation.pseudo_samples import Logits, adversarial_loss, label_loss
from hf_federated.distillation.sample_descent import descend
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves


RECIPE = Path(__file__).parent / "table1_encoder.yaml"
ADVERSARIES = {"none": (0.0, "ce"), "CE, λ = 0.01": (0.01, "ce"), "CE, λ = 0.1": (0.1, "ce"), "CE, λ = 1": (1.0, "ce"),
               "KL, λ = 0.1": (0.1, "kl")}  # fmt: skip
# The script creates the samples. The algorithm only provides the models, so its own samples are as small as possible.
SETTINGS = (
    "federation.distillation_kwargs={post_only: true, post_num_iterations: 1, sampling: adversarial, num_steps: 1, "
    "num_samples: SAMPLES, sample_length: LENGTH, server_lr: 1.0e-12}"
)
# Cross-entropies of a descent by the client's and the server's model, of shape (steps + 1, 2).
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
    """
    Optimize samples by gradient descent and record both models' cross-entropy at each step.

    Args:
        start (`torch.Tensor`): Samples at the start, of shape (samples, positions, hidden size).
        labels (`torch.Tensor`): Pseudo-labels of the samples.
        teacher, student (`Logits`): The client's model and the server's model.
        adversary (`tuple[float, str]`): Weight λ and kind (`"ce"` or `"kl"`) of the adversarial loss.
        num_steps (`int`): Number of descent steps.
        step_size (`float`): Size of a step.

    Returns:
        `list[tuple[float, float]]`: The cross-entropies at the start and after each step.
    """
    weight, kind = adversary
    curve, samples = [], start.detach()
    losses: dict[int, float] = {}

    def record_loss(index: int, model: Logits) -> Logits:
        def logits(moved: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            out = model(moved, labels)
            losses[index] = float(label_loss(out.detach(), labels).mean())
            return out

        return logits

    models = record_loss(0, teacher), record_loss(1, student)

    def loss(moved: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return adversarial_loss(moved, labels[rows], *models, weight, kind)

    for step in range(num_steps + 1):
        losses.clear()
        moved = descend(samples, loss, 1, step_size) if step < num_steps else samples
        with torch.no_grad():
            for index in {0, 1} - set(losses):  # models that the loss did not call
                models[index](samples, labels)
        curve.append((losses[0], losses[1]))
        samples = moved
    return curve


@contextmanager
def record_descents(num_steps: int, step_size: float) -> Iterator[dict[str, list[Curve]]]:
    """Record one descent for each adversary from each start that FedDRS draws within the context."""
    curves: dict[str, list[Curve]] = {name: [] for name in ADVERSARIES}

    def recorded_loss(
        start: torch.Tensor, labels: torch.Tensor, teacher: Logits, student: Logits, **settings: Any
    ) -> torch.Tensor:
        for name, adversary in ADVERSARIES.items():
            curves[name].append(descent(start, labels, teacher, student, adversary, num_steps, step_size))
        return adversarial_loss(start, labels, teacher, student, **settings)

    with patch.object(pseudo_sampler, "adversarial_loss", recorded_loss):
        yield curves


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
    # Mean over clients of shape (steps + 1, 2), for each adversary and seed.
    curves: dict[str, list[np.ndarray]] = {name: [] for name in ADVERSARIES}
    for seed in options.seeds:
        settings = ["federation.distillation=feddrs", sizes, f"training.output_dir={output}", f"training.seed={seed}"]
        run = build_run(load_recipe(RECIPE, [*settings, "training.eval_strategy=no", *options.settings]))
        with record_descents(options.num_steps, options.step_size) as client_curves:
            run.trainer.train()
        for name, clients in client_curves.items():
            curves[name].append(np.mean(clients, axis=0))
    names = ("the client's model", "the server's model")
    rows = []
    for name, seeds in curves.items():
        ends = np.array(seeds)[:, [0, -1]]
        rows.append([name, *(f"{ends[:, end, index].mean():.3f}" for index in (0, 1) for end in (0, 1))])
    columns = [f"{model}, {end}" for model in names for end in ("start", "end")]
    print(table(["adversary", *columns], rows, numeric=True))
    output.mkdir(parents=True, exist_ok=True)
    panels = [
        CurvePanel(
            f"by {model}",
            "cross-entropy",
            {name: [dict(enumerate(curve[:, index].tolist())) for curve in seeds] for name, seeds in curves.items()},
            step_name="descent step",
        )
        for index, model in enumerate(names)
    ]
    plot_learning_curves(panels, output / "quality.png")
    written = {"options": {key: value for key, value in vars(options).items() if key != "output_dir"}}
    written["curves"] = {name: np.round(seeds, 5).tolist() for name, seeds in curves.items()}
    (output / "quality.json").write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
