"""Adapter for the partitioners of `flwr_datasets`.

This module never imports `flwr_datasets`. If an object of that package exists, the package is already imported. The
vertical partitioners of the package split columns instead of rows and are not supported.
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

from ..._compat import dataset_fingerprint, indices_table
from ..column_values import read_column
from .base import Partition, Partitioner, row_index_dtype


ROW_INDEX_COLUMN = "__hf_federated_row"


@dataclass(frozen=True)
class FlowerPartitioner(Partitioner):
    """
    Wrapper of a partitioner of `flwr_datasets`, which decides which rows each client gets.

    `FederatedDataset.from_dataset` wraps such an object automatically. The object is copied, so that it can be used
    again. A client is named after its partition number, or after its column value if the wrapped object is a
    `NaturalIdPartitioner`. Several splits raise an error, because two calls of a `flwr_datasets` partitioner may give
    a client different shares.

    Args:
        partitioner (`flwr_datasets.partitioner.Partitioner`): A partitioner without an assigned dataset.

    Raises:
        `TypeError`: If the wrapped partitioner splits columns.
        `ValueError`: If the wrapped partitioner already has a dataset, or if it creates a client without rows.
    """

    partitioner: Any

    def __post_init__(self) -> None:
        flower = sys.modules["flwr_datasets.partitioner"]
        name = type(self.partitioner).__name__
        if isinstance(self.partitioner, (flower.VerticalEvenPartitioner, flower.VerticalSizePartitioner)):
            raise TypeError(
                f"{name} splits columns: every client gets all rows and some of the columns. Use a partitioner that"
                " splits rows, so that all clients have the same columns."
            )
        if self.partitioner.is_dataset_assigned():
            raise ValueError(
                f"This {name} already has a dataset, and a partitioner of flwr_datasets accepts only one. Create a new"
                f" {name} with the same arguments, and do not assign its dataset."
            )

    def partition(self, dataset: Dataset) -> Partition:
        flower = sys.modules["flwr_datasets.partitioner"]
        partitioner = copy.deepcopy(self.partitioner)
        partitioner.dataset = _add_row_index_column(dataset)
        pieces = []
        for position in range(partitioner.num_partitions):
            values, rows = read_column(partitioner.load_partition(position), ROW_INDEX_COLUMN)
            row_indices = values.to_numpy()
            pieces.append((row_indices if rows is None else row_indices[rows]).astype(row_index_dtype(len(dataset))))
        client_ids = [str(position) for position in range(len(pieces))]
        if isinstance(partitioner, flower.NaturalIdPartitioner):
            client_ids = [str(partitioner.partition_id_to_natural_id[position]) for position in range(len(pieces))]
        return Partition.from_rows(client_ids, pieces)

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        if len(splits) > 1:
            raise ValueError(
                f"{type(self.partitioner).__name__} of flwr_datasets can partition one split, got {list(splits)}. To"
                " partition several splits, use a partitioner of hf_federated."
            )
        return super().partition_splits(splits)

    def settings(self) -> dict[str, Any]:
        """Return the class name of the wrapped partitioner and its arguments that are numbers, strings or booleans."""
        # Before a dataset is assigned, the attributes of the wrapped partitioner are its arguments. By convention of
        # flwr_datasets, the attribute of an argument has the argument's name with a leading underscore.
        arguments = {}
        for name, value in vars(self.partitioner).items():
            if isinstance(value, np.ndarray):  # flwr_datasets expands a single number to one element per client
                value = value[0].item() if len(np.unique(value)) == 1 else value.tolist()
            if isinstance(value, (bool, int, float, str, list)):
                arguments[name.removeprefix("_")] = value
        return {"flwr_datasets": type(self.partitioner).__name__, **arguments}


def as_partitioner(partitioner: Any) -> Partitioner:
    """
    Return a [`Partitioner`] unchanged, and wrap a partitioner of `flwr_datasets`.

    Raises:
        `TypeError`: If the object is no partitioner.
    """
    flower = sys.modules.get("flwr_datasets.partitioner")
    if flower is not None and isinstance(partitioner, flower.Partitioner):
        return FlowerPartitioner(partitioner)
    if not isinstance(partitioner, Partitioner):
        raise TypeError(
            f"from_dataset: expected a Partitioner, got {partitioner!r}. For example, pass"
            " IidPartitioner(num_clients=10)."
        )
    return partitioner


def _add_row_index_column(dataset: Dataset) -> Dataset:
    """Return the dataset with an additional column of row indices. The existing columns are not copied."""
    rows = indices_table(dataset)
    if rows is not None and len(rows.column(0).unique()) < len(rows):
        dataset, rows = dataset.flatten_indices(), None  # a row that occurs twice needs two row indices
    # Dataset.add_column flattens an indices mapping, which copies the rows. Therefore the row indices are stored per
    # row of the underlying table, and the indices mapping stays.
    row_indices = np.arange(len(dataset.data), dtype=np.int64)
    if rows is not None:
        row_indices[rows.column(0).to_numpy()] = np.arange(len(dataset))
    column = InMemoryTable(pa.table({ROW_INDEX_COLUMN: row_indices}))
    info = dataset.info.copy()
    info.features = Features({**dataset.features, ROW_INDEX_COLUMN: Value("int64")})
    return Dataset(
        concat_tables([dataset.data, column], axis=1),
        info=info,
        indices_table=rows,
        fingerprint=f"{dataset_fingerprint(dataset)}-numbered",
    )
