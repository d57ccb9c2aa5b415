"""Weights of the clients in an ensemble: by size, uniform, by training loss, or by class.

RNWC and ENWC are equations 6 and 7 of Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual
Data (AdaFD). The weights by class are those of Gong et al., Preserving Privacy in Federated Learning with Ensemble
Cross-Domain Knowledge Distillation (FedKD, AAAI 2022). The weights depend only on the values that clients report, not
on their predictions. A client that reports a small loss is trusted.
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


Weighting = Callable[[Sequence[ClientReport]], dict[str, float]]


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


def size(reports: Sequence[ClientReport]) -> dict[str, float]:
    """
    Weights by number of examples: `w_k = |D_k| / Σ_j |D_j|`.

    Args:
        reports (`Sequence[ClientReport]`): One report for each client of the cohort.

    Returns:
        `dict[str, float]`: Weights by client id. They sum to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or a client has no examples.
    """
    for report in reports:
        if report.num_examples < 1:
            raise ValueError(
                f"Client {report.client_id!r} reports {report.num_examples} examples, so its weight by size is 0. "
                "Leave the client out, or use another weighting."
            )
    return _normalized(reports, [float(report.num_examples) for report in reports])


def uniform(reports: Sequence[ClientReport]) -> dict[str, float]:
    """
    Equal weights: `w_k = 1 / K`.

    Args:
        reports (`Sequence[ClientReport]`): One report for each client of the cohort.

    Returns:
        `dict[str, float]`: Weights by client id. They sum to 1.

    Raises:
        ValueError: If there is no report, or a client reports twice.
    """
    return _normalized(reports, [1.0] * len(reports))


def rnwc(reports: Sequence[ClientReport]) -> dict[str, float]:
    """
    Reciprocal weights of AdaFD (eq. 6): `w_k = (1 / l_k) / Σ_j (1 / l_j)`, where `l_k` is `min_epoch_loss`.

    Clients with a loss of 0 share the total weight equally. This is the limit if their losses approach 0 together.

    Args:
        reports (`Sequence[ClientReport]`): One report for each client of the cohort.

    Returns:
        `dict[str, float]`: Weights by client id. They sum to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or a loss is negative, NaN or infinite.
    """
    losses = _losses(reports)
    smallest = min(losses, default=0.0)
    if smallest == 0.0:
        return _normalized(reports, [float(loss == 0.0) for loss in losses])
    # Multiplied by the smallest loss, the reciprocals are between 0 and 1.
    return _normalized(reports, [smallest / loss for loss in losses])


def enwc(reports: Sequence[ClientReport], beta: float = 5.0) -> dict[str, float]:
    """
    Exponential weights of AdaFD (eq. 7): `w_k = exp(−β l_k) / Σ_j exp(−β l_j)`, where `l_k` is `min_epoch_loss`.

    The smallest loss is subtracted from all losses. This changes no weight and keeps the exponentials finite.

    Args:
        reports (`Sequence[ClientReport]`): One report for each client of the cohort.
        beta (`float`, *optional*, defaults to `5.0`): `β`, at least 0. A larger value gives more weight to the clients
            with small losses.

    Returns:
        `dict[str, float]`: Weights by client id. They sum to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or a loss or `beta` is negative, NaN or infinite.
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
    Weights per client and class of FedKD (Gong et al.): `w_kc = n_kc / Σ_j n_jc`, where `n_kc` is `class_counts`.

    For a class without examples, all clients have equal weights.

    Args:
        reports (`Sequence[ClientReport]`): One report for each client of the cohort, all with `class_counts`.

    Returns:
        `torch.Tensor` of shape `(num_clients, num_classes)`, float64: Weights with rows in the order of `reports`.
        Each column sums to 1.

    Raises:
        ValueError: If there is no report, a client reports twice, or counts are missing, negative or for a different
            number of classes.
    """
    _check_cohort(reports)
    first = reports[0]
    for report in reports:
        counts = report.class_counts
        if not counts or first.class_counts is None or len(counts) != len(first.class_counts):
            raise ValueError(
                f"Client {report.client_id!r} reports `class_counts` of {counts!r} and client {first.client_id!r} of "
                f"{first.class_counts!r}; every client must report one count per class, in the same label order."
            )
        if min(counts) < 0:
            raise ValueError(
                f"Client {report.client_id!r} reports `class_counts` of {counts!r}; none may be negative."
            )
    rows = torch.tensor([report.class_counts for report in reports], dtype=torch.float64)
    totals = rows.sum(0)
    return torch.where(totals > 0, rows / totals, 1 / len(reports))


def _check_cohort(reports: Sequence[ClientReport]) -> None:
    if not reports:
        raise ValueError("There are no clients to weigh; pass at least one report.")
    seen: set[str] = set()
    for report in reports:
        if report.client_id in seen:
            raise ValueError(f"Client {report.client_id!r} reports twice; pass one report for each client.")
        seen.add(report.client_id)


def _losses(reports: Sequence[ClientReport]) -> list[float]:
    for report in reports:
        if not (math.isfinite(report.min_epoch_loss) and report.min_epoch_loss >= 0):
            raise ValueError(
                f"Client {report.client_id!r} reports a training loss of {report.min_epoch_loss}; weights by loss "
                "need finite, non-negative losses. Check this client's training, or use the weighting 'size'."
            )
    return [report.min_epoch_loss for report in reports]


def _normalized(reports: Sequence[ClientReport], weights: Sequence[float]) -> dict[str, float]:
    """Divide the weights by their sum. The weights must be finite, and at least one must not be 0."""
    _check_cohort(reports)
    total = math.fsum(weights)
    return {report.client_id: weight / total for report, weight in zip(reports, weights, strict=True)}
