"""Clients whose rows lie in parquet files, opened when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features
from datasets.fingerprint import Hasher

from .client_rows import ClientRows, PartitionedRows
from .partition_file import PARTITION_FILE, PartitionFileError, StoredRows
from .partitioners.base import Partition, check_client_ids


@dataclass(frozen=True)
class ClientFiles:
    """
    Args:
        stored ([`StoredRows`]): What `partition.json` says of one client's rows in one split.
        paths (`list[Path]`): Where its files lie, in order. They have been checked.
    """

    stored: StoredRows
    paths: list[Path]


class ParquetRows(ClientRows):
    """
    The files of each client. Rows are read when a client is opened, and not kept.

    A function over all rows (`map`) reads them all once, into the cache of `datasets`.
    """

    def __init__(self, features: Features, clients: Mapping[str, ClientFiles]) -> None:
        super().__init__(list(clients))
        self.features = features
        self.clients = dict(clients)

    @property
    def example(self) -> Dataset:
        return Dataset(self.features.arrow_schema.empty_table(), fingerprint="empty")

    def num_rows(self) -> list[int | None]:
        return [client.stored.num_rows for client in self.clients.values()]

    def open(self, client_id: str) -> Dataset:
        client = self.clients[client_id]
        table = pa.concat_tables([pq.read_table(path, partitioning=None) for path in client.paths])
        self._check_features(client_id, Features.from_arrow_schema(table.schema))
        if table.num_rows != client.stored.num_rows:
            raise PartitionFileError(
                f"The files of client {client_id!r} hold {table.num_rows} rows; {PARTITION_FILE} says"
                f" {client.stored.num_rows}."
            )
        # Of the bytes alone, so that map() finds its cache again in another process and another copy of the files.
        fingerprint = Hasher.hash([file.sha256 for file in client.stored.files])
        return Dataset(table, fingerprint=fingerprint)

    def transform(self, function: Callable[[Any], Any], reads_rows: bool = False) -> PartitionedRows:
        return self._cached().transform(function, reads_rows)

    def select(self, client_ids: Sequence[str]) -> ParquetRows:
        check_client_ids(client_ids)
        return ParquetRows(self.features, {client_id: self.clients[client_id] for client_id in client_ids})

    def pooled(self) -> Dataset:
        return self._cached().source

    def _cached(self) -> PartitionedRows:
        """All rows in one memory-mapped file of the cache of `datasets`, and where each client's begin."""
        for client_id, client in self.clients.items():
            for path in client.paths:
                self._check_features(client_id, Features.from_arrow_schema(pq.read_schema(path)))
        paths = [str(path) for client in self.clients.values() for path in client.paths]
        source = Dataset.from_parquet(paths, features=self.features)
        offsets = np.cumsum([0, *(client.stored.num_rows for client in self.clients.values())], dtype=np.int64)
        if len(source) != offsets[-1]:
            raise PartitionFileError(f"The files hold {len(source)} rows; {PARTITION_FILE} says {offsets[-1]}.")
        return PartitionedRows(source, Partition(self.client_ids, np.arange(len(source)), offsets))

    def _check_features(self, client_id: str, features: Features) -> None:
        if features != self.features:
            different = sorted(
                name for name in {*features, *self.features} if features.get(name) != self.features.get(name)
            )
            raise PartitionFileError(
                f"The files of client {client_id!r} have other columns, types or label names than {PARTITION_FILE}"
                f" says: {', '.join(different)}."
            )
