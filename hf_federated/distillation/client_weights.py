"""What each client's predictions weigh in an ensemble: by size, equally, by training loss, or by class.

RNWC and ENWC are equations 6 and 7 of Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual
Data (AdaFD). The weights by class are those of Gong et al., Preserving Privacy in Federated Learning with Ensemble
Cross-Domain Knowledge Distillation (FedKD, AAAI 2022). Nothing here sees predictions: weights follow from what clients
report of themselves, so a client that reports a small loss is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ClientReport:
    """
    What a client tells of itself in a round, beside its predictions. Each weighting reads the fields it needs.

    Args:
        client_id (`str`): Whose report it is.
        num_examples (`int`): Rows of the client's training data.
        min_epoch_loss (`float`): The smallest, over this round's local epochs, of the mean training loss.
        f1 (`float`, *optional*): Of the client's model, between 0 and 1.
        mean_logits (`tuple[float, ...]`, *optional*): Of each class, the mean over the public rows.
        std_logits (`tuple[float, ...]`, *optional*): Of each class, the standard deviation over the public rows.
        mean_entropy (`float`, *optional*): Mean entropy of the predicted distributions, in nats.
        class_counts (`tuple[int, ...]`, *optional*): Rows of each class in the client's training data, in the label
            order that all clients share.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import ClientReport, enwc, summarize_logits

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])  # on two public rows
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


Weighting = Callable[[Sequence[ClientReport]], dict[str, float]]


def summarize_logits(logits: torch.Tensor) -> dict[str, Any]:
    """
    What a [`ClientReport`] says of a client's logits.

    Args:
        logits (`torch.Tensor` of shape `(..., num_classes)`): Floating, of the public rows (or of their tokens).

    Returns:
        `dict`: `mean_logits`, `std_logits` (over rows, population) and `mean_entropy` (of the softmax, in nats).

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


def size(reports: Sequence[ClientReport]) -> dict[str, float]:
    """
    `w_k = |D_k| / Σ_j |D_j|`.

    Args:
        reports (`Sequence[ClientReport]`): One of each client of the cohort.

    Returns:
        `dict[str, float]`: Of each client id its weight; they sum to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or one has no rows.
    """
    for report in reports:
        if report.num_examples < 1:
            raise ValueError(
                f"Client {report.client_id!r} reports {report.num_examples} examples, so its predictions have no "
                "weight by size; leave it out, or use another weighting."
            )
    return _normalized(reports, [float(report.num_examples) for report in reports])


def uniform(reports: Sequence[ClientReport]) -> dict[str, float]:
    """`w_k = 1 / K`. Arguments, result and errors as of [`size`], without the rows."""
    return _normalized(reports, [1.0] * len(reports))


def rnwc(reports: Sequence[ClientReport]) -> dict[str, float]:
    """
    Reciprocal weights of AdaFD (eq. 6): `w_k = (1 / l_k) / Σ_j (1 / l_j)`, with `l_k` the `min_epoch_loss`.

    Clients with a loss of 0 share all the weight equally, which is the limit of their losses going to 0 together.

    Args:
        reports (`Sequence[ClientReport]`): One of each client of the cohort.

    Returns:
        `dict[str, float]`: Of each client id its weight; they sum to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or a loss is negative, NaN or infinite.
    """
    losses = _losses(reports)
    smallest = min(losses, default=0.0)
    if smallest == 0.0:
        return _normalized(reports, [float(loss == 0.0) for loss in losses])
    # Times the smallest loss, the reciprocals lie between 0 and 1.
    return _normalized(reports, [smallest / loss for loss in losses])


def enwc(reports: Sequence[ClientReport], beta: float = 5.0) -> dict[str, float]:
    """
    Exponential weights of AdaFD (eq. 7): `w_k = exp(−β l_k) / Σ_j exp(−β l_j)`, with `l_k` the `min_epoch_loss`.

    The smallest loss is subtracted from all, which changes no weight and keeps them finite for any losses.

    Args:
        reports (`Sequence[ClientReport]`): One of each client of the cohort.
        beta (`float`, *optional*, defaults to `5.0`): `β`, at least 0; the larger, the more the best client counts.

    Returns:
        `dict[str, float]`: Of each client id its weight; they sum to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, a loss is negative, NaN or infinite, or `beta` is.
    """
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"`beta` is {beta}; it must be finite and not negative.")
    losses = _losses(reports)
    smallest = min(losses, default=0.0)
    return _normalized(reports, [math.exp(-beta * (loss - smallest)) for loss in losses])


WEIGHTINGS: dict[str, Weighting] = {
    "size": size,
    "uniform": uniform,
    "rnwc": rnwc,
    "enwc": enwc,
}


def class_count_weights(reports: Sequence[ClientReport]) -> torch.Tensor:
    """
    Weights per client and class of FedKD (Gong et al.): `w_kc = n_kc / Σ_j n_jc`, with `n_kc` the `class_counts`.

    A class that no client has rows of is weighted equally.

    Args:
        reports (`Sequence[ClientReport]`): One of each client of the cohort, all with `class_counts`.

    Returns:
        `torch.Tensor` of shape `(num_clients, num_classes)`, float64: Rows in the order of `reports`; each column sums
        to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or counts are missing, negative or of another number
            of classes.
    """
    _check_cohort(reports)
    first = reports[0]
    for report in reports:
        counts = report.class_counts
        if not counts or first.class_counts is None or len(counts) != len(first.class_counts):
            raise ValueError(
                f"Client {report.client_id!r} reports `class_counts` of {counts!r} and client {first.client_id!r} of "
                f"{first.class_counts!r}; every client must report one count per class, in one label order."
            )
        if min(counts) < 0:
            raise ValueError(f"Client {report.client_id!r} reports `class_counts` of {counts!r}; they are below 0.")
    rows = torch.tensor([report.class_counts for report in reports], dtype=torch.float64)
    totals = rows.sum(0)
    return torch.where(totals > 0, rows / totals, 1 / len(reports))


def _check_cohort(reports: Sequence[ClientReport]) -> None:
    if not reports:
        raise ValueError("There are no clients to weigh; a cohort has at least one.")
    seen: set[str] = set()
    for report in reports:
        if report.client_id in seen:
            raise ValueError(f"Client {report.client_id!r} reports twice; there must be one report of each client.")
        seen.add(report.client_id)


def _losses(reports: Sequence[ClientReport]) -> list[float]:
    for report in reports:
        if not (math.isfinite(report.min_epoch_loss) and report.min_epoch_loss >= 0):
            raise ValueError(
                f"Client {report.client_id!r} reports a training loss of {report.min_epoch_loss}; weights by loss "
                "need finite ones that are not negative. Look at this client's training, or weigh by size."
            )
    return [report.min_epoch_loss for report in reports]


def _normalized(reports: Sequence[ClientReport], weights: Sequence[float]) -> dict[str, float]:
    """Of each client its weight over the sum; the weights are finite, and not all of them 0."""
    _check_cohort(reports)
    total = math.fsum(weights)
    return {report.client_id: weight / total for report, weight in zip(reports, weights, strict=True)}
