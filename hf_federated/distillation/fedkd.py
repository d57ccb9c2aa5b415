"""FedKD of Gong et al.: one shot.

Gong et al., Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge Distillation (AAAI 2022).
Not FedKD of Wu et al. (2022), which is [`MutualKD`].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..clients.context import ClientContext
from ..messages import CLASS_COUNT
from .base import Distillation, Predictions, num_examples_by_client, weighted_mean
from .class_counts import NUM_EXAMPLES_PER_CLASS, ReportClassCounts
from .client import DistillationClient, LocalDistillation
from .client_weights import class_count_weights
from .cohort import Cohort, reports
from .server import DistillationServer


class FedKDClient(DistillationClient):
    """The client side of [`FedKD`]."""

    def local_training(self, context: ClientContext, round: int) -> LocalDistillation:
        if not self.algorithm.counts_classes:
            return LocalDistillation()
        return ReportClassCounts(context.student.num_classes)


@dataclass(kw_only=True, repr=False, eq=False)
class FedKD(Distillation):
    """
    Clients train once and send their predictions once; the server learns the weighted mean of their logits by KL
    divergence. Nothing goes back to them.

    Args:
        weighting (`str`, *optional*, defaults to `"class_counts"`):
            `"class_counts"`: of each class, a client weighs what it has of its rows, as in the paper; clients report
            how many rows of each class they have. `"size"`: all rows.
        kwargs (*optional*): As in [`Distillation`], but for `client_epochs` and `client_lr`: clients
            do not distil.

    Raises:
        ValueError: If the weighting is unknown, the run has more than one round, or classes shall be counted in a task
            that predicts words or tokens.

    Example:

    ```python
    >>> from hf_federated import FedKD

    >>> FedKD(weighting="size")
    FedKD(weighting='size')
    ```
    """

    name: ClassVar[str] = "fedkd"
    client_class: ClassVar[type[DistillationClient]] = FedKDClient
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr")

    weighting: str = "class_counts"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting not in ("class_counts", "size"):
            raise ValueError(f"`weighting` is {self.weighting!r}; allowed are 'class_counts' and 'size'.")

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        return (NUM_EXAMPLES_PER_CLASS,) if self.counts_classes else ()

    @property
    def counts_classes(self) -> bool:
        """Whether clients report how many examples of each class they have."""
        return self.weighting == "class_counts"

    def check_unit(self, unit: str, num_classes: int) -> None:
        if self.counts_classes:
            raise ValueError(
                f"weighting='class_counts' of FedKD counts rows by their one class, and this task has one for every "
                f"{unit} of a row: take weighting='size'."
            )

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        if not self.counts_classes:
            return
        counts = {name: value for name, value in metrics.items() if name.startswith(CLASS_COUNT)}
        are_counts = (0 <= count < math.inf for count in counts.values())
        if counts.keys() != {f"{CLASS_COUNT}{label}" for label in range(num_classes)} or not all(are_counts):
            raise ValueError(
                f"it reports {counts} as its rows of each class, by which weighting='class_counts' weighs it; expected"
                f" one number for each of {num_classes} classes, finite and not negative. Look at this client's rows."
            )

    def setup(self, num_rounds: int) -> None:
        if num_rounds != 1:
            raise ValueError(
                f"FedKD is one shot, and num_rounds is {num_rounds}: set num_rounds=1, and `local_epochs` to all the "
                "epochs that clients shall train."
            )

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
        if self.weighting == "size":
            return weighted_mean(predictions, num_examples_by_client(cohort))
        weights = class_count_weights(reports(cohort))  # (clients, classes), of which each class adds up to one
        stacked = torch.stack([logits.to(torch.float64) for logits in predictions.values()])
        return (stacked * weights.to(stacked)[:, None]).sum(0).to(torch.float32)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> None:
        return None
