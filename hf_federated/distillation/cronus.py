"""Cronus: a robust mean of predictions.

Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning with Black-Box Knowledge Transfer
(arXiv:1912.11279), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..methods import ClientPart
from .base import ClientLogits, Distillation
from .cohort import Cohort
from .dsfl import SoftLabelPart
from .losses import soft_cross_entropy
from .robust_mean import ROBUST_MEANS, num_tolerated, robust_mean
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class Cronus(Distillation):
    """
    Cronus: the server's model and the clients learn a robust mean of the clients' probabilities.

    [Cronus: Robust and Heterogeneous Collaborative Learning with Black-Box Knowledge
    Transfer](https://arxiv.org/abs/1912.11279) (Chang et al., 2019), algorithm 1.

    The server's model and the clients learn a robust mean of the clients' probabilities,
    `q = robust_mean_k softmax(z_k)`, by cross-entropy. A few clients cannot move it far.

    In the paper, a client trains on its private examples and the public examples together. Here, each round trains
    first on the private and then on the public examples. The paper has no server model. Here, the server's model
    learns the public examples too.

    In tagging, the mean is not robust to clients that leave out words. If a client reports that its tokenizer drops a
    word, no client learns this word.

    Args:
        robust_method (`str`, *optional*, defaults to `"filter"`):
            The robust mean, as in [`robust_mean`]: `"filter"` as in the paper, `"trimmed"` or `"median"`.
        outlier_share (`float`, *optional*, defaults to `0.2`):
            Share of clients that may send arbitrary predictions, below one half.
        kwargs (*optional*): As in [`Distillation`], except `temperature`, because the loss has no temperature.

    Raises:
        ValueError: If the method is unknown or the share is out of range.

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
        - Sent: logits of the public examples from the clients, and `q` from the server. No parameters.

    Relations:
        - [`DSFL`] uses the plain mean and sharpens it.
        - [`FedMD`] uses the plain mean of the logits and the mean absolute error.
        - Choose Cronus if a minority of the clients may send wrong or malicious predictions. It needs at least three
          clients: the mean of two clients tolerates no outlier.

    Example:

    ```python
    >>> from hf_federated import Cronus

    >>> Cronus(robust_method="median")
    Cronus(robust_method='median')
    ```
    """

    name: ClassVar[str] = "cronus"
    client_part: ClassVar[type[ClientPart]] = SoftLabelPart
    broadcasts: ClassVar[str] = "probabilities"
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    robust_method: str = "filter"
    outlier_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("robust_method", tuple(ROBUST_MEANS))
        num_tolerated(1, self.outlier_share)

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        probabilities = torch.stack([logits.softmax(-1) for logits in predictions.values()])
        mean = robust_mean(probabilities, self.robust_method, self.outlier_share)
        # "trimmed" and "median" process each class independently, so the probabilities may not sum to 1.
        return (mean / mean.sum(-1, keepdim=True)).to(torch.float32)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> torch.Tensor:
        return ensemble
