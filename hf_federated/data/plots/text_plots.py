"""PNG plot of the words of clients. It needs matplotlib and scikit-learn (extras `plots` and `metrics`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from ..client_mapping import ClientMapping
from ..statistics.text_statistics import text_map
from .matplotlib_helpers import COLORS, display_name, new_figure, require_matplotlib


MARKERS = "osD^vPX"


def plot_text_map(
    clients: ClientMapping,
    path: str | os.PathLike[str],
    text_column: str = "text",
    groups: Mapping[str, str] | None = None,
    rows_per_client: int | None = 100,
    max_features: int = 5000,
    seed: int = 0,
) -> None:
    """
    Plot the texts of clients as points in a plane, with one color per client.

    Where the colors mix, the texts of the clients are similar. The coordinates are from
    [`~hf_federated.data.statistics.text_statistics.text_map`]: TF-IDF reduced by principal component analysis, as in
    figure 1 of AdaFD. There are seven colors. With more clients or groups, the six with the most points have a color,
    and the remaining points are gray. A large marker shows the mean of its client or group.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        path (`str`):
            Path of the PNG file to write.
        text_column (`str`, *optional*, defaults to `"text"`):
            The column with the texts.
        groups (`Mapping[str, str]`, *optional*):
            Client id to group name. Each group has one color instead of each client. Useful with many clients.
        rows_per_client (`int`, *optional*, defaults to 100):
            Number of texts of a client to draw, drawn without replacement. `None` draws all texts.
        max_features (`int`, *optional*, defaults to 5000):
            Maximum number of words to count.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sample of texts.

    Raises:
        ImportError: If matplotlib or scikit-learn is not installed.
        ValueError: If a client has no group, or for the same reasons as `text_map`.
        TypeError: For the same reasons as `text_map`.

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
    names = _point_names(clients, groups)
    coordinates, owners = text_map(clients, text_column, rows_per_client, max_features, seed)
    distinct = list(dict.fromkeys(names))
    owners = np.array([distinct.index(name) for name in names])[owners]
    highlighted = np.argsort(-np.bincount(owners, minlength=len(distinct)), kind="stable")
    if len(distinct) > len(COLORS):
        highlighted = highlighted[: len(COLORS) - 1]
    highlighted = np.sort(highlighted)
    colors = np.full(len(distinct), COLORS[-1], dtype=object)
    colors[highlighted] = COLORS[: len(highlighted)]
    figure, axis = new_figure(7.5, 5)
    # Points are drawn in random order, so that no client covers another client. Gray points are below all others.
    order = np.random.default_rng(seed).permutation(len(owners))
    order = order[np.argsort(np.isin(owners[order], highlighted), kind="stable")]
    axis.scatter(*coordinates[order].T, s=12, c=colors[owners[order]].tolist(), alpha=0.6, linewidths=0)
    for marker, number in zip(MARKERS, highlighted, strict=False):
        x, y = coordinates[owners == number].mean(axis=0)
        label = display_name(distinct[number])
        axis.scatter(x, y, s=110, color=colors[number], marker=marker, edgecolors="black", linewidths=1, label=label)
    if len(distinct) > len(highlighted):
        noun = "clients" if groups is None else "groups"
        axis.scatter([], [], s=12, color=COLORS[-1], label=f"{len(distinct) - len(highlighted)} other {noun}")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.set_title(f"{len(owners)} texts of {len(clients)} clients, by their words", fontsize=10)
    axis.set_xlabel("first principal component of TF-IDF")
    axis.set_ylabel("second principal component of TF-IDF")
    figure.savefig(path, dpi=130)


def _point_names(clients: ClientMapping, groups: Mapping[str, str] | None) -> list[str]:
    """The name for the points of each client: its id, or its group."""
    if groups is None:
        return clients.client_ids
    ungrouped = [client_id for client_id in clients if client_id not in groups]
    if ungrouped:
        raise ValueError(
            f"plot_text_map: {len(ungrouped)} clients have no group, for example {ungrouped[:5]}. Add all clients"
            " to groups."
        )
    return [groups[client_id] for client_id in clients]
