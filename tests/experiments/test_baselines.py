"""Length of the baseline trainings."""

from __future__ import annotations

import pytest
from tiny import arguments, rows, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, FederatedDataset
from hf_federated.experiments.baselines import Baselines


class StepCounter(Trainer):
    """Records the number of steps of each training."""

    num_steps: list[int] = []

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        self.num_steps.append(output.global_step)
        return output


@pytest.mark.parametrize("max_steps", [-1, 6])
def test_baselines_train_for_their_epochs_if_max_steps_sets_the_number_of_rounds(
    tmp_path, monkeypatch, max_steps
) -> None:
    monkeypatch.setattr(StepCounter, "num_steps", [])
    clients = FederatedDataset.from_dict({"a": rows(8), "b": rows(8, seed=1)})
    federation = FederatedConfig(num_rounds=2, local_steps=3)
    args = arguments(tmp_path, max_steps=max_steps)
    Baselines(tiny_model(), args, federation, clients, rows(4, seed=2), StepCounter).centralized()
    # Two clients take three steps in each of two rounds.
    assert StepCounter.num_steps == [2 * 3 * 2]
