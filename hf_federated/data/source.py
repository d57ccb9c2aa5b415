"""Where partitioned rows come from: a data set of the Hub at a fixed commit, or rows known by their content.

A partition that is stored as row numbers is right only for exactly the rows that it was made of. `content_hash` tells
whether they are those.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi


# Rows that are hashed at a time. Part of the format: another number gives other hashes.
_BLOCK_ROWS = 10_000


@dataclass(frozen=True)
class DatasetSource:
    """
    One split of a data set on the Hub, at one commit.

    Args:
        repo_id (`str`):
            The data set's repository, `"namespace/name"`.
        split (`str`, *optional*, defaults to `"train"`):
            The split.
        config_name (`str`, *optional*):
            The configuration; the repository's default if left out.
        revision (`str`, *optional*):
            A branch, tag or commit; the main branch if left out. [`~DatasetSource.resolved`] turns it into a commit.

    Example:

    ```python
    >>> from hf_federated import FederatedDataset, IidPartitioner
    >>> from hf_federated.data import DatasetSource
    >>> source = DatasetSource("stanfordnlp/imdb", split="train")
    >>> clients = FederatedDataset.from_dataset(source, IidPartitioner(10))  # doctest: +SKIP

    ```
    """

    repo_id: str
    split: str = "train"
    config_name: str | None = None
    revision: str | None = None

    def resolved(self, token: bool | str | None = None) -> DatasetSource:
        """The same source with the commit that the revision means now."""
        commit = HfApi().dataset_info(self.repo_id, revision=self.revision, token=token).sha
        return replace(self, revision=commit)

    def load(self, token: bool | str | None = None) -> Dataset:
        """Downloads the rows (or takes them from the cache of `datasets`)."""
        return load_dataset(self.repo_id, self.config_name, split=self.split, revision=self.revision, token=token)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they stand in `partition.json`."""
        return asdict(self)


def content_hash(dataset: Dataset) -> str:
    """
    A hash of the columns, their types and all values of a data set, in order.

    It is the same for rows of the same types however they are chunked, selected or stored, on every machine. What lies
    under a null does not count. A shuffled or selected data set is gathered first, which takes most of the time.

    Args:
        dataset (`datasets.Dataset`): The rows.

    Returns:
        `str`: `"sha256:"` and 64 hex digits.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data.source import content_hash
    >>> rows = Dataset.from_dict({"text": ["a", "b", "c"]})
    >>> content_hash(rows.select([2, 1, 0]).select([2, 1, 0])) == content_hash(rows)
    True
    >>> content_hash(rows.select([1, 0, 2])) == content_hash(rows)
    False

    ```
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([_in_order(dataset.features.to_dict()), len(dataset)]).encode())
    arrow = dataset.with_format("arrow")
    for start in range(0, len(dataset), _BLOCK_ROWS):
        table = arrow[start : start + _BLOCK_ROWS].combine_chunks()
        for name in table.column_names:
            for chunk in table.column(name).chunks:
                _hash_array(digest, chunk)
    return f"sha256:{digest.hexdigest()}"


def _in_order(features: Any) -> Any:
    """Types as JSON in which the order of columns and of the fields of a struct counts, and that of keys does not."""
    if isinstance(features, list):
        return [_in_order(feature) for feature in features]
    if not isinstance(features, dict):
        return features
    if isinstance(features.get("_type"), str):
        return {key: _in_order(features[key]) for key in sorted(features)}
    return [[name, _in_order(feature)] for name, feature in features.items()]


def _hash_array(digest: Any, array: pa.Array) -> None:
    """
    Feeds an array's nulls, lengths and values to the digest; the bytes that lie under nulls and outside are not.

    What is fed says itself where it ends: first come the length and whether there are nulls.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    digest.update(struct.pack("<q?", len(array), array.null_count > 0))
    if array.null_count:
        digest.update(pc.is_null(array).cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
    kind = array.type
    if pa.types.is_null(kind):
        return
    if pa.types.is_dictionary(kind):
        _hash_array(digest, array.dictionary_decode())
    elif pa.types.is_struct(kind):
        for field in array.flatten():
            _hash_array(digest, field)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        digest.update(_integers(pc.list_value_length(array)).tobytes())
        _hash_array(digest, array.flatten())
    elif pa.types.is_fixed_size_list(kind):
        _hash_array(digest, array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        _hash_texts(digest, array.cast(pa.large_binary()))
    elif pa.types.is_large_binary(kind):
        _hash_texts(digest, array)
    elif pa.types.is_boolean(kind):
        digest.update(array.fill_null(False).cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
    elif pa.types.is_primitive(kind):
        values = array.fill_null(pa.scalar(0).cast(_storage_type(kind)).cast(kind)) if array.null_count else array
        digest.update(np.ascontiguousarray(values.view(_storage_type(kind)).to_numpy(zero_copy_only=False)).tobytes())
    else:
        digest.update(json.dumps(array.to_pylist(), default=str).encode())


def _hash_texts(digest: Any, array: pa.LargeBinaryArray) -> None:
    if array.null_count:
        array = array.fill_null(b"")
    digest.update(_integers(pc.binary_length(array)).tobytes())
    _, offsets, values = array.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64)[[array.offset, array.offset + len(array)]]
    if values is not None:
        digest.update(values[int(bounds[0]) : int(bounds[1])])


def _integers(array: pa.Array) -> np.ndarray:
    return array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _storage_type(kind: pa.DataType) -> pa.DataType:
    """The signed integer as wide as a primitive type."""
    return {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
