"""Clients whose rows lie in parquet files, opened when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features
from datasets.fingerprint import Hasher

from ..client_datasets import ClientDatasets, PartitionedDataset
from ..partitioners.base import Partition, check_client_ids
from .partition_file import PARTITION_FILE, PartitionFileError, StoredRows


class ParquetDatasets(ClientDatasets):
    """
    The files of each client. Rows are read when a client is opened, and not kept.

    What is read is compared with the hash that was written, each time: files may change after the data set was opened.
    A function over all rows (`map`) reads them all once, into the cache of `datasets`.

    Args:
        root (`Path`): The folder, absolute.
        features (`Features`): The columns of all clients.
        clients (`Mapping[str, StoredRows]`): Client id to what `partition.json` says of its rows in one split.
    """

    def __init__(self, root: Path, features: Features, clients: Mapping[str, StoredRows]) -> None:
        super().__init__(list(clients))
        self.root = root
        self.features = features
        self.clients = dict(clients)
        # What files say of their columns, once it was found to be right: it is the same text in all of them.
        self._right: set[tuple[bytes | None, tuple[str, ...]]] = set()

    @property
    def schema_dataset(self) -> Dataset:
        return Dataset(self.features.arrow_schema.empty_table(), fingerprint="empty")

    def num_rows(self) -> list[int | None]:
        return [client.num_rows for client in self.clients.values()]

    def open(self, client_id: str) -> Dataset:
        client = self.clients[client_id]
        tables = []
        for file in client.files:
            parquet = pq.ParquetFile(pa.BufferReader(file.read(self.root, client_id)))
            self._check_features(client_id, parquet)
            tables.append(parquet.read())
        self._check_rows(client_id, sum(table.num_rows for table in tables))
        # Parquet has no seconds, for example, and gives milliseconds back.
        table = pa.concat_tables(tables).cast(self.features.arrow_schema)
        # Of the bytes alone, so that map() finds its cache again in another process and another copy of the files.
        fingerprint = Hasher.hash([file.sha256 for file in client.files])
        return Dataset(table, fingerprint=fingerprint)

    def transform(self, function: Callable[[Any], Any], reads_rows: bool = False) -> PartitionedDataset:
        return self._cached().transform(function, reads_rows)

    def select(self, client_ids: Sequence[str]) -> ParquetDatasets:
        check_client_ids(client_ids)
        return ParquetDatasets(
            self.root, self.features, {client_id: self.clients[client_id] for client_id in client_ids}
        )

    def pooled(self) -> Dataset:
        return self._cached().source

    def check(self) -> None:
        """
        Reads all files once.

        Raises:
            `PartitionFileError`: If one is missing, is not the one that was written, or does not hold what
                `partition.json` says.
        """
        for client_id, client in self.clients.items():
            num_rows = 0
            for file in client.files:
                parquet = pq.ParquetFile(pa.BufferReader(file.read(self.root, client_id)))
                self._check_features(client_id, parquet)
                num_rows += parquet.metadata.num_rows
            self._check_rows(client_id, num_rows)

    def _cached(self) -> PartitionedDataset:
        """All rows in one memory-mapped file of the cache of `datasets`, and where each client's begin."""
        self.check()
        paths = [str(self.root / file.path) for client in self.clients.values() for file in client.files]
        source = Dataset.from_parquet(paths, features=self.features)
        offsets = np.cumsum([0, *(client.num_rows for client in self.clients.values())], dtype=np.int64)
        return PartitionedDataset(source, Partition(self.client_ids, np.arange(len(source)), offsets))

    def _check_features(self, client_id: str, parquet: pq.ParquetFile) -> None:
        schema = parquet.schema_arrow
        written = (schema.metadata or {}).get(b"huggingface")
        told = (written, tuple(schema.names))
        if told in self._right:
            return
        features = (
            Features.from_arrow_schema(schema)
            if written is None
            else Features.from_dict(json.loads(written)["info"]["features"])
        )
        if features != self.features or list(schema.names) != list(self.features):
            different = sorted(
                name for name in {*features, *self.features} if features.get(name) != self.features.get(name)
            )
            raise PartitionFileError(
                f"The files of client {client_id!r} have other columns, types or label names than {PARTITION_FILE}"
                f" says: {', '.join(different) or 'in another order'}."
            )
        self._right.add(told)

    def _check_rows(self, client_id: str, num_rows: int) -> None:
        if num_rows != self.clients[client_id].num_rows:
            raise PartitionFileError(
                f"The files of client {client_id!r} hold {num_rows} rows; {PARTITION_FILE} says"
                f" {self.clients[client_id].num_rows}."
            )
