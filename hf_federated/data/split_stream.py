"""Split one `datasets.IterableDataset` into a stream for each client, by the value of a column."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import IterableDataset

from .client_ids import check_requested_clients
from .column_values import check_columns


def split_stream(
    dataset: IterableDataset, column: str, clients: Sequence[str] | None, keep_column: bool
) -> dict[str, IterableDataset]:
    """
    Return a stream for each client. No row is read.

    Args:
        dataset (`datasets.IterableDataset`): The rows of all clients.
        column (`str`): The column with the client of each row.
        clients (`Sequence[str]`, *optional*): The ids of the clients.
        keep_column (`bool`): Whether the streams keep the column.

    Raises:
        `ValueError`: If `clients` is missing or empty or contains an id twice, or if the column does not exist.
        `TypeError`: If `clients` is a string.
    """
    if clients is None:
        raise ValueError(
            f"from_column: the values of {column!r} in an IterableDataset are unknown before it is read. Pass the ids"
            ' of the clients, for example clients=["north", "south"].'
        )
    client_ids = clients if isinstance(clients, str) else list(clients)
    check_requested_clients(client_ids)
    if dataset.column_names is not None:
        check_columns(dataset.column_names, [column])
    drops = not keep_column and dataset.column_names != [column]
    streams = {}
    for client_id in client_ids:
        rows = dataset.filter(partial(_belongs_to, client_id=client_id), input_columns=[column])
        streams[client_id] = rows.remove_columns(column) if drops else rows
    return streams


def _belongs_to(value: Any, client_id: str) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):  # a stream with the format `torch`
        value = value.item()
    return value is not None and str(value) == client_id
