"""Small runs of FedDRS, and a callback that records the server's weights."""

from __future__ import annotations

from distillation_setup import SIZES
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer


SMALL = {"num_samples": 6, "sample_length": 5, "num_steps": 3}


def feddrs_trainer(output_dir, *, model=None, federation=None, args=None, callbacks=(), data=None, **kwargs):
    """Build a trainer for a small run of FedDRS. `kwargs` are settings of `FedDRS`."""
    settings = {"num_rounds": 2, "aggregation_kwargs": {"weighting": "uniform"}, **(federation or {})}
    return FederatedTrainer(
        model=tiny_model() if model is None else model,
        args=arguments(output_dir, **(args or {})),
        train_dataset=data or {client_id: rows(size, seed=ord(client_id)) for client_id, size in SIZES.items()},
        eval_dataset=None if data else rows(8, seed=7),
        callbacks=list(callbacks),
        federation=FederatedConfig(distillation="feddrs", distillation_kwargs={**SMALL, **kwargs}, **settings),
    )


class WeightsRecorder(FederatedCallback):
    """Record the server's weights after the average and after the distillation of each round."""

    def __init__(self):
        self.averaged, self.distilled = [], []

    def on_distill(self, args, state, control, round, model, **kwargs):
        # The callback of the algorithm runs after the callbacks of the user.
        self.averaged.append({name: value.clone() for name, value in model.state_dict().items()})

    def on_round_end(self, args, state, control, round, model, **kwargs):
        self.distilled.append({name: value.clone() for name, value in model.state_dict().items()})


EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
