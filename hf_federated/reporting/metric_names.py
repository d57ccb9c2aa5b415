"""Names in the log of a trainer: which are metrics, and for which a lower value is better."""

from __future__ import annotations


# Words in the names of metrics for which lower is better. For all other metrics, higher is better, except for
# `metric_for_best_model`, whose direction the training arguments set.
_LOWER_IS_BETTER = {"loss", "perplexity", "error", "mse", "rmse", "msle", "mae", "mape", "wer", "cer", "ter"}
_LOWER_IS_BETTER |= {"brier", "ece"}


def is_metric(key: str) -> bool:
    """Return whether a logged key is a metric of a global evaluation. Runtime and throughput are not metrics."""
    return key.startswith("eval_") and not key.endswith(("_runtime", "_per_second", "_time"))


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
    return not _LOWER_IS_BETTER.isdisjoint(metric.removeprefix("eval_").split("_"))
