"""PNG plot of the words of clients. Needs matplotlib and scikit-learn (extras `plots` and `metrics`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from ..federated_dataset import FederatedDataset
from ..statistics.text_statistics import text_map
from .figures import COLORS, new_figure, require_matplotlib, shown_name


MARKERS = "osD^vPX"


def plot_text_map(
    clients: FederatedDataset,
    path: str | os.PathLike[str],
    text_column: str = "text",
    groups: Mapping[str, str] | None = None,
    rows_per_client: int | None = 100,
    max_features: int = 5000,
    seed: int = 0,
) -> None:
    """
    Draws texts as points in a plane, a colour a client: where the colours mix, clients write alike.

    The places are those of [`~hf_federated.data.statistics.text_statistics.text_map`]: TF-IDF reduced by principal
    components, as in figure 1 of AdaFD. Seven colours can be told apart. With more clients (or groups), the six with
    the most points have a colour, and the others are grey. A large marker is the mean of its client.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        path (`str`):
            The PNG file to write.
        text_column (`str`, *optional*, defaults to `"text"`):
            The column with the texts.
        groups (`Mapping[str, str]`, *optional*):
            Client id to the name of a group; then a colour is a group. Of use for many clients.
        rows_per_client (`int`, *optional*, defaults to 100):
            How many rows of a client to draw; `None` for all.
        max_features (`int`, *optional*, defaults to 5000):
            How many words to count.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the rows that are drawn.

    Raises:
        ImportError: If matplotlib or scikit-learn is not installed.
        ValueError: If a client has no group, or as `text_map` does.
        TypeError: As `text_map` does.

    Example:

    ```python
    >>> import os, tempfile
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, plot_text_map

    >>> texts = ["fast car", "car engine", "fast bike", "bike chain"]
    >>> clients = FederatedDataset.from_column(Dataset.from_dict({"shop": [0, 0, 1, 1], "text": texts}), "shop")
    >>> path = os.path.join(tempfile.mkdtemp(), "words.png")
    >>> plot_text_map(clients, path)
    >>> os.path.exists(path)
    True

    ```
    """
    require_matplotlib()
    names = clients.client_ids
    if groups is not None:
        without = [client_id for client_id in names if client_id not in groups]
        if without:
            raise ValueError(f"plot_text_map: {len(without)} clients have no group, for example {without[:5]}.")
        names = [groups[client_id] for client_id in names]
    coordinates, owners = text_map(clients, text_column, rows_per_client, max_features, seed)
    distinct = list(dict.fromkeys(names))
    owners = np.array([distinct.index(name) for name in names])[owners]
    shown = np.argsort(-np.bincount(owners, minlength=len(distinct)), kind="stable")
    if len(distinct) > len(COLORS):
        shown = shown[: len(COLORS) - 1]
    shown = np.sort(shown)
    colors = np.full(len(distinct), COLORS[-1], dtype=object)
    colors[shown] = COLORS[: len(shown)]
    figure, axis = new_figure(7.5, 5)
    # In random order, so that no client lies on top of the others; grey below all.
    order = np.random.default_rng(seed).permutation(len(owners))
    order = order[np.argsort(np.isin(owners[order], shown), kind="stable")]
    axis.scatter(*coordinates[order].T, s=12, c=colors[owners[order]].tolist(), alpha=0.6, linewidths=0)
    for marker, number in zip(MARKERS, shown, strict=False):
        x, y = coordinates[owners == number].mean(axis=0)
        label = shown_name(distinct[number])
        axis.scatter(x, y, s=110, color=colors[number], marker=marker, edgecolors="black", linewidths=1, label=label)
    if len(distinct) > len(shown):
        what = "clients" if groups is None else "groups"
        axis.scatter([], [], s=12, color=COLORS[-1], label=f"{len(distinct) - len(shown)} other {what}")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.set_title(f"{len(owners)} texts of {len(clients)} clients, by their words", fontsize=10)
    axis.set_xlabel("first principal component of TF-IDF")
    axis.set_ylabel("second")
    figure.savefig(path, dpi=130)
