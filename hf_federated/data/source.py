"""The source of partitioned rows: a dataset on the Hub at a fixed commit, or local rows identified by their content.

A partition that is stored as row numbers is valid only for the rows from which it was made. [`content_hash`] verifies
that the rows are the same. [`row_hashes`] identifies single rows.
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
from datasets import Dataset, DatasetDict, load_dataset
from huggingface_hub import HfApi


# Number of rows hashed at a time. The number is part of the format: a different number gives different hashes.
_BLOCK_ROWS = 10_000


@dataclass(frozen=True)
class DatasetSource:
    """
    One split of a dataset on the Hub, at one revision.

    Partition a source instead of loaded rows if others should repeat the partition: `partition.json` then contains the
    repository and its commit.

    Args:
        repo_id (`str`):
            The dataset repository, `"namespace/name"`.
        split (`str`, *optional*, defaults to `"train"`):
            The split.
        config_name (`str`, *optional*):
            The configuration. Defaults to the default configuration of the repository.
        revision (`str`, *optional*):
            A branch, tag or commit. Defaults to the main branch. [`~DatasetSource.resolved`] resolves it to a commit.

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
        """Return the same source with `revision` resolved to its current commit."""
        commit = HfApi().dataset_info(self.repo_id, revision=self.revision, token=token).sha
        return replace(self, revision=commit)

    def load(self, token: bool | str | None = None) -> Dataset:
        """Load the rows from the Hub, or from the cache of `datasets`."""
        return load_dataset(self.repo_id, self.config_name, split=self.split, revision=self.revision, token=token)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they are stored in `partition.json`."""
        return asdict(self)


def load_source(dataset: Any, method: str, token: bool | str | None = None) -> tuple[Dataset, DatasetSource | None]:
    """
    Return the rows to partition and, for a [`DatasetSource`], the source at its resolved commit.

    Args:
        dataset (`datasets.Dataset` or [`DatasetSource`]): The argument of the user.
        method (`str`): Name of the called method, for error messages.
        token (`bool` or `str`, *optional*): The token for a `DatasetSource`.

    Raises:
        `TypeError`: If `dataset` has another type.
    """
    if isinstance(dataset, DatasetSource):
        origin = dataset.resolved(token)
        return origin.load(token), origin
    if isinstance(dataset, DatasetDict):
        raise TypeError(
            f"{method}: got a DatasetDict with the splits {list(dataset)}. Pass one split. If the entries are clients,"
            " use FederatedDataset.from_dict."
        )
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{method}: expected a datasets.Dataset, got {type(dataset).__name__}. A partition needs row numbers, so"
            " save the rows of an IterableDataset as a Dataset first."
        )
    return dataset, None


def content_hash(dataset: Dataset) -> str:
    """
    Hash the columns, their types and all values of a dataset, in order.

    The hash depends only on the types and the values. It does not depend on chunks, on earlier selections, on the file
    format or on the machine. Bytes stored under a null are not hashed. Most of the time for a shuffled or selected
    dataset is spent on collecting its rows.

    Args:
        dataset (`datasets.Dataset`): The rows.

    Returns:
        `str`: `"sha256:"` and 64 hexadecimal digits.

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


def row_hashes(dataset: Dataset) -> np.ndarray:
    """
    Hash each row of a dataset: the columns, their types and the values of the row.

    Equal rows have equal hashes. As for [`content_hash`], the hash depends only on the types and the values.

    Args:
        dataset (`datasets.Dataset`): The rows.

    Returns:
        `np.ndarray` of shape `(rows,)`, `uint64`: The first 8 bytes of a SHA-256. Among a million different rows, two
            rows have the same hash with a probability of 3e-8.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data.source import row_hashes
    >>> rows = Dataset.from_dict({"text": ["a", "b", "a"]})
    >>> first, second, third = row_hashes(rows).tolist()
    >>> first == third, first == second, row_hashes(rows.select([1])).tolist() == [second]
    (True, False, True)

    ```
    """
    prefix = hashlib.sha256(json.dumps(_in_order(dataset.features.to_dict())).encode())
    arrow = dataset.with_format("arrow")
    hashes = np.empty(len(dataset), dtype=np.uint64)
    for start in range(0, len(dataset), _BLOCK_ROWS):
        rows = arrow[start : start + _BLOCK_ROWS].to_pylist()
        for position, row in enumerate(rows, start):
            digest = prefix.copy()
            digest.update(json.dumps(list(row.values()), default=_as_text).encode())
            hashes[position] = int.from_bytes(digest.digest()[:8], "little")
    return hashes


def _as_text(value: Any) -> str:
    """Text for a value that JSON does not have: bytes, dates and decimals."""
    return value.hex() if isinstance(value, bytes) else str(value)


def _in_order(features: Any) -> Any:
    """Encode features as JSON that keeps the order of columns and struct fields, and sorts the keys of a feature."""
    if isinstance(features, list):
        return [_in_order(feature) for feature in features]
    if not isinstance(features, dict):
        return features
    if isinstance(features.get("_type"), str):
        return {key: _in_order(features[key]) for key in sorted(features)}
    return [[name, _in_order(feature)] for name, feature in features.items()]


def _hash_array(digest: Any, array: pa.Array) -> None:
    """
    Update the digest with the nulls, lengths and values of an array.

    Bytes under nulls and bytes outside the array are not hashed. The length and a flag for nulls come first, so the
    hashed data of an array is self-delimiting.
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
    elif kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        _hash_strings(digest, array.cast(pa.large_binary()))
    elif pa.types.is_boolean(kind):
        digest.update(array.fill_null(False).cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
    elif pa.types.is_primitive(kind):
        # The signed integer type with the bit width of the values.
        stored = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
        values = array.fill_null(pa.scalar(0).cast(stored).cast(kind)) if array.null_count else array
        digest.update(np.ascontiguousarray(values.view(stored).to_numpy(zero_copy_only=False)).tobytes())
    else:
        digest.update(json.dumps(array.to_pylist(), default=str).encode())


def _hash_strings(digest: Any, array: pa.LargeBinaryArray) -> None:
    if array.null_count:
        array = array.fill_null(b"")
    digest.update(_integers(pc.binary_length(array)).tobytes())
    _, offsets, values = array.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64)[[array.offset, array.offset + len(array)]]
    if values is not None:
        digest.update(values[int(bounds[0]) : int(bounds[1])])


def _integers(array: pa.Array) -> np.ndarray:
    return array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
