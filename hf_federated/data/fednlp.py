"""Data and partition files of FedNLP (Lin et al., 2022): two HDF5 files, read and written. Needs `h5py`.

The data file holds one HDF5 object a row and field (`X/<number>`, `Y/<number>`), and `attributes`, a JSON text; the
partition file holds, for each method, the row numbers of each client: `<method>/partition_data/<client>/train`. The
five kinds of `task_type` become columns:

| task_type | columns |
|---|---|
| `text_classification` | `text`, `label` |
| `seq_tagging` | `tokens`, `tags` |
| `span_extraction` | `id`, `context`, `question`, `answer_start`, `answer_end` (character positions) |
| `seq2seq` | `source`, `target` |
| `lm` | `text` |
"""

from __future__ import annotations

import importlib.util
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

from .client_datasets import ClientDatasets, PartitionedDataset
from .column_values import check_columns
from .partitioners.base import Partition


logger = logging.get_logger(__name__)

SPLITS = ("train", "test")

# For each task, its columns and the fields of the file that hold them.
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
    Reads the rows that a partition gives to clients.

    Args:
        data_file (`str`): The data, `<name>_data.h5`.
        partition_file (`str`): The partitions, `<name>_partition.h5`.
        method (`str`): The partition to read, for example `"niid_label_clients=100_alpha=1.0"`.

    Returns:
        `dict[str, PartitionedDataset]`: The rows of each split.

    Raises:
        `ImportError`: If h5py is not installed.
        `ValueError`: If the partition does not exist, or names rows that the data file does not have or gives one
            away twice.
    """
    h5py = _require_h5py()
    with h5py.File(partition_file, "r") as partitions:
        if method not in partitions or "partition_data" not in partitions[method]:
            raise ValueError(
                f"{partition_file} has no partition {method!r}. It has: {', '.join(partitions) or 'none'}."
            )
        clients = partitions[method]["partition_data"]
        # Keys are listed as text: 0, 1, 10, 2, …
        ids = sorted(clients, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        numbers = {
            split: {
                name: _row_numbers(clients[name][split][()], partition_file, name)
                for name in ids
                if split in clients[name]
            }
            for split in SPLITS
        }
    with h5py.File(data_file, "r") as data:
        attributes = json.loads(_text(data["attributes"][()]))
        rows: dict[str, PartitionedDataset] = {}
        taken = np.empty(0, dtype=np.int64)
        for split, by_client in numbers.items():
            given = {name: own for name, own in by_client.items() if len(own)}
            if not given:
                continue
            if len(given) < len(ids):
                logger.warning(f"{len(ids) - len(given)} of {len(ids)} clients of {method!r} have no {split} rows.")
            everything = np.concatenate(list(given.values()))
            dataset = _read_rows(data, attributes, everything, str(data_file))
            offsets = np.cumsum([0, *map(len, given.values())])
            values, counts = np.unique(everything, return_counts=True)
            if len(values) < len(everything):
                raise ValueError(f"{partition_file}: {method!r} gives row {values[counts.argmax()]} of {split} twice.")
            both = np.intersect1d(everything, taken)
            if len(both):
                raise ValueError(f"{partition_file}: {method!r} gives row {both[0]} to training and to testing.")
            taken = np.concatenate([taken, everything])
            rows[split] = PartitionedDataset(dataset, Partition(list(given), np.arange(len(everything)), offsets))
    if not rows:
        raise ValueError(f"{partition_file}: {method!r} gives no row to any client.")
    return rows


def _row_numbers(values: Any, path: str | os.PathLike[str], client: str) -> np.ndarray:
    numbers = np.asarray(values).ravel()
    if len(numbers) and numbers.dtype.kind not in "iu":
        raise ValueError(f"{path}: the rows of client {client} are {numbers.dtype}, not whole numbers.")
    return numbers.astype(np.int64)


def _read_rows(data: Any, attributes: Mapping[str, Any], numbers: np.ndarray, path: str) -> Dataset:
    task = _task_type(data, attributes)
    fields = {column: field for column, field in COLUMNS[task].items() if field in data}
    columns: dict[str, Any] = {
        column: [_decode(value) for value in _read_field(data, field, numbers, path)]
        for column, field in fields.items()
    }
    if task == "span_extraction":
        spans = np.array([np.ravel(value)[:2] for value in _read_field(data, "Y", numbers, path)], dtype=np.int64)
        columns |= {"answer_start": spans[:, 0], "answer_end": spans[:, 1]}
    # MRQA and others: the source that each row comes from
    sources, order = attributes.get("label_index_list"), attributes.get("index_list")
    if sources and order and len(sources) == len(order) and "label" not in columns:
        source_of = dict(zip(order, sources, strict=True))
        columns["domain"] = [str(source_of.get(int(number), "")) for number in numbers]
    return Dataset.from_dict(columns, features=_features(columns, task, attributes.get("label_vocab")))


def _task_type(data: Any, attributes: Mapping[str, Any]) -> str:
    """The task; early files of sequence-to-sequence and language modelling do not name it."""
    task = attributes.get("task_type")
    if task in COLUMNS:
        return str(task)
    if task is not None:
        raise ValueError(f"The task_type {task!r} is not known; known are {', '.join(COLUMNS)}.")
    return "seq2seq" if "Y" in data else "lm"


def _read_field(data: Any, field: str, numbers: np.ndarray, path: str) -> Iterator[Any]:
    """The values of one field. h5py's own indexing takes several times as long, for every row is an object."""
    from h5py import h5d, h5s

    group = data[field].id
    for number in numbers.tolist():
        try:
            opened = h5d.open(group, str(number).encode())
        except KeyError:
            raise ValueError(f"{path} has no row {number} in {field!r}, which the partition gives away.") from None
        value = np.empty(opened.shape, dtype=opened.dtype)
        opened.read(h5s.ALL, h5s.ALL, value)
        yield value[()]


def _decode(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray):
        return [_decode(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _features(columns: Mapping[str, Any], task: str, vocabulary: Mapping[str, int] | None) -> Features | None:
    if not vocabulary:
        return None
    # A ClassLabel takes names or numbers, and numbers only if they count from 0.
    ranked = sorted(vocabulary.items(), key=lambda item: item[1])
    column = columns.get("label" if task == "text_classification" else "tags", [])
    if [number for _, number in ranked] != list(range(len(ranked))) and any(_is_numeric(value) for value in column):
        raise ValueError(f"Labels are numbers, and those of label_vocab do not count from 0: {ranked[:5]} …")
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
    Writes splits as FedNLP reads them. Rows are numbered in the order of splits and clients.

    Args:
        splits (`Mapping[str, ClientDatasets]`): `"train"` and, if there is one, `"test"`.
        data_file (`str`): The data file to write.
        partition_file (`str`): The partition file to write.
        method (`str`): Name of the partition in it.
        task_type (`str`): One of the five tasks. Their columns must be there.

    Raises:
        `ImportError`: If h5py is not installed.
        `FileExistsError`: If one of the files exists: it may hold other partitions.
        `ValueError`: If the task is not known, a column is missing, a row has no value, or there are other splits.
    """
    h5py = _require_h5py()
    for place in (data_file, partition_file):
        if os.path.lexists(place):
            raise FileExistsError(f"{place} exists and is not replaced. Choose another name, or remove it first.")
    if task_type not in COLUMNS:
        raise ValueError(f"The task_type {task_type!r} is not known; known are {', '.join(COLUMNS)}.")
    if not set(splits) <= set(SPLITS) or "train" not in splits:
        raise ValueError(f"FedNLP has the splits train and test, got {', '.join(splits)}.")
    wanted = [*COLUMNS[task_type], *(["answer_start", "answer_end"] if task_type == "span_extraction" else [])]
    pooled = {split: rows.pooled() for split, rows in splits.items()}
    check_columns(pooled["train"].column_names, wanted)
    starts = {"train": 0, "test": len(pooled["train"])}
    numbers = {split: np.arange(starts[split], starts[split] + len(rows)) for split, rows in pooled.items()}
    with _complete_or_absent(data_file) as path, h5py.File(path, "w") as file:
        file["attributes"] = json.dumps(_attributes(pooled, numbers, task_type))
        for split, rows in pooled.items():
            for number, row in zip(numbers[split].tolist(), rows.select_columns(wanted), strict=True):
                empty = [name for name, value in row.items() if value is None]
                if empty:
                    raise ValueError(f"Row {number - starts[split]} of {split} has no value in {empty[0]!r}; drop it.")
                for field, value in _fields(row, task_type, rows.features):
                    file[f"{field}/{number}"] = value
    clients = list(dict.fromkeys(client_id for rows in splits.values() for client_id in rows.client_ids))
    # FedNLP counts its clients; other names are numbered in their order.
    count = [str(number) for number in range(len(clients))]
    keys = clients if set(clients) == set(count) else count
    with _complete_or_absent(partition_file) as path, h5py.File(path, "w") as file:
        file[f"{method}/n_clients"] = len(clients)
        for split in SPLITS:
            own: dict[str, np.ndarray] = {}
            if split in splits:
                sizes = [size for size in splits[split].num_rows() if size is not None]
                pieces = np.split(numbers[split], np.cumsum(sizes)[:-1])
                own = dict(zip(splits[split].client_ids, pieces, strict=True))
            for client_id, key in zip(clients, keys, strict=True):
                file[f"{method}/partition_data/{key}/{split}"] = own.get(client_id, np.empty(0, dtype=np.int64))


def _attributes(pooled: Mapping[str, Dataset], numbers: Mapping[str, np.ndarray], task_type: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "task_type": task_type,
        "index_list": [number for own in numbers.values() for number in own.tolist()],
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
        texts = [item.int2str(one) if isinstance(item, ClassLabel) else one for one in value]
        return np.array(texts, dtype=h5py.string_dtype("utf-8"))
    return feature.int2str(value) if isinstance(feature, ClassLabel) else str(value)


@contextmanager
def _complete_or_absent(path: str | os.PathLike[str]) -> Iterator[Path]:
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{place.name}-", dir=place.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)


def _require_h5py() -> Any:
    if importlib.util.find_spec("h5py") is None:
        raise ImportError("FedNLP's files need h5py. Install it with: pip install hf-federated[h5py]")
    import h5py

    return h5py
