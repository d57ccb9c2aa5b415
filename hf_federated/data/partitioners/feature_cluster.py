"""Clients that differ in the topics of their texts (FedNLP, Lin et al. 2022, section 3.2).

For tasks without classes. Texts are embedded and clustered, and the cluster of an example replaces its label. In this
implementation a cluster id belongs to the example that it was predicted for. The published code joins the ids in the
order "0", "1", "10", …, which assigns cluster ids to the wrong examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset

from ...utils.optional_packages import require_packages
from ..column_values import check_columns
from .base import (
    Partition,
    SplitsPartitioner,
    check_enough_rows,
    check_settings,
    check_splits,
)
from .label_dirichlet import LabelDirichletPartitioner


Embedder: TypeAlias = Callable[[list[str]], np.ndarray]


@dataclass(frozen=True)
class FeatureClusterPartitioner(SplitsPartitioner):
    """
    Partitioner that gives every client different shares of clusters of similar texts.

    Use it to simulate clients with different topics if no column of the dataset names a client or a topic.

    Texts are embedded, K-means clusters the embeddings, and examples are assigned as in
    [`LabelDirichletPartitioner`], with the cluster as the label. This partitioner needs the extra `embeddings`. The
    embeddings of all examples of a split are kept in memory as `float32`. The clients are named `"0"`, `"1"`, …

    The clusters are fitted on the first split. The examples of the other splits belong to the nearest cluster.

    Args:
        num_clients (`int`):
            Number of clients, at least 1.
        text_columns (`str` or `Sequence[str]`):
            One or several columns with the texts to cluster by. A column holds strings, or lists of strings (tokens),
            which are joined by spaces. Several columns, such as question and answer, are joined by a line break.
        num_clusters (`int`, *optional*, defaults to `10`):
            Number of clusters, at least 1 and at most the number of examples of the first split.
        embedder (`str` or `Callable[[list[str]], np.ndarray]`, *optional*):
            Name or path of a model that `sentence_transformers` loads, by default
            `"sentence-transformers/all-MiniLM-L6-v2"`. Or a function from a list of texts to an array of shape
            `(num_texts, num_features)`. The partitioner's settings record a function by its name.
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration, as in [`LabelDirichletPartitioner`].
        quantity_beta (`float`, *optional*):
            If set, client sizes differ too, as in [`LabelDirichletPartitioner`].
        min_size (`int`, *optional*, defaults to `1`):
            Minimum number of examples per client in the first split.
        batch_size (`int`, *optional*, defaults to `256`):
            Number of examples that are read and embedded at a time.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the clustering and of the draws. The global random generators are neither used nor changed.

    Raises:
        `ValueError`: If there are too few examples, a column does not exist, a text is missing, or embeddings are not
            finite or have the wrong shape.
        `ImportError`: If scikit-learn is not installed, or if `embedder` is a name and `sentence_transformers` is not
            installed.

    Example:

    ```python
    >>> import numpy as np
    >>> from datasets import Dataset
    >>> from hf_federated import FeatureClusterPartitioner, FederatedDataset
    >>> dataset = Dataset.from_dict({"text": ["rain", "snow and ice", "sun", "a storm is coming"] * 10})
    >>> def lengths(texts):
    ...     return np.array([[len(text)] for text in texts])
    >>> partitioner = FeatureClusterPartitioner(4, "text", num_clusters=2, embedder=lengths, alpha=0.1)
    >>> FederatedDataset.from_dataset(dataset, partitioner).num_rows
    {'0': 10, '1': 10, '2': 10, '3': 10}

    ```
    """

    num_clients: int
    text_columns: str | Sequence[str]
    num_clusters: int = 10
    embedder: str | Embedder = "sentence-transformers/all-MiniLM-L6-v2"
    alpha: float = 1.0
    quantity_beta: float | None = None
    min_size: int = 1
    batch_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        columns = [self.text_columns] if isinstance(self.text_columns, str) else self.text_columns
        if not isinstance(columns, Sequence) or not columns or not all(isinstance(i, str) and i for i in columns):
            raise ValueError(
                "FeatureClusterPartitioner: text_columns must be the name of a column or a sequence of names, got"
                f" {self.text_columns!r}."
            )
        if not isinstance(self.text_columns, str):
            object.__setattr__(self, "text_columns", tuple(self.text_columns))  # a list is mutable
        if not callable(self.embedder) and not isinstance(self.embedder, str):
            raise ValueError(
                "FeatureClusterPartitioner: embedder must be the name or path of a sentence encoder, or a function"
                f" from a list of texts to an array, got {self.embedder!r}."
            )

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        first = next(iter(splits.values()))
        if self.num_clusters > len(first):
            raise ValueError(
                f"FeatureClusterPartitioner: num_clusters={self.num_clusters}, but the first split has {len(first)}"
                f" rows. Set num_clusters to at most {len(first)}, or pass more rows."
            )
        # Check all splits first, because embedding them takes a long time.
        for position, (name, dataset) in enumerate(splits.items()):
            check_enough_rows(self, len(dataset), self.num_clients, 1 if position else self.min_size, name)
            check_columns(dataset.column_names, self._columns)
        k_means = self._k_means()
        embed = self._load_embedder()
        clusters: dict[str, np.ndarray] = {}
        for name, dataset in splits.items():
            embeddings = self._embed(dataset, embed)
            predict = k_means.predict if clusters else k_means.fit_predict
            clusters[name] = predict(embeddings).astype(np.int64)
        by_label = LabelDirichletPartitioner(
            num_clients=self.num_clients,
            alpha=self.alpha,
            quantity_beta=self.quantity_beta,
            min_size=self.min_size,
            seed=self.seed,
        )
        return by_label.partition_labels(clusters, self.num_clusters)

    @property
    def _columns(self) -> list[str]:
        return [self.text_columns] if isinstance(self.text_columns, str) else list(self.text_columns)

    def _k_means(self) -> Any:
        require_packages("FeatureClusterPartitioner", {"embeddings": {"sklearn": "scikit-learn"}})
        from sklearn.cluster import KMeans

        # scikit-learn accepts seeds of at most 32 bits.
        seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        return KMeans(n_clusters=self.num_clusters, n_init=1, random_state=seed)

    def _load_embedder(self) -> Embedder:
        if not isinstance(self.embedder, str):
            return self.embedder
        user = f"The embedder {self.embedder!r}, which a function from a list of texts to an array can replace,"
        require_packages(user, {"embeddings": {"sentence_transformers": "sentence-transformers"}})
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(self.embedder)
        return lambda texts: encoder.encode(texts, show_progress_bar=False, convert_to_numpy=True)

    def _embed(self, dataset: Dataset, embed: Embedder) -> np.ndarray:
        """Return the embeddings of all examples, of shape `(num_rows, num_features)`, `float32`."""
        embeddings = np.empty((0, 0), dtype=np.float32)
        begin = 0
        for batch in dataset.select_columns(self._columns).with_format(None).iter(self.batch_size):
            texts = self._texts(batch, begin)
            embedded = np.asarray(embed(texts), dtype=np.float32)
            num_features = embeddings.shape[1] if begin else embedded.shape[-1]
            if embedded.shape != (len(texts), num_features):
                raise ValueError(
                    f"FeatureClusterPartitioner: the embedder returned shape {embedded.shape} for {len(texts)} texts."
                    " It must return one vector for each text, and all vectors must have the same length."
                )
            if not np.isfinite(embedded).all():
                row = begin + int(np.flatnonzero(~np.isfinite(embedded).all(axis=1))[0])
                raise ValueError(
                    f"FeatureClusterPartitioner: the embedding of row {row} is not finite. Check the embedder."
                )
            if begin == 0:
                embeddings = np.empty((len(dataset), num_features), dtype=np.float32)
            embeddings[begin : begin + len(texts)] = embedded
            begin += len(texts)
        return embeddings

    def _texts(self, batch: Mapping[str, list], first_row: int) -> list[str]:
        parts = []
        for column in self._columns:
            texts = [" ".join(value) if _is_token_list(value) else value for value in batch[column]]
            for offset, text in enumerate(texts):
                if not isinstance(text, str):
                    raise ValueError(
                        f"FeatureClusterPartitioner: the column {column!r} of row {first_row + offset} contains"
                        f" {text!r}, not a text. Drop such rows, or name a column of strings or of lists of strings."
                    )
            parts.append(texts)
        return ["\n".join(texts) for texts in zip(*parts, strict=True)]


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(token, str) for token in value)
