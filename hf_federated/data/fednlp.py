"""Read and write the data and partition files of FedNLP (Lin et al., 2022). Requires `h5py`.

FedNLP stores a dataset in two HDF5 files. The data file holds one HDF5 object for each row and field (`X/<number>`,
`Y/<number>`), and `attributes`, a JSON string. The partition file holds the row numbers of each client for each
method: `<method>/partition_data/<client>/train`. The five values of `task_type` map to these columns:

| task_type | columns |
|---|---|
| `text_classification` | `text`, `label` |
| `seq_tagging` | `tokens`, `tags` |
| `span_extraction` | `id`, `context`, `question`, `answer_start`, `answer_end` (character positions) |
| `seq2seq` | `source`, `target` |
| `lm` | `text` |
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers.utils import logging

from ..utils.optional_packages import require_packages
from ..utils.untrusted_json import MAX_FILE_BYTES, MAX_FILE_VALUES, parse_json
from .client_datasets import ClientDatasets, PartitionedDataset
from .column_values import check_columns
from .partitioners.base import Partition


logger = logging.get_logger(__name__)

SPLITS = ("train", "test")

# For each task, the columns and the fields of the data file that hold them.
COLUMNS = {
    "text_classification": {"text": "X", "label": "Y"},
    "seq_tagging": {"tokens": "X", "tags": "Y"},
    "span_extraction": {"id": "question_ids", "context": "context_X", "question": "question_X"},
    "seq2seq": {"source": "X", "target": "Y"},
    "lm": {"text": "X"},
}


def read_fednlp(
    data_file: str | os.PathLike[str], partition_file: str | os.PathLike[str], method: str
) -> dict[str, PartitionedDataset]:
    """
    Read the rows that a partition assigns to clients.

    Args:
        data_file (`str`): The data file, `<name>_data.h5`.
        partition_file (`str`): The partition file, `<name>_partition.h5`.
        method (`str`): Name of the partition, for example `"niid_label_clients=100_alpha=1.0"`.

    Returns:
        `dict[str, PartitionedDataset]`: The rows of each split.

    Raises:
        `ImportError`: If h5py is not installed.
        `ValueError`: If the partition does not exist, if it contains a row that the data file does not have, or if it
            contains a row twice.
    """
    h5py = _require_h5py()
    ids, numbers = _read_partition(partition_file, method)
    with h5py.File(data_file, "r") as data:
        attributes = parse_json(data["attributes"][()], MAX_FILE_BYTES, MAX_FILE_VALUES, max_text=None)
        rows: dict[str, PartitionedDataset] = {}
        assigned = np.empty(0, dtype=np.int64)
        for split, by_client in numbers.items():
            non_empty = {name: rows_of_client for name, rows_of_client in by_client.items() if len(rows_of_client)}
            if not non_empty:
                continue
            if len(non_empty) < len(ids):
                logger.warning(
                    f"{len(ids) - len(non_empty)} of {len(ids)} clients of {method!r} have no {split} rows."
                )
            row_numbers = np.concatenate(list(non_empty.values()))
            dataset = _read_rows(data, attributes, row_numbers, str(data_file))
            values, counts = np.unique(row_numbers, return_counts=True)
            if len(values) < len(row_numbers):
                raise ValueError(
                    f"{partition_file}: {method!r} contains row {values[counts.argmax()]} of {split} twice."
                )
            both = np.intersect1d(row_numbers, assigned)
            if len(both):
                raise ValueError(f"{partition_file}: {method!r} contains row {both[0]} in both train and test.")
            assigned = np.concatenate([assigned, row_numbers])
            sizes = list(map(len, non_empty.values()))
            partition = Partition.from_sizes(list(non_empty), np.arange(len(row_numbers)), sizes)
            rows[split] = PartitionedDataset(dataset, partition)
    if not rows:
        raise ValueError(f"{partition_file}: no client of {method!r} has rows. Choose another partition.")
    return rows


def _read_partition(
    partition_file: str | os.PathLike[str], method: str
) -> tuple[list[str], dict[str, dict[str, np.ndarray]]]:
    """Return the clients of a partition in order, and for each split the row numbers of the clients that have it."""
    h5py = _require_h5py()
    with h5py.File(partition_file, "r") as partitions:
        if method not in partitions or "partition_data" not in partitions[method]:
            raise ValueError(
                f"{partition_file} has no partition {method!r}. It has: {', '.join(partitions) or 'none'}."
            )
        clients = partitions[method]["partition_data"]
        # h5py lists the keys in the order of strings: 0, 1, 10, 2, …
        ids = sorted(clients, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        return ids, {
            split: {
                name: _row_numbers(clients[name][split][()], partition_file, name)
                for name in ids
                if split in clients[name]
            }
            for split in SPLITS
        }


def _row_numbers(values: Any, path: str | os.PathLike[str], client: str) -> np.ndarray:
    numbers = np.asarray(values).ravel()
    if len(numbers) and numbers.dtype.kind not in "iu":
        raise ValueError(f"{path}: the row numbers of client {client} are {numbers.dtype}, but they must be integers.")
    return numbers.astype(np.int64)


def _read_rows(data: Any, attributes: Mapping[str, Any], numbers: np.ndarray, path: str) -> Dataset:
    task = attributes.get("task_type")
    if task is None:  # early files for sequence-to-sequence and language modeling do not contain `task_type`
        task = "seq2seq" if "Y" in data else "lm"
    _check_task_type(task)
    fields = {column: field for column, field in COLUMNS[task].items() if field in data}
    columns: dict[str, Any] = {
        column: [_decode(value) for value in _read_field(data, field, numbers, path)]
        for column, field in fields.items()
    }
    if task == "span_extraction":
        spans = np.array([np.ravel(value)[:2] for value in _read_field(data, "Y", numbers, path)], dtype=np.int64)
        columns |= {"answer_start": spans[:, 0], "answer_end": spans[:, 1]}
    # Datasets such as MRQA store the source of each row in these attributes.
    sources, order = attributes.get("label_index_list"), attributes.get("index_list")
    if sources and order and len(sources) == len(order) and "label" not in columns:
        source_of = dict(zip(order, sources, strict=True))
        columns["domain"] = [str(source_of.get(int(number), "")) for number in numbers]
    return Dataset.from_dict(columns, features=_features(columns, task, attributes.get("label_vocab")))


def _check_task_type(task: object) -> None:
    if task not in COLUMNS:
        raise ValueError(f"Unknown task_type {task!r}. The known values are: {', '.join(COLUMNS)}.")


def _read_field(data: Any, field: str, numbers: np.ndarray, path: str) -> Iterator[Any]:
    """
    Yield the values of one field.

    Each row is an HDF5 object, and indexing with `h5py` is several times slower than its low-level API.
    """
    from h5py import h5d, h5s

    group = data[field].id
    for number in numbers.tolist():
        try:
            opened = h5d.open(group, str(number).encode())
        except KeyError:
            raise ValueError(f"{path} has no row {number} in {field!r}, but the partition contains it.") from None
        value = np.empty(opened.shape, dtype=opened.dtype)
        opened.read(h5s.ALL, h5s.ALL, value)
        yield value[()]


def _decode(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray):
        return [_decode(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def _features(columns: Mapping[str, Any], task: str, vocabulary: Mapping[str, int] | None) -> Features | None:
    if not vocabulary:
        return None
    # A `ClassLabel` accepts names, and numbers only if they count from 0.
    ranked = sorted(vocabulary.items(), key=lambda item: item[1])
    column = columns.get("label" if task == "text_classification" else "tags", [])
    if [number for _, number in ranked] != list(range(len(ranked))) and any(_is_numeric(value) for value in column):
        raise ValueError(f"The labels are numbers, but the numbers in label_vocab do not count from 0: {ranked[:5]} …")
    names = ClassLabel(names=[str(name) for name, _ in ranked])
    text = {column: Value("string") for column in columns}
    if task == "text_classification":
        return Features({**text, "label": names})
    if task == "seq_tagging":
        return Features({**text, "tokens": List(Value("string")), "tags": List(names)})
    return None


def _is_numeric(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(not isinstance(item, str) for item in items)


def write_fednlp(
    splits: Mapping[str, ClientDatasets],
    data_file: str | os.PathLike[str],
    partition_file: str | os.PathLike[str],
    method: str,
    task_type: str,
) -> None:
    """
    Write splits in the format of FedNLP. Rows are numbered in the order of splits and clients.

    Args:
        splits (`Mapping[str, ClientDatasets]`): `"train"` and, if it exists, `"test"`.
        data_file (`str`): The data file to write.
        partition_file (`str`): The partition file to write.
        method (`str`): Name of the partition in the file.
        task_type (`str`): One of the five tasks. The rows must have the columns of the task.

    Raises:
        `ImportError`: If h5py is not installed.
        `FileExistsError`: If one of the files exists, because it may contain other partitions.
        `ValueError`: If the task is unknown, if a column is missing, if a row has no value, or if there is a split
            other than `train` and `test`.
    """
    h5py = _require_h5py()
    for path in (data_file, partition_file):
        if os.path.lexists(path):
            raise FileExistsError(
                f"{path} already exists and is not replaced. Choose another name, or remove it first."
            )
    _check_task_type(task_type)
    if not set(splits) <= set(SPLITS) or "train" not in splits:
        raise ValueError(f"FedNLP files have a split train and, optionally, a split test, got {', '.join(splits)}.")
    required = [*COLUMNS[task_type], *(["answer_start", "answer_end"] if task_type == "span_extraction" else [])]
    pooled = {split: rows.pooled() for split, rows in splits.items()}
    check_columns(pooled["train"].column_names, required)
    starts = {"train": 0, "test": len(pooled["train"])}
    numbers = {split: np.arange(starts[split], starts[split] + len(rows)) for split, rows in pooled.items()}
    with _atomic_write(data_file) as temporary, h5py.File(temporary, "w") as file:
        file["attributes"] = json.dumps(_attributes(pooled, numbers, task_type))
        for split, rows in pooled.items():
            for number, row in zip(numbers[split].tolist(), rows.select_columns(required), strict=True):
                empty = [name for name, value in row.items() if value is None]
                if empty:
                    raise ValueError(
                        f"Row {number - starts[split]} of {split} has no value in {empty[0]!r}. Drop the row."
                    )
                for field, value in _fields(row, task_type, rows.features):
                    file[f"{field}/{number}"] = value
    _write_partition(splits, numbers, partition_file, method)


def _write_partition(
    splits: Mapping[str, ClientDatasets],
    numbers: Mapping[str, np.ndarray],
    partition_file: str | os.PathLike[str],
    method: str,
) -> None:
    """Write the row numbers of each client and split."""
    h5py = _require_h5py()
    clients = list(dict.fromkeys(client_id for rows in splits.values() for client_id in rows.client_ids))
    # FedNLP numbers its clients. Clients with other ids are numbered in order.
    numbered = [str(number) for number in range(len(clients))]
    keys = clients if set(clients) == set(numbered) else numbered
    with _atomic_write(partition_file) as temporary, h5py.File(temporary, "w") as file:
        file[f"{method}/n_clients"] = len(clients)
        for split in SPLITS:
            rows_of: dict[str, np.ndarray] = {}
            if split in splits:
                sizes = [size for size in splits[split].num_rows() if size is not None]
                pieces = np.split(numbers[split], np.cumsum(sizes)[:-1])
                rows_of = dict(zip(splits[split].client_ids, pieces, strict=True))
            for client_id, key in zip(clients, keys, strict=True):
                file[f"{method}/partition_data/{key}/{split}"] = rows_of.get(client_id, np.empty(0, dtype=np.int64))


def _attributes(pooled: Mapping[str, Dataset], numbers: Mapping[str, np.ndarray], task_type: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "task_type": task_type,
        "index_list": [number for split_numbers in numbers.values() for number in split_numbers.tolist()],
        "train_index_list": numbers["train"].tolist(),
        "test_index_list": numbers["test"].tolist() if "test" in numbers else [],
    }
    names = _label_names(pooled, task_type)
    if names is not None:
        attributes |= {"num_labels": len(names), "label_vocab": {name: number for number, name in enumerate(names)}}
    return attributes


def _label_names(pooled: Mapping[str, Dataset], task_type: str) -> list[str] | None:
    column = {"text_classification": "label", "seq_tagging": "tags"}.get(task_type)
    if column is None:
        return None
    feature = pooled["train"].features[column]
    feature = feature.feature if isinstance(feature, List) else feature
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    values = (value for rows in pooled.values() for value in rows[column])
    flat = (item for value in values for item in (value if isinstance(value, list) else [value]))
    return sorted({str(item) for item in flat})


def _fields(row: Mapping[str, Any], task_type: str, features: Features) -> Iterator[tuple[str, Any]]:
    for column, field in COLUMNS[task_type].items():
        yield field, _encode(row[column], features[column])
    if task_type == "span_extraction":
        yield "Y", (row["answer_start"], row["answer_end"])


def _encode(value: Any, feature: Any) -> Any:
    import h5py

    if isinstance(value, list):
        item = feature.feature
        texts = [item.int2str(entry) if isinstance(item, ClassLabel) else entry for entry in value]
        return np.array(texts, dtype=h5py.string_dtype("utf-8"))
    return feature.int2str(value) if isinstance(feature, ClassLabel) else str(value)


@contextmanager
def _atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _require_h5py() -> Any:
    require_packages("the format of FedNLP", {"h5py": {"h5py": "h5py"}})
    import h5py

    return h5py
