"""Metrics of the clients, summarized over clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..messages import CLASS_COUNT


# Of these, less is better; of everything else more is, unless the training arguments say so for their metric.
_LESS_IS_BETTER = ("loss", "perplexity", "error", "mse", "mae", "wer", "cer")
# What `Trainer` adds about speed says nothing of a client.
_NOT_A_RESULT = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def less_is_better(metric: str, best_metric: str | None, greater_is_better: bool | None) -> bool:
    """
    Which way a metric improves.

    Args:
        metric (`str`): Its name, with or without `eval_`.
        best_metric (`str`, *optional*): `metric_for_best_model` of the training arguments.
        greater_is_better (`bool`, *optional*): Theirs for `best_metric`.
    """
    if best_metric is not None and greater_is_better is not None:
        if metric.removeprefix("eval_") == best_metric.removeprefix("eval_"):
            return not greater_is_better
    return metric.rpartition("_")[2] in _LESS_IS_BETTER


def spread_over_clients(
    client_metrics: Mapping[str, Mapping[str, float]],
    best_metric: str | None = None,
    greater_is_better: bool | None = None,
) -> dict[str, float]:
    """
    Mean, worst, best and spread of each metric over clients, each client counting once.

    Args:
        client_metrics (`Mapping[str, Mapping[str, float]]`): Each client's metrics.
        best_metric (`str`, *optional*): `metric_for_best_model` of the training arguments.
        greater_is_better (`bool`, *optional*): Theirs for `best_metric`.

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
    names = {name for metrics in client_metrics.values() for name in metrics if not name.endswith(_NOT_A_RESULT)}
    summary: dict[str, float] = {}
    for name in sorted(names):
        values = [metrics[name] for metrics in client_metrics.values() if name in metrics]
        worst, best = (max, min) if less_is_better(name, best_metric, greater_is_better) else (min, max)
        summary[f"federated/{name}_mean"] = statistics.fmean(values)
        summary[f"federated/{name}_worst"] = worst(values)
        summary[f"federated/{name}_best"] = best(values)
        summary[f"federated/{name}_spread"] = statistics.pstdev(values)
    return summary


_SUMMARIZED = {"num_examples", "num_tokens", "num_steps", "loss", "grad_norm", "learning_rate", "total_flos"}


@dataclass
class RoundSummary:
    """
    Sums and means over the accepted updates of a round.

    Args:
        loss (`float`): Mean training loss of the clients, by examples.
        grad_norm (`float`, *optional*): Mean of the clients' last gradient norms.
        learning_rate (`float`, *optional*): Mean of the clients' last learning rates.
        num_clients (`int`): Accepted updates.
        num_failed (`int`): Failed or refused ones.
        num_examples (`int`): Examples of the accepted clients, each counted once.
        num_tokens (`int`): Input tokens, where they are counted.
        total_flos (`float`): Floating point operations.
        further (`dict[str, float]`): Means over the clients of all other metrics that the clients' trainers log.
        clients (`dict[str, dict[str, float]]`): Each client's own metrics.
    """

    loss: float = 0.0
    grad_norm: float | None = None
    learning_rate: float | None = None
    num_clients: int = 0
    num_failed: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    total_flos: float = 0.0
    further: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def from_clients(cls, rows: dict[str, dict[str, float]], num_failed: int) -> RoundSummary:
        """Summarize the clients' metrics, which include `num_examples`, `num_tokens` and `num_steps`."""

        def mean(name: str) -> float | None:
            values = [row[name] for row in rows.values() if name in row]
            return statistics.fmean(values) if values else None

        logged = dict.fromkeys(name for row in rows.values() for name in row if name not in _SUMMARIZED)
        names = [name for name in logged if not name.startswith(CLASS_COUNT)]
        weights = [max(row["num_examples"], 1) for row in rows.values()]
        losses = [row.get("loss", 0.0) for row in rows.values()]
        return cls(
            loss=sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights),
            grad_norm=mean("grad_norm"),
            learning_rate=mean("learning_rate"),
            num_clients=len(rows),
            num_failed=num_failed,
            num_examples=int(sum(row["num_examples"] for row in rows.values())),
            num_tokens=int(sum(row["num_tokens"] for row in rows.values())),
            total_flos=sum(row.get("total_flos", 0.0) for row in rows.values()),
            further={name: mean(name) or 0.0 for name in names},
            clients=rows,
        )
