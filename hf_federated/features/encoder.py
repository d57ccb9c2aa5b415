"""Frozen encoders whose features are computed once and kept on disk.

The features of a text are computed in float32, in evaluation mode, so dropout of the frozen part is off. They are the
same for every batch: a text is padded to a length that depends only on the text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, DefaultDataCollator, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..tasks.text_encoder import TextEncoder
from ..utils.arguments import require_one_of
from ..utils.file_hash import sha256_of_unchanged_file
from ..utils.remote_code import code_arguments, load_repository_tokenizer
from .pooling import POOLINGS, pool
from .store import FeatureStore, cache_folder, row_key


# Change the number if features are computed in another way, so that older stores are not read.
_VERSION = 1
# Texts are padded to a multiple of this number of tokens.
_MULTIPLE = 8
_BATCH_SIZE = 32
# Entries of a config that do not change the model.
_VOLATILE = ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype")
# The file that `save_pretrained` writes.
ENCODER_FILE = "feature_encoder.json"


class CachedEncoder(TextEncoder):
    """
    Base class of encoders whose features are kept in a [`FeatureStore`].

    A subclass defines `digest`, `feature_size` and `compute`. [`FrozenEncoder`] and [`FrozenLayers`] run a pretrained
    model, [`TfidfEncoder`] needs no model.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.features import CachedEncoder

    >>> class LengthEncoder(CachedEncoder):
    ...     digest, feature_size = "length of texts", 1
    ...     def compute(self, rows, max_length):
    ...         return [np.array([[len(text)]]) for (text,) in rows]

    >>> LengthEncoder()(["fine", "a film"])["features"].tolist()
    [[4.0], [6.0]]

    ```
    """

    # NumPy type of the features on disk.
    dtype: str = "float32"

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Number of values of a feature vector."""

    @abstractmethod
    def compute(self, rows: Sequence[tuple[str, ...]], max_length: int | None) -> list[np.ndarray]:
        """
        Compute the features of rows that are not in the store.

        Args:
            rows (`Sequence[tuple[str, ...]]`): The text of each row, or the two texts.
            max_length (`int`, *optional*): Maximum number of tokens.

        Returns:
            `list[np.ndarray]`: An array of shape `(vectors, feature_size)` for each row.
        """

    def fetch(self, texts: Sequence[Sequence[str]], max_length: int | None = None) -> list[np.ndarray]:
        """
        Return the features of rows from the store, and compute the missing ones.

        Args:
            texts (`Sequence[Sequence[str]]`): One sequence of texts, or two for text pairs.
            max_length (`int`, *optional*): Maximum number of tokens.

        Returns:
            `list[np.ndarray]`: An array of shape `(vectors, feature_size)` for each row.
        """
        rows = list(zip(*texts, strict=True))

        def compute(missing: list[int]) -> list[np.ndarray]:
            return self.compute([rows[number] for number in missing], max_length)

        return _store(self, max_length).fetch([row_key(row) for row in rows], compute)

    def __call__(
        self,
        *texts: Sequence[str],
        truncation: bool = True,
        max_length: int | None = None,
        return_attention_mask: bool = True,
    ) -> dict[str, Any]:
        """Return the columns with the features of each row. See [`TextEncoder`]."""
        return self.to_columns(self.fetch(texts, max_length))

    def to_columns(self, features: list[np.ndarray]) -> dict[str, Any]:
        """
        The columns of an encoded dataset: by default `features`, an array of shape `(rows, feature_size)`.

        Args:
            features (`list[np.ndarray]`): An array of shape `(vectors, feature_size)` for each row.
        """
        return {"features": np.concatenate(features) if features else np.empty((0, self.feature_size), self.dtype)}

    def data_collator(self) -> Any:
        """Stack features to shape `(batch, feature_size)`."""
        return DefaultDataCollator()

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the encoder, which `save_pretrained` writes."""
        return {}

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """
        Write the name of the encoder and its arguments, but no weights.

        Args:
            save_directory (`str` or `os.PathLike`): The folder. It is created.
            kwargs (*optional*): Arguments that `Trainer` passes. They are not used.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"encoder": type(self).__name__, **self.to_dict(), "digest": self.digest}
        (folder / ENCODER_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Open stores by folder. All encoders of a process with the same digest share the store.
_STORES: dict[Path, FeatureStore] = {}


def _store(encoder: CachedEncoder, max_length: int | None) -> FeatureStore:
    name = hash_of("features", _VERSION, encoder.digest, max_length)
    folder = cache_folder() / name
    if folder not in _STORES:
        _STORES[folder] = FeatureStore(folder, encoder.feature_size, encoder.dtype)
    return _STORES[folder]


def hash_of(*settings: Any) -> str:
    """Return a hash of values that JSON can represent, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


class PretrainedEncoder(CachedEncoder):
    """
    Base class of the encoders that run a pretrained model of `transformers`.

    The weights are hashed, and they are loaded only if a feature is missing. The digest depends on the weights, the
    config, the tokenizer and the arguments, and not on the path of the model.

    Args:
        name_or_path (`str`): Hub id or folder of the model and its tokenizer. The weights must be safetensors files.
        revision (`str`, *optional*): Branch, tag or commit of the model on the Hub.
        kwargs (*optional*): Further arguments of `from_pretrained`, such as `num_hidden_layers`.

    Raises:
        ValueError: If the model has no safetensors file.
    """

    def __init__(self, name_or_path: str, revision: str | None = None, **kwargs: Any) -> None:
        self.name_or_path = str(name_or_path)
        self.revision = revision
        self.kwargs = kwargs

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the encoder, which `save_pretrained` writes."""
        return {"name_or_path": self.name_or_path, "revision": self.revision, **self.kwargs}

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return load_repository_tokenizer(self.name_or_path, revision=self.revision, **code_arguments(self.kwargs))

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """The config of the model."""
        return AutoConfig.from_pretrained(self.name_or_path, revision=self.revision, **self.model_kwargs)

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`, in addition to the revision."""
        return self.kwargs

    @functools.cached_property
    def model(self) -> Any:
        """The frozen model in float32 and evaluation mode, on the GPU if there is one. The first access loads it."""
        model: Any = AutoModel.from_pretrained(
            self.name_or_path, revision=self.revision, use_safetensors=True, dtype=torch.float32, **self.model_kwargs
        )
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        return model.requires_grad_(False).eval().to("cuda" if torch.cuda.is_available() else "cpu")

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the weights, the config, the tokenizer and the arguments."""
        config = {key: value for key, value in self.config.to_dict().items() if key not in _VOLATILE}
        weights = _hash_weights(self.name_or_path, self.revision)
        return hash_of(type(self).__name__, config, weights, _tokenizer_settings(self.tokenizer), self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments that change the features of a model."""
        return {}

    @property
    def feature_size(self) -> int:
        """The hidden size of the model."""
        return int(self.config.hidden_size)

    @abstractmethod
    def features_of(self, hidden: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """
        Convert hidden states to features.

        Args:
            hidden (`torch.Tensor` of shape `(batch, length, hidden_size)`): The model's last hidden states.
            mask (`torch.Tensor` of shape `(batch, length)`): The attention mask.

        Returns:
            `list[torch.Tensor]`: A tensor of shape `(vectors, hidden_size)` for each text.
        """

    def compute(self, rows: Sequence[tuple[str, ...]], max_length: int | None) -> list[np.ndarray]:
        """Run the model on texts, see [`CachedEncoder`]. Texts of similar length share a batch."""
        columns = [list(column) for column in zip(*rows, strict=True)]
        encoded = self.tokenizer(*columns, truncation=True, max_length=max_length, return_attention_mask=True)
        lengths = [-(-len(ids) // _MULTIPLE) * _MULTIPLE for ids in encoded["input_ids"]]
        positions = getattr(self.config, "max_position_embeddings", None)
        order = sorted(range(len(rows)), key=lambda row: lengths[row])
        found: dict[int, np.ndarray] = {}
        while order:
            length = lengths[order[0]]
            batch = [row for row in order[:_BATCH_SIZE] if lengths[row] == length]
            del order[: len(batch)]
            examples = [{name: encoded[name][row] for name in encoded} for row in batch]
            # A model with learned positions has no position for the padding beyond its last one.
            width = length if positions is None else max(min(length, positions), max(map(_length, examples)))
            inputs = self.tokenizer.pad(examples, padding="max_length", max_length=width, return_tensors="pt")
            found |= zip(batch, self._run(inputs), strict=True)
        return [found[row] for row in range(len(rows))]

    @torch.inference_mode()
    def _run(self, inputs: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
        inputs = {name: value.to(self.model.device) for name, value in inputs.items()}
        hidden = self.model(**inputs)[0]
        return [each.cpu().numpy() for each in self.features_of(hidden, inputs["attention_mask"])]


def _length(example: Mapping[str, Any]) -> int:
    return len(example["input_ids"])


class FrozenEncoder(PretrainedEncoder):
    """
    A frozen pretrained model that gives one feature vector per text.

    Use it for linear probing over many clients: the model runs once for each text, and the clients train a
    [`FeatureClassifier`] on the features. One vector of a model with 384 hidden units takes 1.5 kB on disk.

    Args:
        name_or_path (`str`): Hub id or folder of the model and its tokenizer. The weights must be safetensors files.
        revision (`str`, *optional*): Branch, tag or commit of the model on the Hub.
        pooling (`str`, *optional*, defaults to `"mean"`):
            `"mean"` for the mean of the hidden states over all tokens, as in [Sentence-BERT: Sentence Embeddings using
            Siamese BERT-Networks](https://arxiv.org/abs/1908.10084), or `"cls"` for the first hidden state.
        kwargs (*optional*): Further arguments of `from_pretrained`, such as `num_hidden_layers`.

    Raises:
        ValueError: If `pooling` is unknown, or if the model has no safetensors file.

    Example:

    ```python
    >>> from hf_federated.features import FrozenEncoder

    >>> encoder = FrozenEncoder("sentence-transformers/all-MiniLM-L6-v2", pooling="mean")  # loads nothing yet
    >>> encoder.pooling
    'mean'

    ```
    """

    def __init__(
        self,
        name_or_path: str,
        revision: str | None = None,
        pooling: Literal["mean", "cls"] = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(name_or_path, revision, **kwargs)
        require_one_of("pooling", pooling, POOLINGS)
        self.pooling = pooling

    @property
    def settings(self) -> dict[str, Any]:
        """The pooling."""
        return {"pooling": self.pooling}

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the encoder, which `save_pretrained` writes."""
        return {**super().to_dict(), **self.settings}

    def features_of(self, hidden: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """One vector of shape `(1, hidden_size)` per text, see [`PretrainedEncoder`]."""
        return list(pool(hidden, mask, self.pooling).unsqueeze(1))


def _tokenizer_settings(tokenizer: Any) -> list[Any]:
    """The vocabulary and the settings of a tokenizer, without its path and its last truncation and padding."""
    content: Any = sorted(tokenizer.get_vocab().items())
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    sides = tokenizer.padding_side, tokenizer.truncation_side
    limits = tokenizer.model_max_length, tokenizer.model_input_names
    return [type(tokenizer).__name__, content, tokenizer.special_tokens_map, sides, limits]


def _hash_weights(name: str, revision: str | None) -> dict[str, str]:
    """Return the SHA-256 of each safetensors file of a model, which is downloaded if it is on the Hub."""

    def find(file_name: str) -> str | None:
        return cached_file(name, file_name, revision=revision, _raise_exceptions_for_missing_entries=False)

    index = find(SAFE_WEIGHTS_INDEX_NAME)
    names = [SAFE_WEIGHTS_NAME]
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    hashes = {}
    for file_name in names:
        path = find(file_name)
        if path is None:
            raise ValueError(
                f"{name} has no file {file_name}. Cached features need the weights as safetensors files: save the"
                " model with save_pretrained."
            )
        hashes[file_name] = sha256_of_unchanged_file(path)
    return hashes
