"""Accuracy under the name that `evaluate.load("accuracy")` looks for, without a download."""

from hf_federated.tasks.metrics import Accuracy


__all__ = ["Accuracy"]
