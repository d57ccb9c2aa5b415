"""Clients that differ in what their texts are about (FedNLP, Lin et al. 2022, section 3.2).

For tasks without classes: texts are embedded and clustered, and the cluster takes the place of the label. A cluster
id belongs to the row it was predicted for; the published code joins them in the order "0", "1", "10", …, which
scrambles the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset

from ..column_values import check_columns
from .base import (
    Partition,
    Partitioner,
    check_column_name,
    check_concentration,
    check_enough_rows,
    check_splits,
    check_whole_number,
)
from .label_dirichlet import LabelDirichletPartitioner


Embedder: TypeAlias = Callable[[list[str]], np.ndarray]


@dataclass(frozen=True)
class FeatureClusterPartitioner(Partitioner):
    """
    Gives every client shares of its own of clusters of similar texts.

    Texts are embedded, the embeddings are clustered by K-means, and rows are given away as
    [`LabelDirichletPartitioner`] does it, with the cluster as label. Needs the extra `embeddings`. Embeddings of all
    rows of a split are held in memory, as `float32`. The clients are named `"0"`, `"1"`, …

    Clusters are fitted on the first split; rows of the others belong to the nearest cluster.

    Args:
        num_clients (`int`):
            Number of clients, at least 1.
        text_columns (`str` or `Sequence[str]`):
            What a row is about: columns of strings, or of lists of strings (tokens), which are joined by spaces.
            Several columns are joined by a line break, such as question and answer.
        num_clusters (`int`, *optional*, defaults to `10`):
            Number of clusters, at least 1 and at most the number of rows of the first split.
        embedder (`str` or `Callable[[list[str]], np.ndarray]`, *optional*):
            Name or path of a model that `sentence_transformers` loads (by default
            `"sentence-transformers/all-MiniLM-L6-v2"`), or a function from texts to an array of shape
            `(num_texts, num_features)`. A function is recorded by its name.
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration, as in [`LabelDirichletPartitioner`].
        quantity_beta (`float`, *optional*):
            Lets sizes differ too, as in [`LabelDirichletPartitioner`].
        min_size (`int`, *optional*, defaults to `1`):
            Rows that every client has at least.
        batch_size (`int`, *optional*, defaults to `256`):
            Rows that are read and embedded at a time.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the clusters and of the draws. The global generators are neither read nor changed.

    Raises:
        `ValueError`: If there are too few rows, a column does not exist, a text is missing, or embeddings are not
            finite or have another shape.
        `ImportError`: If scikit-learn, or for a name `sentence_transformers`, is not installed.

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
        for name in ("num_clients", "num_clusters", "min_size", "batch_size"):
            check_whole_number(self, name, 1)
        check_whole_number(self, "seed", 0)
        check_concentration(self, "alpha")
        if self.quantity_beta is not None:
            check_concentration(self, "quantity_beta")
        if isinstance(self.text_columns, str):
            check_column_name(self, "text_columns")
        else:
            sequence = isinstance(self.text_columns, Sequence)
            if not sequence or not self.text_columns or not all(isinstance(i, str) and i for i in self.text_columns):
                raise ValueError(
                    "FeatureClusterPartitioner: text_columns must be the name of a column or several names, got"
                    f" {self.text_columns!r}."
                )
            object.__setattr__(self, "text_columns", tuple(self.text_columns))  # a list could change later
        if not callable(self.embedder) and not isinstance(self.embedder, str):
            raise ValueError(
                "FeatureClusterPartitioner: embedder must be the name or path of a sentence encoder, or a function"
                f" from a list of texts to an array, got {self.embedder!r}."
            )

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        first = next(iter(splits.values()))
        if self.num_clusters > len(first):
            raise ValueError(
                f"FeatureClusterPartitioner: {len(first)} rows cannot form {self.num_clusters} clusters. Lower"
                " num_clusters, or pass more rows."
            )
        for position, (name, dataset) in enumerate(splits.items()):  # before the embedding, which takes long
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
        try:
            from sklearn.cluster import KMeans
        except ImportError as error:
            raise ImportError(
                "FeatureClusterPartitioner needs scikit-learn: pip install 'hf-federated[embeddings]'."
            ) from error
        # scikit-learn takes 32 bits
        seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        return KMeans(n_clusters=self.num_clusters, n_init=1, random_state=seed)

    def _load_embedder(self) -> Embedder:
        if not isinstance(self.embedder, str):
            return self.embedder
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(
                f"FeatureClusterPartitioner: the embedder {self.embedder!r} needs sentence-transformers: pip install"
                " 'hf-federated[embeddings]'. Or pass a function from a list of texts to an array."
            ) from error
        encoder = SentenceTransformer(self.embedder)
        return lambda texts: encoder.encode(texts, show_progress_bar=False, convert_to_numpy=True)

    def _embed(self, dataset: Dataset, embed: Embedder) -> np.ndarray:
        """Embeddings of all rows, of shape `(num_rows, num_features)`, `float32`."""
        embeddings: np.ndarray | None = None
        begin = 0
        for batch in dataset.select_columns(self._columns).with_format(None).iter(self.batch_size):
            texts = self._texts(batch, begin)
            embedded = np.asarray(embed(texts), dtype=np.float32)
            num_features = embedded.shape[-1] if embeddings is None else embeddings.shape[1]
            if embedded.shape != (len(texts), num_features):
                raise ValueError(
                    f"FeatureClusterPartitioner: the embedder returned shape {embedded.shape} for {len(texts)} texts;"
                    " it has to return one vector for each text, all of one length."
                )
            if not np.isfinite(embedded).all():
                row = begin + int(np.flatnonzero(~np.isfinite(embedded).all(axis=1))[0])
                raise ValueError(f"FeatureClusterPartitioner: the embedding of row {row} is not finite.")
            if embeddings is None:
                embeddings = np.empty((len(dataset), num_features), dtype=np.float32)
            embeddings[begin : begin + len(texts)] = embedded
            begin += len(texts)
        assert embeddings is not None, "a split has rows, which was checked"
        return embeddings

    def _texts(self, batch: Mapping[str, list], first_row: int) -> list[str]:
        parts = []
        for column in self._columns:
            texts = [" ".join(value) if _is_tokens(value) else value for value in batch[column]]
            for offset, text in enumerate(texts):
                if not isinstance(text, str):
                    raise ValueError(
                        f"FeatureClusterPartitioner: row {first_row + offset} has no text in the column {column!r}"
                        f" but {text!r}. Drop such rows first, or name a column of strings or of lists of strings."
                    )
            parts.append(texts)
        return ["\n".join(texts) for texts in zip(*parts, strict=True)]


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(token, str) for token in value)
