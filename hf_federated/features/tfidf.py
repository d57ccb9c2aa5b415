"""Features without a pretrained model: TF-IDF weights of words, reduced by a singular value decomposition."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ..utils.arguments import require_count
from .encoder import CachedEncoder, hash_of


VOCABULARY_FILE = "tfidf.json"
WEIGHTS_FILE = "tfidf.safetensors"


class TfidfEncoder(CachedEncoder):
    """
    An encoder without a pretrained model: latent semantic analysis.

    The words of a text are weighted with TF-IDF, and the weights are projected on the first singular vectors of the
    texts that the encoder was fitted on. All parties of a federation need the same encoder, so it must be fitted on
    public texts. In a simulation it can be fitted on the texts of all clients; then it is not private.

    Source: [Indexing by latent semantic analysis](https://doi.org/10.1002/(SICI)1097-4571(199009)41:6<391::AID-ASI1>3.0.CO;2-9).

    Args:
        num_components (`int`, *optional*, defaults to `256`): Number of values of a feature vector.
        max_words (`int`, *optional*, defaults to `20000`): Maximum number of words. The most frequent words are used.

    Raises:
        ValueError: If an argument is smaller than one.
        ImportError: From `fit` and from the first encoded text, if scikit-learn (extra `metrics`) is not installed.

    Example:

    ```python
    >>> from hf_federated.features import TfidfEncoder

    >>> encoder = TfidfEncoder(num_components=2).fit(["a warm film", "a cold film", "a cold plot"])
    >>> encoder(["warm plot", "unknown"])["features"].shape
    (2, 2)

    ```
    """

    def __init__(self, num_components: int = 256, max_words: int = 20000) -> None:
        require_count("num_components", num_components, 1)
        require_count("max_words", max_words, 1)
        self.num_components = num_components
        self.max_words = max_words
        self.words: list[str] = []
        self.idf = np.empty(0)
        self.components = np.empty((num_components, 0))

    def fit(self, texts: Sequence[str]) -> TfidfEncoder:
        """
        Choose the words, their weights and the singular vectors, and return this encoder.

        Args:
            texts (`Sequence[str]`): Public texts.

        Raises:
            ValueError: If the texts have too few different words, or if there are too few texts.
        """
        vectorizer = _vectorizer(max_features=self.max_words)
        decomposition = _decomposition(self.num_components)
        weights = vectorizer.fit_transform(texts)
        if min(weights.shape) <= self.num_components:
            raise ValueError(
                f"`num_components` is {self.num_components}, but there are {weights.shape[0]} texts with"
                f" {weights.shape[1]} different words. Set it to a smaller number, or fit on more texts."
            )
        decomposition.fit(weights)
        self.words = [str(word) for word in vectorizer.get_feature_names_out()]
        self.idf = np.asarray(vectorizer.idf_, dtype=np.float64)
        self.components = np.asarray(decomposition.components_, dtype=np.float64)
        vars(self).pop("digest", None)
        return self

    @property
    def is_fitted(self) -> bool:
        """Whether the encoder has words."""
        return bool(self.words)

    @property
    def feature_size(self) -> int:
        """Number of components."""
        return self.num_components

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the words, their weights and the singular vectors."""
        if not self.is_fitted:
            raise ValueError("The TfidfEncoder is not fitted. Call `fit` with public texts, or load a fitted encoder.")
        arrays = hashlib.sha256(self.idf.tobytes() + self.components.tobytes()).hexdigest()
        return hash_of(type(self).__name__, self.words, arrays)

    def compute(self, rows: Sequence[tuple[str, ...]], max_length: int | None) -> list[np.ndarray]:
        """Project the weights of the words of whole texts. `max_length` is not used. See [`CachedEncoder`]."""
        vectorizer = _vectorizer(vocabulary=self.words)
        vectorizer.idf_ = self.idf
        weights = vectorizer.transform([" ".join(row) for row in rows])
        features = weights @ self.components.T
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        return list((features / np.where(lengths > 0, lengths, 1))[:, None].astype(np.float32))

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the encoder."""
        return {"num_components": self.num_components, "max_words": self.max_words}

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """
        Write the words and their weights. Public texts can be guessed from them.

        Args:
            save_directory (`str` or `os.PathLike`): The folder. It is created.
            kwargs (*optional*): Arguments that `Trainer` passes. They are not used.
        """
        super().save_pretrained(save_directory)
        folder = Path(save_directory)
        (folder / VOCABULARY_FILE).write_text(json.dumps({**self.to_dict(), "words": self.words}), encoding="utf-8")
        save_file({"idf": self.idf, "components": np.ascontiguousarray(self.components)}, folder / WEIGHTS_FILE)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> TfidfEncoder:
        """
        Load a fitted encoder.

        Args:
            folder (`str` or `os.PathLike`): The folder of `save_pretrained`.

        Raises:
            ValueError: If the files do not belong together.
        """
        content = json.loads((Path(folder) / VOCABULARY_FILE).read_text(encoding="utf-8"))
        encoder = cls(content["num_components"], content["max_words"])
        arrays = load_file(Path(folder) / WEIGHTS_FILE)
        encoder.words, encoder.idf, encoder.components = content["words"], arrays["idf"], arrays["components"]
        shape = encoder.num_components, len(encoder.words)
        if encoder.components.shape != shape or encoder.idf.shape != shape[1:]:
            raise ValueError(
                f"{folder} has {len(encoder.words)} words and singular vectors of shape {encoder.components.shape}."
                " Save the encoder again with save_pretrained."
            )
        return encoder


def _vectorizer(**kwargs: Any) -> Any:
    """scikit-learn's vectorizer: words of two characters and more in lower case, rows of length one."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ImportError(
            "TfidfEncoder needs scikit-learn. Install it with: pip install 'hf_federated[metrics]'"
        ) from error
    return TfidfVectorizer(sublinear_tf=True, **kwargs)


def _decomposition(num_components: int) -> Any:
    from sklearn.decomposition import TruncatedSVD

    return TruncatedSVD(num_components, random_state=0)
