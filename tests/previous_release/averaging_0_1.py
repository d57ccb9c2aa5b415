"""An averaging algorithm as a user wrote it for version 0.1. This file must not change."""

from __future__ import annotations

import torch

from hf_federated import Aggregation, LocalHook


class Pull(Aggregation):
    """Pulls the parameters of a client towards the global state, and counts the steps of each client."""

    name = "pull"
    needs_gradients = True

    def __init__(self, weight=0.5, weighting="examples"):
        super().__init__(weighting)
        self.weight_of_pull = self.weight_ = weight
        self.num_steps = 0.0

    def settings(self):
        return {"weight": self.weight_, "weighting": self.weighting}

    def fit_settings(self):
        return {"pull": self.weight_}

    def expected_extra(self, state):
        return {"steps": torch.zeros(())}

    def local_hook(self, message, kept):
        return PullHook(message.settings["pull"], message.state, kept)

    def aggregate(self, accumulator, state):
        self.num_steps = float(accumulator.extra.mean_of("steps"))
        return super().aggregate(accumulator, state)


class PullHook(LocalHook):
    def __init__(self, weight, anchor, kept):
        self.weight = weight
        self.anchor = anchor
        self.steps = 0 if kept is None else kept["steps"]

    def on_gradients(self, parameters):
        self.steps += 1
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad += self.weight * (parameter.detach() - self.anchor[name])

    def finish(self):
        return {"steps": torch.tensor(float(self.steps))}, {"steps": self.steps}
