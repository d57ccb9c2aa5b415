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

from .base import Distillation, Predictions, weighted_mean
from .cohort import Cohort
from .losses import soft_cross_entropy
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class DSFL(Distillation):
    """
    The mean of the clients' probabilities, sharpened, is what server and clients learn:
    `q = softmax(mean_k softmax(z_k) / T)` with a small `T`, and the loss is cross-entropy with `q`.

    Sharpening lowers the entropy of the ensemble, which is high where clients have different labels. An argmax in its
    place would throw away what it keeps.

    `T` divides probabilities, of which none is above 1: a class that everybody is sure of keeps at most
    `1 / (1 + (C − 1) exp(−1 / T))`. Over a vocabulary, `C` is so large that the paper's `T = 0.1` may flatten instead;
    for predictions of tokens such a `T` is refused.

    Args:
        sharpening_temperature (`float`, *optional*, defaults to `0.1`):
            `T`. It divides probabilities, as in the paper, and not logits.
        kwargs (*optional*): As in [`Distillation`], but for `temperature`, which its loss has not.

    Example:

    ```python
    >>> from hf_federated import DSFL

    >>> DSFL(sharpening_temperature=0.5)
    DSFL(sharpening_temperature=0.5)
    ```
    """

    name: ClassVar[str] = "dsfl"
    broadcasts: ClassVar[str] = "probabilities"
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    sharpening_temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sharpening_temperature > 0:
            raise ValueError(f"`sharpening_temperature` is {self.sharpening_temperature}; it must be positive.")

    def check_unit(self, unit: str, num_classes: int) -> None:
        largest = 1 / (1 + (num_classes - 1) * math.exp(-1 / self.sharpening_temperature))
        if unit == "token" and largest < 0.5:
            raise ValueError(
                f"sharpening_temperature={self.sharpening_temperature} flattens over {num_classes} tokens: of an "
                f"ensemble that is sure of one it leaves it {largest:.2g}. It must be at most 1 / log(tokens - 1), "
                f"here {1 / math.log(num_classes - 1):.3g}."
            )

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
        probabilities = {client_id: logits.softmax(-1) for client_id, logits in predictions.items()}
        mean = weighted_mean(probabilities, dict.fromkeys(probabilities, 1.0))
        return (mean / self.sharpening_temperature).softmax(-1)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> torch.Tensor:
        return ensemble

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)
