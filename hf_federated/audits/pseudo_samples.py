"""Do FedDRS's pseudo-samples come near the words that clients trained on?

Its paper leaves the question open: "sampling from the model still raises privacy concerns" (section 6). A sample that
was moved by the gradients of a client's model is read here as the words whose embeddings lie nearest to it. If these
were the client's words more often than chance has it, the samples would tell something of its text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from ..data.plots.figures import COLORS, new_figure
from ..distillation import FedDRS
from ..distillation.pseudo_samples import token_embeddings
from ..server.callbacks import FederatedCallback, ServerState


@dataclass(frozen=True)
class SampleOverlap:
    """
    What the moved pseudo-samples of a client come near, in shares of their positions.

    Args:
        own (`float`): Whose nearest word the client's rows contain.
        others (`float`): The same of the other clients' samples: chance, and what is frequent everywhere.
        start (`float`): The same of the words at which the samples began, before any client's model moved them.
        moved (`float`): Whose nearest word is another one than that at which they began.

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
    The tokens whose word embeddings are nearest, by Euclidean distance.

    Args:
        embeddings (`torch.Tensor`): Of shape `(..., hidden)`.
        weight (`torch.Tensor`): Word embeddings, of shape `(vocabulary, hidden)`.
        batch_size (`int`, *optional*, defaults to `1024`): Positions compared at a time.

    Returns:
        `torch.Tensor`: Token ids, of shape `(...)`.
    """
    flat, table = embeddings.flatten(0, -2).float(), weight.detach().float().to(embeddings.device)
    squares = table.square().sum(1)
    # |x - w|² without |x|², which is the same for all words.
    parts = [(squares - 2 * part @ table.T).argmin(1) for part in flat.split(batch_size)]
    return torch.cat(parts).view(embeddings.shape[:-1])


class PseudoSampleAudit(FederatedCallback):
    """
    Measures, after the last round of [`FedDRS`], whether pseudo-samples come near their client's words. The card then
    says so. It needs the clients' rows, which a server has only in a simulation.

    Args:
        algorithm ([`FedDRS`]): That of the configuration. Its last samples stay in memory.
        clients (`Mapping[str, Dataset]`): The clients' encoded rows.
        column (`str`, *optional*, defaults to `"input_ids"`): Of the tokens.

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
        # Of each client.
        self.results: dict[str, SampleOverlap] = {}
        algorithm.keeps_samples = True

    def on_round_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        server: ServerState,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if server.round == server.num_rounds - 1:
            self.results = self.measure(self.algorithm.samples, token_embeddings(model))

    def measure(self, samples: Mapping[str, Any], weight: torch.Tensor) -> dict[str, SampleOverlap]:
        """
        Compare samples with rows.

        Args:
            samples (`Mapping[str, dict[str, torch.Tensor]]`): By client, with `embeddings` as they ended and `starts`
                as they began, of shape `(samples, positions, hidden)`.
            weight (`torch.Tensor`): What the model takes for each token, of shape `(vocabulary, hidden)`.

        Returns:
            `dict[str, SampleOverlap]`: By client.
        """
        words: dict[str, torch.Tensor] = {}
        begun: dict[str, torch.Tensor] = {}
        for client_id, theirs in samples.items():
            moved = (theirs["embeddings"] != theirs["starts"]).flatten(1).any(1)
            words[client_id] = nearest_tokens(theirs["embeddings"][moved], weight.cpu()).flatten()
            begun[client_id] = nearest_tokens(theirs["starts"][moved], weight.cpu()).flatten()
        found = {}
        for client_id in samples:
            known = self._vocabulary(client_id, weight.shape[0])
            others = [theirs for other, theirs in words.items() if other != client_id]
            found[client_id] = SampleOverlap(
                own=_share(known[words[client_id]]),
                others=_share(torch.cat([known[theirs] for theirs in others])) if others else float("nan"),
                start=_share(known[begun[client_id]]),
                moved=_share(words[client_id] != begun[client_id]),
            )
        return found

    def _vocabulary(self, client_id: str, size: int) -> torch.Tensor:
        """Which tokens a client's rows contain, of shape `(vocabulary,)`."""
        known = torch.zeros(size, dtype=torch.bool)
        for row in self._clients[client_id][self._column]:
            known[torch.as_tensor(row, dtype=torch.long)] = True
        return known

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The results as plain values."""
        return {client_id: asdict(overlap) for client_id, overlap in self.results.items()}


def _share(holds: torch.Tensor) -> float:
    return float(holds.float().mean()) if len(holds) else float("nan")


def plot_pseudo_samples(
    real: torch.Tensor,
    samples: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    title: str = "",
    max_points: int = 2000,
) -> None:
    """
    Draws word embeddings and pseudo-samples, position by position, in the plane of the first two principal components
    of both together.

    Args:
        real (`torch.Tensor`): Embeddings of words that occur, of shape `(words, hidden)`.
        samples (`Mapping[str, torch.Tensor]`): Name to embeddings of shape `(..., hidden)`.
        path (`str`): The PNG file to write.
        title (`str`, *optional*): Of the plot.
        max_points (`int`, *optional*, defaults to `2000`): Points of each kind that are drawn, evenly spaced.

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
    points = {name: _thinned(values.detach().float().flatten(0, -2), max_points) for name, values in groups.items()}
    everything = torch.cat(list(points.values()))
    center = everything.mean(0)
    # Exact, and unlike `torch.pca_lowrank` without draws from the global generator.
    _, spread, directions = torch.linalg.svd(everything - center, full_matrices=False)
    explained = (spread.square() / spread.square().sum()).tolist()
    figure, axes = new_figure(6.5, 5.2, squeeze=False)
    axis = axes[0, 0]
    for (name, values), color, marker in zip(points.items(), _colors(len(points)), "o^sDvP", strict=False):
        placed = ((values - center) @ directions[:2].T).numpy()
        axis.scatter(placed[:, 0], placed[:, 1], s=9, alpha=0.45, color=color, marker=marker, label=name, linewidths=0)
    axis.set_xlabel(f"first component ({100 * explained[0]:.0f} % of the variance)")
    axis.set_ylabel(f"second ({100 * explained[1]:.0f} %)")
    axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(points), frameon=False, fontsize=9, markerscale=2)
    figure.savefig(path, dpi=130)


def _thinned(values: torch.Tensor, most: int) -> torch.Tensor:
    return values[np.linspace(0, len(values) - 1, min(most, len(values))).astype(int)]


def _colors(number: int) -> Iterable[str]:
    return ("#999999", *COLORS[: number - 1])
