"""Reports of the clients in a round: results of local training, and summaries of their predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..utils.weighted_mean import Tensors
from .class_counts import reported_class_counts
from .cohort import Cohort


# Names of F1 metrics, in the order of the search. Users often log the first name, and tasks log the other names.
F1_NAMES = ("eval_f1", "eval_f1_weighted", "eval_f1_macro", "eval_span_f1")


@dataclass(frozen=True)
class ClientReport:
    """
    Values that a client reports in a round in addition to its predictions.

    Each weighting reads the fields that it needs.

    Args:
        client_id (`str`): Id of the client.
        num_examples (`int`): Number of the client's training examples.
        min_epoch_loss (`float`): Smallest mean training loss of a local epoch in this round.
        f1 (`float`, *optional*): F1 of the client's model, between 0 and 1.
        mean_logits (`tuple[float, ...]`, *optional*): Mean logit of each class over the public examples.
        std_logits (`tuple[float, ...]`, *optional*): Standard deviation of the logits of each class over the public
            examples.
        mean_entropy (`float`, *optional*): Mean entropy of the predicted distributions, in nats.
        class_counts (`tuple[int, ...]`, *optional*): Number of the client's training examples of each class, in the
            label order that all clients share.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import ClientReport, enwc, summarize_logits

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])  # two public examples
    >>> report = ClientReport("north", num_examples=8, min_epoch_loss=0.2, **summarize_logits(logits))
    >>> report.mean_logits, report.std_logits
    ((1.0, 1.0), (1.0, 1.0))
    >>> weights = enwc([report, ClientReport("south", num_examples=8, min_epoch_loss=0.4)])
    >>> {client_id: round(weight, 3) for client_id, weight in weights.items()}
    {'north': 0.731, 'south': 0.269}
    ```
    """

    client_id: str
    num_examples: int
    min_epoch_loss: float
    f1: float | None = None
    mean_logits: tuple[float, ...] | None = None
    std_logits: tuple[float, ...] | None = None
    mean_entropy: float | None = None
    class_counts: tuple[int, ...] | None = None


def summarize_logits(logits: torch.Tensor) -> dict[str, Any]:
    """
    Summarize a client's logits for its [`ClientReport`].

    Args:
        logits (`torch.Tensor` of shape `(..., num_classes)`): Floating point logits of the public examples (or of
            their tokens).

    Returns:
        `dict`: `mean_logits`, `std_logits` (population standard deviation over rows) and `mean_entropy` (entropy of
        the softmax, in nats).

    Raises:
        ValueError: If there is no row, or a logit is NaN or infinite.
    """
    rows = logits.detach().double().reshape(-1, logits.shape[-1])
    if not len(rows) or not rows.isfinite().all():
        raise ValueError(f"The logits of shape {tuple(logits.shape)} have no row or hold NaN or infinite values.")
    log_probabilities = rows.log_softmax(-1)
    return {
        "mean_logits": tuple(rows.mean(0).tolist()),
        "std_logits": tuple(rows.std(0, correction=0).tolist()),
        "mean_entropy": -(log_probabilities.exp() * log_probabilities).sum(-1).mean().item(),
    }


def _f1(metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in F1_NAMES if name in metrics), None)


def reports(
    cohort: Cohort,
    predictions: Tensors | None = None,
    evaluations: Mapping[str, Mapping[str, float]] | None = None,
) -> list[ClientReport]:
    """
    Collect the reports of the clients' local training, in the order of the cohort.

    Args:
        cohort ([`Cohort`]): The clients.
        predictions (`Mapping[str, torch.Tensor]`, *optional*): Logits by client, to be summarized in the reports.
        evaluations (`Mapping[str, Mapping[str, float]]`, *optional*): Evaluation metrics by client. The report has the
            first of `eval_f1`, `eval_f1_weighted`, `eval_f1_macro` and `eval_span_f1` that exists.

    Returns:
        `list[ClientReport]`: One report per client.
    """
    return [
        ClientReport(
            client_id,
            num_examples=int(row["num_examples"]),
            min_epoch_loss=row.get("min_epoch_loss", math.nan),
            f1=None if evaluations is None else _f1(evaluations[client_id]),
            class_counts=_class_counts(row),
            **({} if predictions is None else summarize_logits(predictions[client_id])),
        )
        for client_id, row in cohort.metrics.items()
    ]


def _class_counts(metrics: Mapping[str, float]) -> tuple[int, ...] | None:
    """Return the number of examples per class, or `None` if the metrics contain no complete histogram."""
    counts = reported_class_counts(metrics)
    is_complete = all(isinstance(count, (int, float)) and math.isfinite(count) for count in counts)
    return tuple(map(int, counts)) if counts and is_complete else None
