"""Per-client metrics, summed up over clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping


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
