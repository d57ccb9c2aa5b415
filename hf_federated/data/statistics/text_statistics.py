"""Text statistics of clients: vocabulary overlap, and a 2-D map of TF-IDF features.

Both functions need scikit-learn (extra `metrics`), which is imported when a function is called. Both read a sample of
the texts of each client. The sample depends only on the seed, the client id and the number of examples of the client.
Other clients do not change it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ...utils.optional_packages import require_packages
from ..client_mapping import ClientMapping
from .label_statistics import check_has_columns


def vocabulary_overlap(
    clients: ClientMapping, text_column: str = "text", rows_per_client: int | None = 100, seed: int = 0
) -> np.ndarray:
    """
    Compute the Jaccard index of the vocabularies of each pair of clients, the share of words that both clients use.

    The index is `|A ∩ B| / |A ∪ B|`, where the vocabulary of a client is the set of its words. Words are defined as in
    `CountVectorizer` of scikit-learn: lowercase sequences of two or more letters, digits or underscores. A vocabulary
    grows with the number of texts, so that clients of different sizes overlap less. Therefore the same number of texts
    is read from each client, if the client has them. With many clients, compare a selection of them:
    `clients.select_clients(...)`.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        text_column (`str`, *optional*, defaults to `"text"`):
            The column with the texts.
        rows_per_client (`int`, *optional*, defaults to 100):
            Number of texts of a client to read, drawn without replacement. `None` reads all texts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.

    Returns:
        `np.ndarray` of shape `(num_clients, num_clients)`, `float64`: A symmetric matrix with ones on the diagonal.
        The overlap of two clients without words is 1.

    Raises:
        `ImportError`: If scikit-learn is not installed.
        `ValueError`: If the text column does not exist, an example has no text, or no client has a word.
        `TypeError`: If a client is an `IterableDataset`, or if the column does not hold strings.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import FederatedDataset, vocabulary_overlap
    >>> clients = FederatedDataset.from_dict({
    ...     "cars": Dataset.from_dict({"text": ["a fast car", "the engine"]}),
    ...     "bikes": Dataset.from_dict({"text": ["a fast bike"]}),
    ... })
    >>> vocabulary_overlap(clients).tolist()  # they share one of the words fast, car, the, engine, bike
    [[1.0, 0.2], [0.2, 1.0]]

    ```
    """
    require_packages("vocabulary_overlap", {"metrics": {"sklearn": "scikit-learn"}})
    from sklearn.feature_extraction.text import CountVectorizer

    check_has_columns(clients, [text_column])
    # All texts of a client are one document. The line breaks keep words of adjacent texts apart.
    documents = ["\n".join(texts) for texts in sampled_texts(clients, text_column, rows_per_client, seed)]
    vectorizer = CountVectorizer(binary=True, dtype=np.int64)
    if _count_distinct_words(vectorizer.build_analyzer(), documents, max_count=1) == 0:
        raise ValueError(f"vocabulary_overlap: no client has a word in the column {text_column!r}. Check the column.")
    has_word = vectorizer.fit_transform(documents)  # sparse, (clients, words)
    common = (has_word @ has_word.T).toarray()
    sizes = common.diagonal()
    union = sizes[:, None] + sizes[None, :] - common
    return np.where(union > 0, common / np.maximum(union, 1), 1.0)


def text_map(
    clients: ClientMapping,
    text_column: str = "text",
    rows_per_client: int | None = 100,
    max_features: int = 5000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Compute 2-D coordinates of texts: TF-IDF of the most frequent words, reduced by principal component analysis.

    The method is from figure 1 of AdaFD, section IV: the overlap of the clients' points shows how similar their
    language is. Words are defined as in `TfidfVectorizer` of scikit-learn. The principal components are those of the
    centered matrix.

    Args:
        clients ([`FederatedDataset`]):
            The clients.
        text_column (`str`, *optional*, defaults to `"text"`):
            The column with the texts.
        rows_per_client (`int`, *optional*, defaults to 100):
            Number of texts of a client to include, drawn without replacement. `None` includes all texts.
        max_features (`int`, *optional*, defaults to 5000):
            Maximum number of words to count. The most frequent words of all sampled texts are counted.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw and of the iterative solver for the principal components.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: The coordinates of shape `(num_texts, 2)`, `float64`, and the position of the
        client of each text, of shape `(num_texts,)`.

    Raises:
        `ImportError`: If scikit-learn is not installed.
        `ValueError`: If the text column does not exist, an example has no text, there are fewer than three texts or
            three words, or all texts have the same words.
        `TypeError`: If a client is an `IterableDataset`, or if the column does not hold strings.

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
    require_packages("text_map", {"metrics": {"sklearn": "scikit-learn"}})
    from sklearn.decomposition import PCA
    from sklearn.feature_extraction.text import TfidfVectorizer

    check_has_columns(clients, [text_column])
    texts_of_clients = list(sampled_texts(clients, text_column, rows_per_client, seed))
    texts = list(chain.from_iterable(texts_of_clients))
    vectorizer = TfidfVectorizer(max_features=max_features)
    num_words = min(_count_distinct_words(vectorizer.build_analyzer(), texts, max_count=3), max_features)
    if min(len(texts), num_words) < 3:
        raise ValueError(
            f"text_map needs at least three texts and three words, got {len(texts)} texts and {num_words} words in the"
            f" column {text_column!r}."
        )
    features = vectorizer.fit_transform(texts)
    if (features.max(axis=0) != features.min(axis=0)).nnz == 0:
        raise ValueError(f"text_map: all {len(texts)} texts have the same words, so that there is only one point.")
    # The ARPACK solver centers a sparse matrix without making it dense.
    coordinates = PCA(n_components=2, svd_solver="arpack", random_state=seed).fit_transform(features)
    return coordinates, np.repeat(np.arange(len(clients)), list(map(len, texts_of_clients)))


def sampled_texts(
    clients: ClientMapping, text_column: str, rows_per_client: int | None, seed: int
) -> Iterator[list[str]]:
    """
    Yield a sample of the texts of each client, in the order of its rows. See [`vocabulary_overlap`] for the arguments
    and errors.
    """
    if rows_per_client is not None and (isinstance(rows_per_client, bool) or rows_per_client < 1):
        raise ValueError(f"rows_per_client must be an integer of at least 1, or None, got {rows_per_client!r}.")
    for client_id in clients:
        dataset: Dataset = clients[client_id].select_columns(text_column).with_format("arrow")
        num_rows = len(dataset)
        rows: np.ndarray | slice = slice(None)
        if rows_per_client is not None and num_rows > rows_per_client:
            generator = np.random.default_rng([seed, zlib.crc32(client_id.encode())])
            rows = np.sort(generator.choice(num_rows, rows_per_client, replace=False))
        texts: pa.ChunkedArray = dataset[rows].column(text_column)
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise TypeError(f"The column {text_column!r} has the type {texts.type}. Use a column of strings.")
        if texts.null_count:
            raise ValueError(
                f"Client {client_id!r} has a row without a text in the column {text_column!r}. Drop such rows first:"
                f" dataset.filter(lambda row: row[{text_column!r}] is not None)."
            )
        yield texts.to_pylist()


def _count_distinct_words(analyzer: Callable[[str], list[str]], texts: list[str], max_count: int) -> int:
    """Count the distinct words of the texts. Stop at `max_count`."""
    words: set[str] = set()
    for text in texts:
        words.update(analyzer(text))
        if len(words) >= max_count:
            break
    return len(words)
