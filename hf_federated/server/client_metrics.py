"""Summaries of metrics over clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..messages import CLASS_COUNT


# Last words of the names of metrics for which lower is better. For all other metrics, higher is better, except for
# `metric_for_best_model`, whose direction the training arguments set.
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "mse", "mae", "wer", "cer")
# Entries of `Trainer` that are no results of a client.
_IGNORED_SUFFIXES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def lower_is_better(metric: str, best_metric: str | None, greater_is_better: bool | None) -> bool:
    """
    Whether lower values of a metric are better.

    Args:
        metric (`str`): Name of the metric, with or without the prefix `eval_`.
        best_metric (`str`, *optional*): `metric_for_best_model` of the training arguments.
        greater_is_better (`bool`, *optional*): `greater_is_better` of the training arguments.
    """
    if best_metric is not None and greater_is_better is not None:
        if metric.removeprefix("eval_") == best_metric.removeprefix("eval_"):
            return not greater_is_better
    return metric.rpartition("_")[2] in _LOWER_IS_BETTER


def spread_over_clients(
    client_metrics: Mapping[str, Mapping[str, float]],
    best_metric: str | None = None,
    greater_is_better: bool | None = None,
) -> dict[str, float]:
    """
    Mean, worst, best and spread of each metric over clients. Every client has the same weight.

    Args:
        client_metrics (`Mapping[str, Mapping[str, float]]`): Metrics by client id.
        best_metric (`str`, *optional*): `metric_for_best_model` of the training arguments.
        greater_is_better (`bool`, *optional*): `greater_is_better` of the training arguments.

    Returns:
        `dict[str, float]`: `federated/<metric>_mean`, `_worst`, `_best`, and `_spread`, the population standard
        deviation.

    Example:

    ```python
    >>> from hf_federated.server.client_metrics import spread_over_clients

    >>> spread = spread_over_clients({"a": {"eval_accuracy": 0.5}, "b": {"eval_accuracy": 1.0}})
    >>> spread["federated/eval_accuracy_worst"]
    0.5
    ```
    """
    names = {name for metrics in client_metrics.values() for name in metrics if not name.endswith(_IGNORED_SUFFIXES)}
    summary: dict[str, float] = {}
    for name in sorted(names):
        values = [metrics[name] for metrics in client_metrics.values() if name in metrics]
        worst, best = (max, min) if lower_is_better(name, best_metric, greater_is_better) else (min, max)
        summary[f"federated/{name}_mean"] = statistics.fmean(values)
        summary[f"federated/{name}_worst"] = worst(values)
        summary[f"federated/{name}_best"] = best(values)
        summary[f"federated/{name}_spread"] = statistics.pstdev(values)
    return summary


# Metrics with their own field in `RoundSummary`.
_SUMMARIZED = {"num_examples", "num_tokens", "num_steps", "loss", "grad_norm", "learning_rate", "total_flos"}


@dataclass
class RoundSummary:
    """
    Sums and means over the accepted updates of a round.

    Args:
        loss (`float`): Mean training loss of the clients, weighted by the number of examples.
        grad_norm (`float`, *optional*): Mean of the clients' last gradient norms.
        learning_rate (`float`, *optional*): Mean of the clients' last learning rates.
        num_clients (`int`): Number of accepted updates.
        num_failed (`int`): Number of clients that failed or whose update was rejected.
        num_examples (`int`): Number of examples of the accepted clients, each counted once.
        num_tokens (`int`): Number of input tokens, if the clients count tokens.
        total_flos (`float`): Number of floating point operations.
        other_metrics (`dict[str, float]`): Means over the clients of all other metrics that the clients' trainers log.
        clients (`dict[str, dict[str, float]]`): Metrics by client id.
    """

    loss: float = 0.0
    grad_norm: float | None = None
    learning_rate: float | None = None
    num_clients: int = 0
    num_failed: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    total_flos: float = 0.0
    other_metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def from_clients(cls, client_metrics: dict[str, dict[str, float]], num_failed: int) -> RoundSummary:
        """Summarize the clients' metrics, which include `num_examples`, `num_tokens` and `num_steps`."""

        def mean(name: str) -> float | None:
            values = [metrics[name] for metrics in client_metrics.values() if name in metrics]
            return statistics.fmean(values) if values else None

        logged = dict.fromkeys(
            name for metrics in client_metrics.values() for name in metrics if name not in _SUMMARIZED
        )
        names = [name for name in logged if not name.startswith(CLASS_COUNT)]
        weights = [max(metrics["num_examples"], 1) for metrics in client_metrics.values()]
        losses = [metrics.get("loss", 0.0) for metrics in client_metrics.values()]
        return cls(
            loss=sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights),
            grad_norm=mean("grad_norm"),
            learning_rate=mean("learning_rate"),
            num_clients=len(client_metrics),
            num_failed=num_failed,
            num_examples=int(sum(metrics["num_examples"] for metrics in client_metrics.values())),
            num_tokens=int(sum(metrics["num_tokens"] for metrics in client_metrics.values())),
            total_flos=sum(metrics.get("total_flos", 0.0) for metrics in client_metrics.values()),
            other_metrics={name: mean(name) or 0.0 for name in names},
            clients=client_metrics,
        )
