"""Client datasets in parquet files, read on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features
from datasets.fingerprint import Hasher

from ...utils.untrusted_json import parse_json
from ..client_datasets import ClientDatasets, PartitionedDataset
from ..partitioners.base import Partition
from .partition_file import PARTITION_FILE, PartitionFileError, StoredRows


class ParquetDatasets(ClientDatasets):
    """
    Client datasets in parquet files. The rows of a client are read when the client is opened, and are not kept.

    Each read verifies the hash of the file, because files may change after the dataset was opened. A function over all
    rows (`map`) reads all files once, into the cache of `datasets`.

    Args:
        root (`Path`): The folder, as an absolute path.
        features (`Features`): The columns of all clients.
        clients (`Mapping[str, StoredRows]`): Client id to the entry of `partition.json` for one split.
    """

    features: Features

    def __init__(self, root: Path, features: Features, clients: Mapping[str, StoredRows]) -> None:
        super().__init__(list(clients), features)
        self.root = root
        self.clients = dict(clients)
        # Column descriptions that passed the check. All files have the same description, so it is checked only once.
        self._verified_schemas: set[tuple[bytes | None, tuple[str, ...]]] = set()

    def num_rows(self) -> list[int | None]:
        return [client.num_rows for client in self.clients.values()]

    def open(self, client_id: str) -> Dataset:
        client = self.clients[client_id]
        tables = [parquet.read() for parquet in self._read_files(client_id)]
        self._check_rows(client_id, sum(table.num_rows for table in tables))
        # Parquet lacks some types. For example, timestamps in seconds are read back in milliseconds.
        table = pa.concat_tables(tables).cast(self.features.arrow_schema)
        # The fingerprint depends only on the content, so `map` finds its cache in any process and any copy of the
        # files.
        fingerprint = Hasher.hash([file.sha256 for file in client.files])
        return Dataset(table, fingerprint=fingerprint)

    def transform(self, function: Callable[[Any], Any], label: str | None = None) -> PartitionedDataset:
        return self._cached().transform(function, label)

    def filter(self, function: Callable[..., Any] | None, **kwargs: Any) -> tuple[PartitionedDataset, list[str]]:
        return self._cached().filter(function, **kwargs)

    def take(self, rows: Mapping[str, np.ndarray]) -> PartitionedDataset:
        return self._cached().take(rows)

    def select(self, client_ids: Sequence[str]) -> ParquetDatasets:
        return ParquetDatasets(
            self.root, self.features, {client_id: self.clients[client_id] for client_id in client_ids}
        )

    def pooled(self) -> Dataset:
        return self._cached().source

    def check(self) -> None:
        """
        Read and verify all files once.

        Raises:
            `PartitionFileError`: If a file is missing, was changed, or does not match its entry in `partition.json`.
        """
        for client_id in self.clients:
            num_rows = sum(parquet.metadata.num_rows for parquet in self._read_files(client_id))
            self._check_rows(client_id, num_rows)

    def _read_files(self, client_id: str) -> Iterator[pq.ParquetFile]:
        """Read and verify the files of a client, one after the other."""
        for file in self.clients[client_id].files:
            parquet = pq.ParquetFile(pa.BufferReader(file.read(self.root, client_id)))
            self._check_features(client_id, parquet)
            yield parquet

    def _cached(self) -> PartitionedDataset:
        """Return all rows as one memory-mapped file in the cache of `datasets`, partitioned by client."""
        self.check()
        paths = [str(self.root / file.path) for client in self.clients.values() for file in client.files]
        source = Dataset.from_parquet(paths, features=self.features)
        sizes = [client.num_rows for client in self.clients.values()]
        return PartitionedDataset(source, Partition.from_sizes(self.client_ids, np.arange(len(source)), sizes))

    def _check_features(self, client_id: str, parquet: pq.ParquetFile) -> None:
        schema = parquet.schema_arrow
        written = (schema.metadata or {}).get(b"huggingface")
        description = (written, tuple(schema.names))
        if description in self._verified_schemas:
            return
        features = (
            Features.from_arrow_schema(schema)
            if written is None
            else Features.from_dict(parse_json(written)["info"]["features"])
        )
        if features != self.features or list(schema.names) != list(self.features):
            different = sorted(
                name for name in {*features, *self.features} if features.get(name) != self.features.get(name)
            )
            raise PartitionFileError(
                f"The files of client {client_id!r} differ from {PARTITION_FILE} in their columns, types or label"
                f" names: {', '.join(different) or 'different order'}."
            )
        self._verified_schemas.add(description)

    def _check_rows(self, client_id: str, num_rows: int) -> None:
        if num_rows != self.clients[client_id].num_rows:
            raise PartitionFileError(
                f"The files of client {client_id!r} contain {num_rows} rows, but {PARTITION_FILE} lists"
                f" {self.clients[client_id].num_rows}."
            )
