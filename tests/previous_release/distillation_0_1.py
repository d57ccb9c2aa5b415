"""A distillation as a user wrote it for version 0.1. This file must not change."""

from __future__ import annotations

from dataclasses import dataclass

from hf_federated import Distillation
from hf_federated.distillation import DistillationClient, LocalDistillation, soft_cross_entropy, weighted_mean


class CountRounds(LocalDistillation):
    def __init__(self, state):
        self.state = state
        self.batches = 0

    def on_batch(self, trainer, model, inputs, num_items):
        assert trainer.args.per_device_train_batch_size and len(inputs["labels"])
        self.batches += 1

    def finish(self, trainer, metrics):
        metrics["rounds_of_client"] = float(self.state["rounds"])
        metrics["batches"] = float(self.batches)
        return {}


class Client(DistillationClient):
    def before_training(self, context):
        context.state["rounds"] = context.state.get("rounds", 0) + 1

    def local_training(self, context, round):
        return CountRounds(context.state)

    def handle(self, message, context):
        context.state["answers"] = context.state.get("answers", 0) + 1
        context.state_changed = True
        return super().handle(message, context)


@dataclass(kw_only=True, repr=False, eq=False)
class SharpMean(Distillation):
    """Learns the sharpened mean of the clients' probabilities."""

    name = "sharp_mean"
    broadcasts = "probabilities"

    def __post_init__(self):
        super().__post_init__()
        self.updates = []

    def client(self):
        return Client(self)

    def on_update(self, update, server):
        self.updates.append((update.client_id, server.num_rounds))

    def ensemble(self, predictions, cohort):
        probabilities = {name: logits.softmax(-1) for name, logits in predictions.items()}
        return (weighted_mean(probabilities, dict.fromkeys(probabilities, 1.0)) / 0.1).softmax(-1)

    def server_loss(self, logits, targets):
        return soft_cross_entropy(logits, targets)

    def broadcast(self, ensemble, server):
        return ensemble

    def client_loss(self, logits, targets, settings):
        return soft_cross_entropy(logits, targets)
