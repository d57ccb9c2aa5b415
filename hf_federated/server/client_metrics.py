"""Summaries of metrics over clients."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers.utils import logging

from ..messages import CLASS_COUNT
from ..messages.validation import MAX_SHOWN_LENGTH
from ..reporting.metric_names import lower_is_better
from ..utils.printable import printable


logger = logging.get_logger(__name__)

# Entries of `Trainer` that are no results of a client.
_IGNORED_SUFFIXES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


# A value is left out of a mean if its magnitude is above this multiple of the median magnitude over the clients.
MAX_RATIO_TO_MEDIAN = 1e6
# Largest magnitude of a value of one or two clients.
MAX_MAGNITUDE = 1e30
# Number of metrics of a client that the log lists.
MAX_LISTED = 3


class UsableMetrics:
    """
    The metrics of clients without outliers, which would make a mean meaningless.

    An outlier is NaN or infinite, or its magnitude is more than `MAX_RATIO_TO_MEDIAN` times the larger of 1 and the
    median magnitude of the finite values. With fewer than three finite values, the limit is `MAX_MAGNITUDE`.

    Args:
        client_metrics (`Mapping[str, Mapping[str, float]]`): Metrics by client id.
    """

    def __init__(self, client_metrics: Mapping[str, Mapping[str, float]]) -> None:
        self._client_metrics = client_metrics
        # The metrics that were left out, by client id.
        self._outliers: dict[str, list[str]] = {}

    def values_of(self, name: str) -> dict[str, float]:
        """Return the values of a metric by client id."""
        reported = {client_id: row[name] for client_id, row in self._client_metrics.items() if name in row}
        magnitudes = [abs(value) for value in reported.values() if math.isfinite(value)]
        limit = MAX_MAGNITUDE
        if len(magnitudes) >= 3:
            limit = MAX_RATIO_TO_MEDIAN * max(1.0, min(statistics.median(magnitudes), MAX_MAGNITUDE))
        # A comparison with NaN is false.
        kept = {client_id: value for client_id, value in reported.items() if abs(value) <= limit}
        for client_id in reported:
            if client_id not in kept:
                self._outliers.setdefault(client_id, []).append(name)
        return kept

    def log_outliers(self, where: str) -> None:
        """Log one line for each client with outliers. `where` follows the name of the client."""
        for client_id, names in self._outliers.items():
            shown = ", ".join(
                f"`{printable(name, MAX_SHOWN_LENGTH)}` is {self._client_metrics[client_id][name]:g}"
                for name in names[:MAX_LISTED]
            )
            more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            logger.warning(f"Client {client_id!r}{where}: {shown}{more}. The means over clients leave this out.")


def spread_over_clients(
    client_metrics: Mapping[str, Mapping[str, float]],
    best_metric: str | None = None,
    greater_is_better: bool | None = None,
) -> dict[str, float]:
    """
    Mean, worst, best and spread of each metric over clients. Every client has the same weight.

    Outliers, as [`UsableMetrics`] defines them, are left out. The log names their clients.

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
    usable = UsableMetrics(client_metrics)
    for name in sorted(names):
        values = list(usable.values_of(name).values())
        if not values:
            continue
        worst, best = (max, min) if lower_is_better(name, best_metric, greater_is_better) else (min, max)
        summary[f"federated/{name}_mean"] = statistics.fmean(values)
        summary[f"federated/{name}_worst"] = worst(values)
        summary[f"federated/{name}_best"] = best(values)
        summary[f"federated/{name}_spread"] = statistics.pstdev(values)
    usable.log_outliers(", evaluation")
    return summary


# Metrics with their own field in `RoundSummary`.
_SUMMARIZED = {"num_examples", "num_tokens", "num_steps", "loss", "grad_norm", "learning_rate", "total_flos"}
# Entries that the server adds to the log under these names. A client must not replace them.
_NOT_LOGGED = _SUMMARIZED | {
    "epoch",
    "num_input_tokens_seen",
    "step",
    "train_loss",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
}
_NOT_LOGGED_PREFIXES = (CLASS_COUNT, "client/", "eval_", "federated/", "test_")


def _is_logged(name: str) -> bool:
    """Whether a metric of clients is logged under its own name."""
    return name not in _NOT_LOGGED and not name.startswith(_NOT_LOGGED_PREFIXES)


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
        num_steps (`int`): Number of optimizer steps.
        total_flos (`float`): Number of floating point operations.
        other_metrics (`dict[str, float]`): Means over the clients of all other metrics that the clients' trainers log,
            without names that the server uses in its log (such as `eval_loss`).
        clients (`dict[str, dict[str, float]]`): Metrics by client id.
    """

    loss: float = 0.0
    grad_norm: float | None = None
    learning_rate: float | None = None
    num_clients: int = 0
    num_failed: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    total_flos: float = 0.0
    other_metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def from_clients(
        cls, client_metrics: dict[str, dict[str, float]], num_failed: int, round: int = 0
    ) -> RoundSummary:
        """
        Summarize the metrics of the clients, without outliers as [`UsableMetrics`] defines them.

        Args:
            client_metrics (`dict[str, dict[str, float]]`): Metrics by client id, which include `num_examples`,
                `num_tokens` and `num_steps`.
            num_failed (`int`): Number of clients that failed or whose update was rejected.
            round (`int`, *optional*, defaults to `0`): Round number, for the log.
        """
        usable = UsableMetrics(client_metrics)
        names = dict.fromkeys(itertools.chain.from_iterable(client_metrics.values()))
        logged = filter(_is_logged, names)
        values = {
            name: usable.values_of(name) for name in (*logged, "loss", "grad_norm", "learning_rate", "total_flos")
        }
        losses, flos = values.pop("loss"), values.pop("total_flos")
        weights: dict[str, float] = {name: len(reported) for name, reported in values.items()}
        sums = {name: math.fsum(reported.values()) for name, reported in values.items()}
        sums["total_flos"] = sum(flos.values())
        for name in ("num_examples", "num_tokens", "num_steps"):
            sums[name] = sum(map(operator.itemgetter(name), client_metrics.values()))
        if losses:
            examples = {client_id: max(client_metrics[client_id]["num_examples"], 1) for client_id in losses}
            sums["loss"] = sum(examples[client_id] * loss for client_id, loss in losses.items())
            weights["loss"] = sum(examples.values())
        elif any("loss" in metrics for metrics in client_metrics.values()):
            sums["loss"], weights["loss"] = math.nan, 1
        summary = cls.from_sums(sums, weights, len(client_metrics), num_failed)
        summary.clients = client_metrics
        usable.log_outliers(f", round {round + 1}")
        return summary

    @classmethod
    def from_sums(
        cls, sums: Mapping[str, float], weights: Mapping[str, float], num_clients: int, num_failed: int = 0
    ) -> RoundSummary:
        """
        Summarize sums over the clients, without the metrics of single clients.

        Outliers cannot be left out of a sum. Names that the server uses in its log are ignored.

        Args:
            sums (`Mapping[str, float]`): `num_examples`, `num_tokens`, `num_steps` and `total_flos` as sums over the
                clients, and all other metrics as weighted sums `Σ_i w_i m_i`. The weight of `loss` is the number of
                examples (at least 1), and that of another metric is 1 for each client that reports it.
            weights (`Mapping[str, float]`): `Σ_i w_i` of each weighted sum. A metric with the weight 0 is missing.
            num_clients (`int`): Number of accepted updates.
            num_failed (`int`, *optional*, defaults to `0`): Number of clients that failed or whose update was
                rejected.

        Returns:
            [`RoundSummary`]: The summary. `clients` is empty.
        """
        means = {name: sums[name] / weight for name, weight in weights.items() if weight > 0}
        return cls(
            loss=means.get("loss", 0.0),
            grad_norm=means.get("grad_norm"),
            learning_rate=means.get("learning_rate"),
            num_clients=num_clients,
            num_failed=num_failed,
            num_examples=round(sums["num_examples"]),
            num_tokens=round(sums["num_tokens"]),
            num_steps=round(sums["num_steps"]),
            total_flos=sums.get("total_flos", 0.0),
            other_metrics={name: value for name, value in means.items() if _is_logged(name)},
        )
