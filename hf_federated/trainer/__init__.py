"""`FederatedTrainer` and `federate()`: the overrides of `transformers.Trainer` and what they hold."""

from .federate import FederatedTrainer, federate


__all__ = ["FederatedTrainer", "federate"]
