"""Cronus: a robust mean of predictions.

Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning with Black-Box Knowledge Transfer
(arXiv:1912.11279), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .base import Distillation, Predictions
from .cohort import Cohort
from .losses import soft_cross_entropy
from .robust_mean import ROBUST_MEANS, num_tolerated, robust_mean
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class Cronus(Distillation):
    """
    Everybody learns a mean of the clients' probabilities that a few of them cannot move far, by cross-entropy.

    Where words are tagged, a client that says its tokenizer keeps nothing of a word takes the word from everybody: a
    mean is robust against what clients say, and not against what they leave out.

    In the paper a client trains on its own rows and the public ones together; here it trains on one and then on the
    other in every round, and the server's model, which the paper has not, learns the public ones too.

    Args:
        robust_method (`str`, *optional*, defaults to `"filter"`):
            The mean, of [`robust_mean`]: `"filter"` as in the paper, `"trimmed"` or `"median"`.
        outlier_share (`float`, *optional*, defaults to `0.2`):
            Share of clients that may send anything, below one half.
        kwargs (*optional*): As in [`Distillation`], but for `temperature`, which its loss has not.

    Raises:
        ValueError: If the method is unknown or the share out of range.

    Example:

    ```python
    >>> from hf_federated import Cronus

    >>> Cronus(robust_method="median")
    Cronus(robust_method='median')
    ```
    """

    name: ClassVar[str] = "cronus"
    broadcasts: ClassVar[str] = "probabilities"
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    robust_method: str = "filter"
    outlier_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.robust_method not in ROBUST_MEANS:
            allowed = ", ".join(map(repr, ROBUST_MEANS))
            raise ValueError(f"`robust_method` is {self.robust_method!r}; allowed are {allowed}.")
        num_tolerated(1, self.outlier_share)

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
        probabilities = torch.stack([logits.softmax(-1) for logits in predictions.values()])
        mean = robust_mean(probabilities, self.robust_method, self.outlier_share)
        # Coordinates are trimmed one by one, so that they need not add up to one.
        return (mean / mean.sum(-1, keepdim=True)).to(torch.float32)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> torch.Tensor:
        return ensemble

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)
