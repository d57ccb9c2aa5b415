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


__all__ = [
    "WEIGHTINGS",
    "ClientReport",
    "Weighting",
    "class_count_weights",
    "enwc",
    "rnwc",
    "size",
    "summarize_logits",
    "uniform",
]
