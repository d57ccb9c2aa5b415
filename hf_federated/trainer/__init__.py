"""`FederatedTrainer` and `federate()`: federated versions of `transformers.Trainer` and its subclasses."""

from .federate import FederatedTrainer, federate


__all__ = ["FederatedTrainer", "federate"]
