"""Partitioners of `flwr_datasets`, used as they are.

`flwr_datasets` is never imported here: whoever made one of its objects has imported it. Its vertical partitioners,
which split columns instead of rows, are refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets.table import InMemoryTable, concat_tables

from ..column_values import read_column
from .base import Partition, Partitioner, row_number_dtype


ROW_NUMBER = "__hf_federated_row"


@dataclass(frozen=True)
class FlowerPartitioner(Partitioner):
    """
    Lets a partitioner of `flwr_datasets` say which rows each client gets.

    `FederatedDataset.from_dataset` wraps such an object by itself. The object is copied, so that it can be used again.
    Clients are named after their partition number, or by the value of the column in the case of
    `NaturalIdPartitioner`. Several splits at a time are refused: it is not known whether two calls of such an object
    give a client the same shares.

    Args:
        partitioner (`flwr_datasets.partitioner.Partitioner`): One that has not been given a data set yet.

    Raises:
        `TypeError`: If it splits columns.
        `ValueError`: If it has a data set already, or makes a client without rows.
    """

    partitioner: Any

    def __post_init__(self) -> None:
        flower = sys.modules["flwr_datasets.partitioner"]
        name = type(self.partitioner).__name__
        if isinstance(self.partitioner, (flower.VerticalEvenPartitioner, flower.VerticalSizePartitioner)):
            raise TypeError(
                f"{name} gives every client all rows and a part of the columns. Clients here have the same columns and"
                " different rows: use a partitioner that splits rows."
            )
        if self.partitioner.is_dataset_assigned():
            raise ValueError(
                f"This {name} has a data set already, and Flower's partitioners take one only. Make a new one with the"
                " same arguments, without assigning its dataset."
            )

    def partition(self, dataset: Dataset) -> Partition:
        flower = sys.modules["flwr_datasets.partitioner"]
        partitioner = copy.deepcopy(self.partitioner)
        partitioner.dataset = _with_row_numbers(dataset)
        pieces = []
        for position in range(partitioner.num_partitions):
            values, rows = read_column(partitioner.load_partition(position), ROW_NUMBER)
            numbers = values.to_numpy()
            pieces.append(numbers if rows is None else numbers[rows])
        client_ids = [str(position) for position in range(len(pieces))]
        if isinstance(partitioner, flower.NaturalIdPartitioner):
            client_ids = [str(partitioner.partition_id_to_natural_id[position]) for position in range(len(pieces))]
        offsets = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
        indices = np.concatenate([np.empty(0, dtype=np.int64), *pieces])
        return Partition(client_ids, indices.astype(row_number_dtype(len(dataset))), offsets)

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        if len(splits) > 1:
            raise ValueError(
                f"{type(self.partitioner).__name__} of flwr_datasets cuts one split, got {list(splits)}. Whether a"
                " client gets the same shares of each is known of the partitioners of hf_federated only."
            )
        return super().partition_splits(splits)

    def settings(self) -> dict[str, Any]:
        """The name of Flower's class, and those of its arguments that are numbers, texts or truth values."""
        # Before it has a data set, what it holds are its arguments, by the rule of that package each under _name.
        arguments = {}
        for name, value in vars(self.partitioner).items():
            if isinstance(value, np.ndarray):  # one number is held as an array with a place for each client
                value = value[0].item() if len(np.unique(value)) == 1 else value.tolist()
            if isinstance(value, (bool, int, float, str, list)):
                arguments[name.removeprefix("_")] = value
        return {"flwr_datasets": type(self.partitioner).__name__, **arguments}


def adopt(partitioner: Any) -> Any:
    """Wraps a partitioner of `flwr_datasets`; anything else comes back as it is."""
    flower = sys.modules.get("flwr_datasets.partitioner")
    if flower is not None and isinstance(partitioner, flower.Partitioner):
        return FlowerPartitioner(partitioner)
    return partitioner


def _with_row_numbers(dataset: Dataset) -> Dataset:
    """The same rows with a column of their numbers; the other columns are not copied."""
    rows = dataset._indices
    if rows is not None and len(rows.column(0).unique()) < len(rows):
        dataset, rows = dataset.flatten_indices(), None  # a row that occurs twice has two numbers
    # Dataset.add_column would flatten a selection, which copies its rows. So the rows of the table get their numbers,
    # and the selection stays.
    numbers = np.arange(len(dataset.data), dtype=np.int64)
    if rows is not None:
        numbers[rows.column(0).to_numpy()] = np.arange(len(dataset))
    column = InMemoryTable(pa.table({ROW_NUMBER: numbers}))
    info = dataset.info.copy()
    info.features = Features({**dataset.features, ROW_NUMBER: Value("int64")})
    return Dataset(
        concat_tables([dataset.data, column], axis=1),
        info=info,
        indices_table=rows,
        fingerprint=f"{dataset._fingerprint}-numbered",
    )
