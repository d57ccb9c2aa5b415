"""Distillation: server and clients learn from each other's predictions."""

from .client_weights import (
    WEIGHTINGS,
    ClientReport,
    Weighting,
    class_count_weights,
    enwc,
    rnwc,
    size,
    summarize_logits,
    uniform,
)
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
from .llm_weighting import LLMWeighting, text_generation
from .losses import (
    LOSSES,
    DistillationLoss,
    kl_divergence,
    kl_divergence_from_probabilities,
    mean_absolute_error,
    mean_squared_error,
    soft_cross_entropy,
)
from .low_rank import compress, decompress, energy_schedule
from .robust_mean import ROBUST_MEANS, robust_mean
from .surrogates import chain_rule_surrogate, mpl_sampled_surrogate, mpl_surrogate, per_example_surrogate


__all__ = [
    "LOSSES",
    "ROBUST_MEANS",
    "WEIGHTINGS",
    "ClientReport",
    "DistillationLoss",
    "LLMWeighting",
    "PredictionCodec",
    "Weighting",
    "chain_rule_feedback",
    "chain_rule_surrogate",
    "class_count_weights",
    "compress",
    "decompress",
    "directional_derivative",
    "energy_schedule",
    "enwc",
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
    "rnwc",
    "robust_mean",
    "sample_pseudo_labels",
    "size",
    "soft_cross_entropy",
    "squared_error_feedback",
    "summarize_logits",
    "text_generation",
    "uniform",
    "virtual_step",
]
