"""Distillation: server and clients learn from each other's predictions."""

from .codec import PredictionCodec
from .feedback import (
    chain_rule_feedback,
    directional_derivative,
    evaluation_mode,
    logit_feedback,
    loss_gradients,
    model_logits,
    per_example_feedback,
    sample_pseudo_labels,
    squared_error_feedback,
    virtual_step,
)
from .losses import (
    LOSSES,
    DistillationLoss,
    kl_divergence,
    kl_divergence_from_probabilities,
    mean_absolute_error,
    mean_squared_error,
    soft_cross_entropy,
)
from .surrogates import chain_rule_surrogate, mpl_sampled_surrogate, mpl_surrogate, per_example_surrogate


__all__ = [
    "LOSSES",
    "DistillationLoss",
    "PredictionCodec",
    "chain_rule_feedback",
    "chain_rule_surrogate",
    "directional_derivative",
    "evaluation_mode",
    "kl_divergence",
    "kl_divergence_from_probabilities",
    "logit_feedback",
    "loss_gradients",
    "mean_absolute_error",
    "mean_squared_error",
    "model_logits",
    "mpl_sampled_surrogate",
    "mpl_surrogate",
    "per_example_feedback",
    "per_example_surrogate",
    "sample_pseudo_labels",
    "soft_cross_entropy",
    "squared_error_feedback",
    "virtual_step",
]
