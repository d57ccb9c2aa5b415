"""How unlike clients are in their words: vocabulary overlap and a 2-D map of TF-IDF features.

Needs scikit-learn (extra `metrics`), which is imported when a function is called. Both read a sample of each client's
rows, which depends on the seed, the client's id and its number of rows only: other clients do not change it.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ..federated_dataset import FederatedDataset
from .label_statistics import check_has_columns


def vocabulary_overlap(
    clients: FederatedDataset, text_column: str = "text", rows_per_client: int | None = 100, seed: int = 0
) -> np.ndarray:
    """
    The share of words that two clients have in common: the Jaccard index of their vocabularies.

    `|A ∩ B| / |A ∪ B|`, where a client's vocabulary is the set of its words. Words are those of scikit-learn's
    `CountVectorizer`: lower case, two or more letters, digits or underscores in a row. A vocabulary grows with the
    number of rows, and clients of unequal size overlap less for that alone; therefore as many rows of each client are
    read, where it has them. Of many clients, compare a few: `clients.select_clients(...)`.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        text_column (`str`, *optional*, defaults to `"text"`):
            The column with the texts.
        rows_per_client (`int`, *optional*, defaults to 100):
            How many rows of a client to read, drawn without replacement; `None` for all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.

    Returns:
        `np.ndarray` of shape `(num_clients, num_clients)`, `float64`: symmetric, with ones on the diagonal. Two
        clients without any word overlap by 1.

    Raises:
        `ImportError`: If scikit-learn is not installed.
        `ValueError`: If there is no such column, a row has no text, or no client has a word.
        `TypeError`: If a client is an `IterableDataset`, or the column holds something else than strings.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, vocabulary_overlap
    >>> clients = FederatedDataset.from_dict({
    ...     "cars": Dataset.from_dict({"text": ["a fast car", "the engine"]}),
    ...     "bikes": Dataset.from_dict({"text": ["a fast bike"]}),
    ... })
    >>> vocabulary_overlap(clients).tolist()  # of fast, car, the, engine, bike they share one
    [[1.0, 0.2], [0.2, 1.0]]

    ```
    """
    _require_scikit_learn("vocabulary_overlap")
    from sklearn.feature_extraction.text import CountVectorizer

    check_has_columns(clients, [text_column])
    # A client is one document. No word reaches over a line's end.
    documents = ["\n".join(texts) for texts in sampled_texts(clients, text_column, rows_per_client, seed)]
    vectorizer = CountVectorizer(binary=True, dtype=np.int64)
    if _count_words(vectorizer.build_analyzer(), documents, enough=1) == 0:
        raise ValueError(f"vocabulary_overlap: no client has a word in the column {text_column!r}.")
    has_word = vectorizer.fit_transform(documents)  # sparse, (clients, words)
    common = (has_word @ has_word.T).toarray()
    sizes = common.diagonal()
    union = sizes[:, None] + sizes[None, :] - common
    return np.where(union > 0, common / np.maximum(union, 1), 1.0)


def text_map(
    clients: FederatedDataset,
    text_column: str = "text",
    rows_per_client: int | None = 100,
    max_features: int = 5000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Places texts in a plane by their words: TF-IDF of the most frequent words, reduced by principal components.

    As in figure 1 of AdaFD, section IV: the overlap of the clients' points shows how similar their language is. The
    words are those of scikit-learn's `TfidfVectorizer`; the components are those of the centred matrix.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        text_column (`str`, *optional*, defaults to `"text"`):
            The column with the texts.
        rows_per_client (`int`, *optional*, defaults to 100):
            How many rows of a client to place, drawn without replacement; `None` for all.
        max_features (`int`, *optional*, defaults to 5000):
            How many words to count: the most frequent over all rows that were drawn.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw and of the iteration for the components.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: coordinates of shape `(num_texts, 2)`, `float64`, and for each text the
        position of its client, of shape `(num_texts,)`.

    Raises:
        `ImportError`: If scikit-learn is not installed.
        `ValueError`: If there is no such column, a row has no text, there are fewer than three texts or words,
            or all texts have the same.
        `TypeError`: If a client is an `IterableDataset`, or the column holds something else than strings.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset
    >>> from hf_federated.data.statistics.text_statistics import text_map
    >>> texts = ["fast car", "car engine", "fast bike", "bike chain"]
    >>> clients = FederatedDataset.from_column(Dataset.from_dict({"shop": [0, 0, 1, 1], "text": texts}), "shop")
    >>> coordinates, owners = text_map(clients)
    >>> coordinates.shape, owners.tolist()
    ((4, 2), [0, 0, 1, 1])

    ```
    """
    _require_scikit_learn("text_map")
    from sklearn.decomposition import PCA
    from sklearn.feature_extraction.text import TfidfVectorizer

    check_has_columns(clients, [text_column])
    texts: list[str] = []
    sizes: list[int] = []
    for of_client in sampled_texts(clients, text_column, rows_per_client, seed):
        texts.extend(of_client)
        sizes.append(len(of_client))
    vectorizer = TfidfVectorizer(max_features=max_features)
    num_words = min(_count_words(vectorizer.build_analyzer(), texts, enough=3), max_features)
    if min(len(texts), num_words) < 3:
        raise ValueError(
            f"text_map needs at least three texts and three words to spread over a plane, got {len(texts)} texts and"
            f" {num_words} words in the column {text_column!r}."
        )
    features = vectorizer.fit_transform(texts)
    if (features.max(axis=0) != features.min(axis=0)).nnz == 0:
        raise ValueError(f"text_map: all {len(texts)} texts have the same words, so that they are one point.")
    # ARPACK centres a sparse matrix without filling it.
    coordinates = PCA(n_components=2, svd_solver="arpack", random_state=seed).fit_transform(features)
    return coordinates, np.repeat(np.arange(len(clients)), sizes)


def sampled_texts(
    clients: FederatedDataset, text_column: str, rows_per_client: int | None, seed: int
) -> Iterator[list[str]]:
    """
    Some texts of each client, in the order of its rows. See [`vocabulary_overlap`] for arguments and errors.
    """
    if rows_per_client is not None and (isinstance(rows_per_client, bool) or rows_per_client < 1):
        raise ValueError(f"rows_per_client must be a whole number from 1, or None for all, got {rows_per_client!r}.")
    for client_id in clients:
        dataset: Dataset = clients[client_id].select_columns(text_column).with_format("arrow")
        num_rows = len(dataset)
        rows: np.ndarray | slice = slice(None)
        if rows_per_client is not None and num_rows > rows_per_client:
            generator = np.random.default_rng([seed, zlib.crc32(client_id.encode())])
            rows = np.sort(generator.choice(num_rows, rows_per_client, replace=False))
        texts: pa.ChunkedArray = dataset[rows].column(text_column)
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise TypeError(f"The column {text_column!r} has the type {texts.type}, expected strings.")
        if texts.null_count:
            raise ValueError(
                f"Client {client_id!r} has a row without a text in the column {text_column!r}. Drop such rows first:"
                f" dataset.filter(lambda row: row[{text_column!r}] is not None)."
            )
        yield texts.to_pylist()


def _count_words(words_of: Callable[[str], list[str]], texts: list[str], enough: int) -> int:
    """Different words, counted until there are enough."""
    words: set[str] = set()
    for text in texts:
        words.update(words_of(text))
        if len(words) >= enough:
            break
    return len(words)


def _require_scikit_learn(function: str) -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise ImportError(f"{function} needs scikit-learn. Install it with: pip install hf-federated[metrics]")
