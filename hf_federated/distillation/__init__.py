"""Distillation: server and clients learn from each other's predictions."""

from .codec import PredictionCodec
from .losses import (
    LOSSES,
    DistillationLoss,
    kl_divergence,
    kl_divergence_from_probabilities,
    mean_absolute_error,
    mean_squared_error,
    soft_cross_entropy,
)


__all__ = [
    "LOSSES",
    "DistillationLoss",
    "PredictionCodec",
    "kl_divergence",
    "kl_divergence_from_probabilities",
    "mean_absolute_error",
    "mean_squared_error",
    "soft_cross_entropy",
]
