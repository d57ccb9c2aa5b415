"""DS-FL: entropy reduction aggregation.

Itahara et al., Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative
Training with Non-IID Private Data (IEEE Transactions on Mobile Computing 22, 2023), equations 7 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..methods import ClientPart
from .base import ClientLogits, Distillation
from .client import DistillationPart
from .client_weights import weighted_mean
from .cohort import Cohort
from .losses import soft_cross_entropy
from .server import DistillationServer


class SoftLabelPart(DistillationPart):
    """Client half of a method whose clients learn probabilities by cross-entropy."""

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)


@dataclass(kw_only=True, repr=False, eq=False)
class DSFL(Distillation):
    """
    DS-FL: the server's model and the clients learn the sharpened mean of the clients' probabilities.

    [Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative Training with
    Non-IID Private Data](https://arxiv.org/abs/2008.06180) (Itahara et al., IEEE Transactions on Mobile Computing 22,
    2023), equations 7 and 8.

    The server's model and the clients learn the sharpened mean of the clients' probabilities,
    `q = softmax(mean_k softmax(z_k) / T)` with a small `T`, by cross-entropy.

    Sharpening lowers the entropy of the ensemble. The entropy is high if clients have different labels. Unlike an
    argmax, sharpening keeps the order and the relative size of the probabilities.

    `T` divides probabilities, which are at most 1. If all clients are certain of a class, its probability in `q` is at
    most `1 / (1 + (C − 1) exp(−1 / T))`. Over a vocabulary, `C` is so large that the paper's `T = 0.1` can flatten the
    ensemble instead of sharpening it. For token prediction, such a `T` raises an error.

    Args:
        sharpening_temperature (`float`, *optional*, defaults to `0.1`):
            `T`. It divides probabilities, as in the paper, and not logits.
        kwargs (*optional*): As in [`Distillation`], except `temperature`, because the loss has no temperature.

    Raises:
        ValueError: If a setting is out of range. When a trainer is built, if `sharpening_temperature` flattens the
            ensemble over the vocabulary.

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
        - Sent: logits of the public examples from the clients, and `q` from the server. No parameters.

    Relations:
        - [`FedMD`] averages logits, does not sharpen the mean and uses the mean absolute error.
        - [`Cronus`] replaces the mean with a robust mean and does not sharpen it.
        - [`MHAT`] sends the logits of the server's model instead of the ensemble.
        - Choose DS-FL if clients have different labels, so that their mean prediction is nearly uniform.

    Example:

    ```python
    >>> from hf_federated import DSFL

    >>> DSFL(sharpening_temperature=0.5)
    DSFL(sharpening_temperature=0.5)
    ```
    """

    name: ClassVar[str] = "dsfl"
    client_part: ClassVar[type[ClientPart]] = SoftLabelPart
    broadcasts: ClassVar[str] = "probabilities"
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    sharpening_temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(("sharpening_temperature",), lambda value: value > 0, "positive")

    def check_unit(self, unit: str, num_classes: int) -> None:
        largest = 1 / (1 + (num_classes - 1) * math.exp(-1 / self.sharpening_temperature))
        if unit == "token" and largest < 0.5:
            raise ValueError(
                f"sharpening_temperature={self.sharpening_temperature} flattens over {num_classes} tokens: a token "
                f"that all clients are certain of keeps a probability of at most {largest:.2g}. Set it to at most "
                f"1 / log(tokens - 1), here {1 / math.log(num_classes - 1):.3g}."
            )

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        probabilities = {client_id: logits.softmax(-1) for client_id, logits in predictions.items()}
        mean = weighted_mean(probabilities, dict.fromkeys(probabilities, 1.0))
        return (mean / self.sharpening_temperature).softmax(-1)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> torch.Tensor:
        return ensemble
