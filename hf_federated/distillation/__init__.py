"""Distillation: what clients' predictions weigh, how they are averaged, and what is sent of an update."""

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
from .llm_weighting import LLMWeighting, text_generation
from .low_rank import compress, decompress, energy_schedule
from .robust_mean import ROBUST_MEANS, robust_mean


__all__ = [
    "ROBUST_MEANS",
    "WEIGHTINGS",
    "ClientReport",
    "LLMWeighting",
    "Weighting",
    "class_count_weights",
    "compress",
    "decompress",
    "energy_schedule",
    "enwc",
    "rnwc",
    "robust_mean",
    "size",
    "summarize_logits",
    "text_generation",
    "uniform",
]
