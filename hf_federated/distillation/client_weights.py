"""Weights of the clients in an ensemble (by size, uniform, by training loss, or by class), and the weighted mean.

RNWC and ENWC are equations 6 and 7 of Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual
Data (AdaFD). The weights by class are those of Gong et al., Preserving Privacy in Federated Learning with Ensemble
Cross-Domain Knowledge Distillation (FedKD, AAAI 2022). The weights depend only on the values that clients report, not
on their predictions. A client that reports a small loss is trusted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from ..utils.arguments import require
from ..utils.weighted_mean import Tensors
from .client_reports import ClientReport
from .cohort import Cohort


Weighting = Callable[[Sequence[ClientReport]], dict[str, float]]


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
    require("beta", beta, math.isfinite(beta) and beta >= 0, "finite and not negative")
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


def weighted_mean(predictions: Tensors, weights: Mapping[str, float]) -> torch.Tensor:
    """
    The weighted mean of the clients' tensors, summed in float64 in the order of the clients.

    Args:
        predictions (`Mapping[str, torch.Tensor]`): Tensors by client, all of one shape.
        weights (`Mapping[str, float]`): Weights by client. They do not have to sum to 1.

    Returns:
        `torch.Tensor`: The mean, of the same shape, in float32.
    """
    total = sum(weights[client_id] for client_id in predictions)
    terms = (value.to(torch.float64) * (weights[client_id] / total) for client_id, value in predictions.items())
    return sum(terms, torch.zeros((), dtype=torch.float64)).to(torch.float32)


def num_examples_by_client(cohort: Cohort) -> dict[str, float]:
    """Number of training examples of each client."""
    return {client_id: row["num_examples"] for client_id, row in cohort.metrics.items()}


def _check_cohort(reports: Sequence[ClientReport]) -> None:
    if not reports:
        raise ValueError("There are no clients to weigh; pass at least one report.")
    for client_id, number in Counter(report.client_id for report in reports).items():
        if number > 1:
            raise ValueError(f"Client {client_id!r} reports twice; pass one report for each client.")


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
