"""Measure whether the pseudo-samples of FedDRS are close to the words that clients trained on.

The FedDRS paper leaves this question open: "sampling from the model still raises privacy concerns" (section 6). The
audit reads each position of a pseudo-sample as the word with the nearest embedding, for pseudo-samples that were moved
by the gradients of a client's model. If these words occur in the client's examples more often than expected by chance,
the pseudo-samples reveal information about the client's text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from ..data.plots.matplotlib_helpers import COLORS, new_figure
from ..distillation import FedDRS
from ..distillation.pseudo_samples import token_embeddings
from ..methods import Round
from ..server.callbacks import FederatedCallback


@dataclass(frozen=True)
class SampleOverlap:
    """
    Overlap of a client's moved pseudo-samples with words, as fractions of their positions.

    Args:
        own (`float`):
            Fraction of positions whose nearest word occurs in the client's examples.
        others (`float`):
            The same fraction for the other clients' pseudo-samples. It measures chance and words that are frequent in
            all texts.
        start (`float`):
            The same fraction for the initial words of the pseudo-samples, before a client's model moved them.
        moved (`float`):
            Fraction of positions whose nearest word differs from the initial word.

    Example:

    ```python
    >>> from hf_federated.audits import SampleOverlap

    >>> SampleOverlap(own=0.31, others=0.3, start=0.3, moved=0.5).own
    0.31
    ```
    """

    own: float
    others: float
    start: float
    moved: float


def nearest_tokens(embeddings: torch.Tensor, weight: torch.Tensor, batch_size: int = 1024) -> torch.Tensor:
    """
    Return the tokens whose word embeddings are nearest in Euclidean distance.

    Args:
        embeddings (`torch.Tensor`):
            Embeddings of shape `(..., hidden)`.
        weight (`torch.Tensor`):
            Word embeddings of shape `(vocabulary, hidden)`.
        batch_size (`int`, *optional*, defaults to `1024`):
            Number of positions that are compared at a time.

    Returns:
        `torch.Tensor`: Token ids of shape `(...)`.
    """
    flat, table = embeddings.flatten(0, -2).float(), weight.detach().float().to(embeddings.device)
    squares = table.square().sum(1)
    # |x - w|² without |x|², which is the same for all words.
    parts = [(squares - 2 * part @ table.T).argmin(1) for part in flat.split(batch_size)]
    return torch.cat(parts).view(embeddings.shape[:-1])


class PseudoSampleAudit(FederatedCallback):
    """
    Callback that measures after the last round of [`FedDRS`] whether pseudo-samples are close to the client's words.

    The model card then contains the results. The audit needs the clients' examples, which a server has only in a
    simulation.

    Args:
        algorithm ([`FedDRS`]):
            The algorithm of the configuration. Its last pseudo-samples stay in memory.
        clients (`Mapping[str, Dataset]`):
            The clients' tokenized examples.
        column (`str`, *optional*, defaults to `"input_ids"`):
            Column of the token ids.

    Example:

    ```python
    >>> from hf_federated import FedDRS
    >>> from hf_federated.audits import PseudoSampleAudit

    >>> audit = PseudoSampleAudit(FedDRS(), {"a": {"input_ids": [[5, 6], [7]]}})
    >>> audit.results
    {}
    ```
    """

    def __init__(self, algorithm: FedDRS, clients: Mapping[str, Any], column: str = "input_ids") -> None:
        self.algorithm = algorithm
        self._clients = clients
        self._column = column
        # The results of each client.
        self.results: dict[str, SampleOverlap] = {}
        algorithm.keeps_samples = True

    def on_round_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        round: Round,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if round.number == state.max_steps - 1:
            self.results = self.measure(self.algorithm.samples, token_embeddings(model))

    def measure(self, samples: Mapping[str, Any], weight: torch.Tensor) -> dict[str, SampleOverlap]:
        """
        Compare pseudo-samples with the clients' examples.

        Args:
            samples (`Mapping[str, dict[str, torch.Tensor]]`):
                The final `embeddings` and the initial `starts` of each client's pseudo-samples, of shape
                `(num_samples, positions, hidden)`.
            weight (`torch.Tensor`):
                The input embeddings that the model uses for tokens, of shape `(vocabulary, hidden)`.

        Returns:
            `dict[str, SampleOverlap]`: The overlap of each client.
        """
        words: dict[str, torch.Tensor] = {}
        initial_words: dict[str, torch.Tensor] = {}
        for client_id, tensors in samples.items():
            moved = (tensors["embeddings"] != tensors["starts"]).flatten(1).any(1)
            words[client_id] = nearest_tokens(tensors["embeddings"][moved], weight.cpu()).flatten()
            initial_words[client_id] = nearest_tokens(tensors["starts"][moved], weight.cpu()).flatten()
        overlaps = {}
        for client_id in samples:
            known = self._vocabulary(client_id, weight.shape[0])
            other_words = [known[tokens] for other_id, tokens in words.items() if other_id != client_id]
            overlaps[client_id] = SampleOverlap(
                own=_fraction(known[words[client_id]]),
                others=_fraction(torch.cat([known[:0], *other_words])),
                start=_fraction(known[initial_words[client_id]]),
                moved=_fraction(words[client_id] != initial_words[client_id]),
            )
        return overlaps

    def _vocabulary(self, client_id: str, size: int) -> torch.Tensor:
        """Return a mask of the tokens in a client's examples, of shape `(vocabulary,)`."""
        known = torch.zeros(size, dtype=torch.bool)
        for ids in self._clients[client_id][self._column]:
            known[torch.as_tensor(ids, dtype=torch.long)] = True
        return known

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the results as plain values."""
        return {client_id: asdict(overlap) for client_id, overlap in self.results.items()}


def _fraction(mask: torch.Tensor) -> float:
    return float(mask.float().mean()) if len(mask) else float("nan")


def plot_pseudo_samples(
    real: torch.Tensor,
    samples: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    title: str = "",
    max_points: int = 2000,
) -> None:
    """
    Plot word embeddings and the positions of pseudo-samples on their first two joint principal components.

    Args:
        real (`torch.Tensor`):
            Embeddings of words that occur in the data, of shape `(num_words, hidden)`.
        samples (`Mapping[str, torch.Tensor]`):
            Embeddings of shape `(..., hidden)` for each name in the legend.
        path (`str`):
            The PNG file to write.
        title (`str`, *optional*):
            Title of the plot.
        max_points (`int`, *optional*, defaults to `2000`):
            Maximum number of points of each group. The plotted points are evenly spaced.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> import torch
    >>> from hf_federated.audits import plot_pseudo_samples

    >>> path = os.path.join(tempfile.mkdtemp(), "samples.png")
    >>> plot_pseudo_samples(torch.randn(50, 4), {"target": torch.randn(6, 5, 4)}, path)
    >>> os.path.exists(path)
    True
    ```
    """
    groups = {"words": real, **samples}
    points = {name: _subsample(values.detach().float().flatten(0, -2), max_points) for name, values in groups.items()}
    all_points = torch.cat(list(points.values()))
    center = all_points.mean(0)
    # Unlike `torch.pca_lowrank`, the SVD is exact and does not draw from the global random generator.
    _, singular_values, directions = torch.linalg.svd(all_points - center, full_matrices=False)
    explained = (singular_values.square() / singular_values.square().sum()).tolist()
    figure, axis = new_figure(6.5, 5.2)
    for (name, values), color, marker in zip(points.items(), ("#999999", *COLORS), "o^sDvP", strict=False):
        projected = ((values - center) @ directions[:2].T).numpy()
        axis.scatter(
            projected[:, 0], projected[:, 1], s=9, alpha=0.45, color=color, marker=marker, label=name, linewidths=0
        )
    axis.set_xlabel(f"first component ({100 * explained[0]:.0f}% of the variance)")
    axis.set_ylabel(f"second component ({100 * explained[1]:.0f}% of the variance)")
    axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(points), frameon=False, fontsize=9, markerscale=2)
    figure.savefig(path, dpi=130)


def _subsample(values: torch.Tensor, max_points: int) -> torch.Tensor:
    return values[np.linspace(0, len(values) - 1, min(max_points, len(values))).astype(int)]
