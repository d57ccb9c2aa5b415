"""FedMD: clients learn their mean score.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation (arXiv:1910.03581), algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .base import Distillation
from .losses import mean_absolute_error
from .requirements import Requirements
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class FedMD(Distillation):
    """
    The mean of the clients' class scores (logits) of the public rows is what everybody learns, by mean absolute error
    ("digest"); the local training of the next round is the paper's "revisit". So after the last round clients have
    digested and not revisited; evaluations of their own models are of these.

    The paper's clients are first trained on labelled public rows: start from such models (`ClientSpec(model=...)`),
    for here public rows have no labels. It draws a part of the public rows in each round and has no server model; here
    all public rows are used, and the server's model learns what the clients learn.

    Args:
        kwargs (*optional*): As in [`Distillation`], but for `temperature`, which its loss has not.

    Example:

    ```python
    >>> from hf_federated import FedMD

    >>> FedMD()
    FedMD()
    ```
    """

    name: ClassVar[str] = "fedmd"
    # An absolute error is one of any scores.
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, class_probabilities=False)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_absolute_error(logits, targets)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> torch.Tensor:
        return ensemble

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        return mean_absolute_error(logits, targets)
