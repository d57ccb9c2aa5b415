"""Distillation algorithms, one per file.

To add an algorithm, add its file, import its class here and add its name to `utils/algorithm_names.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..utils.algorithm_names import DISTILLATION_NAMES, import_reference
from .adafd import AdaFD
from .alignment import Alignment
from .base import Distillation
from .client import DistillationPart
from .client_reports import ClientReport, reports, summarize_logits
from .client_weights import (
    WEIGHTINGS,
    Weighting,
    class_count_weights,
    enwc,
    num_examples_by_client,
    rnwc,
    size,
    uniform,
    weighted_mean,
)
from .codec import PredictionCodec
from .cohort import Ask, Cohort, RunOnMain
from .cronus import Cronus
from .digit_weighting import DigitWeighting, candidate_scoring
from .dsfl import DSFL
from .encoding import Encoding
from .fedaux import FedAUX
from .feddf import FedDF
from .feddrs import FedDRS
from .feded import FedED
from .fedid import FedID
from .fedkd import FedKD
from .fedmd import FedMD
from .feedback import (
    chain_rule_feedback,
    directional_derivative,
    evaluation_mode,
    logit_feedback,
    loss_gradients,
    model_logits,
    squared_error_feedback,
    virtual_step,
)
from .llm_weighting import LLMWeighting, text_generation
from .losses import kl_divergence, mean_absolute_error, mean_squared_error, soft_cross_entropy
from .low_rank import compress, decompress, energy_schedule
from .mhat import MHAT
from .previous_release import ClientContext, DistillationClient, LocalDistillation
from .public_rows import PublicRows
from .requirements import Requirements
from .robust_mean import ROBUST_MEANS, robust_mean
from .server import DistillationServer
from .surrogates import (
    chain_rule_surrogate,
    mpl_sampled_surrogate,
    mpl_surrogate,
    per_example_feedback,
    per_example_surrogate,
    sample_pseudo_labels,
)
from .teachers import Teachers


DISTILLATIONS: Mapping[str, type[Distillation]] = MappingProxyType(
    {name: import_reference(reference) for name, reference in DISTILLATION_NAMES.built_in.items()}
)
"""The distillation algorithms, by the name that `distillation` of [`FederatedConfig`] accepts."""


def build_distillation(distillation: str | Distillation | None, kwargs: Any = None) -> Distillation | None:
    """
    Build the algorithm that a configuration names.

    Args:
        distillation (`str` or [`Distillation`], *optional*): Name in `DISTILLATIONS`, name of an entry point of an
            installed package, a reference `my_package.module:MyClass`, or an instance, which is returned unchanged.
            `None` means no distillation.
        kwargs (`dict`, *optional*): Settings of the named algorithm.

    Returns:
        [`Distillation`], *optional*: The algorithm, or `None`.

    Raises:
        ValueError: If the name or a setting is unknown, the name does not name a subclass of [`Distillation`], a
            setting is out of range, or settings are given together with an instance or without a name.
    """
    if distillation is None:
        if kwargs:
            raise ValueError(
                "`distillation_kwargs` is set, but `distillation` is not a name. Set `distillation` to the name of an "
                "algorithm."
            )
        return None
    return DISTILLATION_NAMES.build(distillation, kwargs, Distillation)


__all__ = [
    "DISTILLATIONS",
    "DSFL",
    "MHAT",
    "ROBUST_MEANS",
    "WEIGHTINGS",
    "AdaFD",
    "Alignment",
    "Ask",
    "ClientContext",
    "ClientReport",
    "Cohort",
    "Cronus",
    "DigitWeighting",
    "Distillation",
    "DistillationClient",
    "DistillationPart",
    "DistillationServer",
    "Encoding",
    "FedAUX",
    "FedDF",
    "FedDRS",
    "FedED",
    "FedID",
    "FedKD",
    "FedMD",
    "LLMWeighting",
    "LocalDistillation",
    "PredictionCodec",
    "PublicRows",
    "Requirements",
    "RunOnMain",
    "Teachers",
    "Weighting",
    "build_distillation",
    "candidate_scoring",
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
    "logit_feedback",
    "loss_gradients",
    "mean_absolute_error",
    "mean_squared_error",
    "model_logits",
    "mpl_sampled_surrogate",
    "mpl_surrogate",
    "num_examples_by_client",
    "per_example_feedback",
    "per_example_surrogate",
    "reports",
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
    "weighted_mean",
]
