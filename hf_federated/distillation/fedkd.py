"""FedKD of Gong et al.: one-shot distillation.

Gong et al., Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge Distillation (AAAI 2022).
FedKD of Wu et al. (2022) is a different method: [`MutualKD`].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..messages import CLASS_COUNT, Disclosure
from ..methods import ClientPart
from .base import ClientLogits, Distillation
from .class_counts import NUM_EXAMPLES_PER_CLASS, ReportClassCounts, count_classes
from .client_reports import reports
from .client_weights import class_count_weights, num_examples_by_client, weighted_mean
from .cohort import Cohort
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class FedKD(Distillation):
    """
    FedKD of Gong et al.: clients train once, and the server's model learns from their predictions.

    [Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge
    Distillation](https://arxiv.org/abs/2209.04599) (Gong et al., AAAI 2022).

    Clients train once and send their predictions of the public examples once. The server's model learns the weighted
    mean of their logits by KL divergence, with weights `w_kc = n_kc / Σ_j n_jc` for client `k` and class `c`. The
    server sends nothing back.

    Args:
        weighting (`str`, *optional*, defaults to `"class_counts"`):
            `"class_counts"`: for each class, a client's weight is its number of examples of this class, as in the
            paper. Clients report their number of examples of each class. `"size"`: a client's weight is its number of
            examples.
        kwargs (*optional*): As in [`Distillation`], except `client_epochs` and `client_lr`, because clients do not
            distill.

    Raises:
        ValueError: If the weighting is unknown or the run has more than one round. When a trainer is built, if
            `weighting="class_counts"` is used for a task that predicts words or tokens.

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
          Tagging and token prediction need `weighting="size"`.
        - Sent: logits of the public examples from the clients, once. With `weighting="class_counts"`, also the number
          of examples of each class. No parameters.

    Relations:
        - [`MHAT`] and [`FedED`] run several rounds and let the clients learn from the server.
        - [`MutualKD`] is the FedKD of Wu et al. (2022), in which each client trains a private model and a small shared
          model.
        - Choose FedKD if clients can communicate only once, or if the server's model alone is needed.

    Example:

    ```python
    >>> from hf_federated import FedKD

    >>> FedKD(weighting="size")
    FedKD(weighting='size')
    ```
    """

    name: ClassVar[str] = "fedkd"
    client_part: ClassVar[type[ClientPart]] = ReportClassCounts
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr")

    weighting: str = "class_counts"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("weighting", ("class_counts", "size"))
        self.reports_class_counts = self.weighting == "class_counts"

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        return (NUM_EXAMPLES_PER_CLASS,) if self.reports_class_counts else ()

    def class_counts(self, dataset: Any, num_classes: int, tokenizer: Any) -> list[int]:
        return count_classes(dataset, num_classes)

    def check_unit(self, unit: str, num_classes: int) -> None:
        if self.reports_class_counts:
            raise ValueError(
                f"weighting='class_counts' of FedKD needs one class per example, but this task has one for every "
                f"{unit} of an example. Set weighting='size'."
            )

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        if not self.reports_class_counts:
            return
        counts = {name: value for name, value in metrics.items() if name.startswith(CLASS_COUNT)}
        are_counts = (0 <= count < math.inf for count in counts.values())
        if counts.keys() != {f"{CLASS_COUNT}{label}" for label in range(num_classes)} or not all(are_counts):
            raise ValueError(
                f"it reports {counts} as its numbers of examples of each class, which weighting='class_counts' needs. "
                f"Expected one finite, non-negative number for each of {num_classes} classes. Check the client's data."
            )
        if sum(counts.values()) > metrics["num_examples"]:
            raise ValueError(
                f"it reports {counts} as its numbers of examples of each class, but it has {metrics['num_examples']} "
                "examples."
            )

    def setup(self, num_rounds: int) -> None:
        if num_rounds != 1:
            raise ValueError(
                f"num_rounds={num_rounds}, but FedKD runs one round. Set num_rounds=1, and set `local_epochs` to the "
                "number of epochs that clients train."
            )

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        if self.weighting == "size":
            return weighted_mean(predictions, num_examples_by_client(cohort))
        weights = class_count_weights(reports(cohort))  # (clients, classes); each column sums to 1
        stacked = torch.stack([logits.to(torch.float64) for logits in predictions.values()])
        return (stacked * weights.to(stacked)[:, None]).sum(0).to(torch.float32)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> None:
        return None
