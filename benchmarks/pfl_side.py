"""The side of pfl-research in `engine.py overhead`: `python pfl_side.py SPEC.json` in an environment with pfl.

The federation is that of the bare loop: federated averaging of all clients, fused AdamW and clipping to norm 1. In
pfl's favor, batches are sliced and collated once, the learning rate is constant because pfl has no local schedule, and
nothing is evaluated after the first round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from turns import Turns
from workload import LEARNING_RATE, Workload, build_model, build_rows


class LossModel(nn.Module):
    """
    A model with the methods that pfl calls.

    Args:
        model (`torch.nn.Module`): The model of the workload.
        columns (`list[str]`): Names of the model's inputs, in the order of a batch.
    """

    def __init__(self, model: nn.Module, columns: list[str]) -> None:
        super().__init__()
        self.model = model
        self.columns = columns

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss: torch.Tensor = self.model(**dict(zip(self.columns, batch, strict=True))).loss
        return loss

    def metrics(self, *batch: torch.Tensor) -> dict[str, Weighted]:
        """Return the loss of a batch, for the evaluation before the first round."""
        with torch.no_grad():
            return {"loss": Weighted.from_unweighted(self.loss(*batch).item())}


class TurnCallback(TrainingProcessCallback):
    """Make each round a turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._turns.next()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self._turns.next()
        return False, Metrics()


def fused_adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Create the optimizer of the bare loop."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)


def main() -> None:
    turns = Turns()
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    workload = Workload(**spec["workload"])
    rows = build_rows(workload).remove_columns("client").with_format("torch")
    columns = rows.column_names
    size = workload.rows_per_client
    clients = [
        Dataset([rows[i * size : (i + 1) * size][column] for column in columns]) for i in range(workload.num_clients)
    ]
    training_data = FederatedDataset(clients.__getitem__, get_user_sampler("minimize_reuse", range(len(clients))))
    model = LossModel(build_model(workload).train(), columns)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=workload.num_rounds,
            evaluation_frequency=workload.num_rounds + 1,
            train_cohort_size=workload.num_clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data, training_data),
        PyTorchModel(model, fused_adamw, torch.optim.SGD(trained, lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=workload.batch_size,
            local_num_epochs=1,
            local_learning_rate=LEARNING_RATE,
            local_max_grad_norm=1.0,
        ),
        callbacks=[TurnCallback(turns)],
    )


if __name__ == "__main__":
    main()
