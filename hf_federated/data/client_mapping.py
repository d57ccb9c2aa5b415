"""`ClientMapping`: the part of `FederatedDataset` that opens and selects clients.

Statistics, plots and the modules in `storage` need no more of a federated dataset than this part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features

from .client_datasets import ClientData, ClientDatasets, PartitionedDataset, SeparateDatasets
from .client_ids import check_client_ids, check_id_list, check_known
from .partitioners.base import Partition
from .partitioners.natural import NaturalPartitioner
from .remote_datasets import RemoteDatasets
from .source import DatasetSource
from .torch_datasets import concatenate, is_map_style


if TYPE_CHECKING:
    from typing_extensions import Self


class ClientMapping(Mapping[str, ClientData]):
    """
    A lazy mapping from client id to the dataset of this client. [`FederatedDataset`] describes the arguments.

    Args:
        rows ([`ClientDatasets`]): The datasets of the clients.
        partitioning (`dict[str, Any]`, *optional*): The partitioning method for dataset cards.
        origin ([`DatasetSource`], *optional*): The dataset on the Hub that was partitioned.
    """

    def __init__(
        self,
        rows: ClientDatasets,
        partitioning: dict[str, Any] | None = None,
        origin: DatasetSource | None = None,
    ) -> None:
        self.rows = rows
        self.partitioning = partitioning
        self.origin = origin

    def __getitem__(self, client_id: str) -> Any:
        check_known([client_id], self.rows.positions)
        return self.rows.open(client_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.client_ids)

    def __len__(self) -> int:
        return len(self.rows.client_ids)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self.rows.positions

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        lines = [f"num_clients: {len(self)}", f"num_rows: {self._describe_sizes()}", f"columns: {self.column_names}"]
        if self.partitioning is not None:
            lines.append(f"partitioning: {self.partitioning}")
        return f"{type(self).__name__}({{\n    " + ",\n    ".join(lines) + "\n})"

    @property
    def client_ids(self) -> list[str]:
        """The ids of the clients, in order."""
        return list(self.rows.client_ids)

    @property
    def is_remote(self) -> bool:
        """Whether the clients are on other machines, so that their examples cannot be read."""
        return isinstance(self.rows, RemoteDatasets)

    @property
    def num_rows(self) -> dict[str, Any]:
        """`dict[str, int]`: Number of rows of each client. No client is opened. `None` for an `IterableDataset`."""
        return dict(zip(self.rows.client_ids, self.rows.num_rows(), strict=True))

    @property
    def column_names(self) -> list[str]:
        """The columns that all clients have. Empty if the columns are unknown before rows are read."""
        return self.rows.column_names

    @property
    def features(self) -> Features | None:
        """The types of the columns, including label names. `None` if they are unknown before rows are read."""
        return self.rows.features

    @property
    def naming_columns(self) -> list[str]:
        """The columns that name the client of a row, whether they were kept or dropped when it was partitioned."""
        return _naming_columns(self.partitioning or {})

    @property
    def source(self) -> Dataset | None:
        """The dataset that was partitioned, with the columns of the clients; `None` for separate datasets."""
        return self.rows.source if isinstance(self.rows, PartitionedDataset) else None

    @property
    def partition(self) -> Partition | None:
        """The rows of `source` that each client has; `None` if each client has a separate dataset."""
        return self.rows.partition if isinstance(self.rows, PartitionedDataset) else None

    def select_clients(self, client_ids: Sequence[str]) -> Self:
        """
        Return a federated dataset with some of the clients, in the given order.

        Raises:
            `KeyError`: If a client does not exist. The message lists similar ids.
            `ValueError`: If `client_ids` is empty or contains an id twice.
            `TypeError`: If `client_ids` is a string.
        """
        client_ids = client_ids if isinstance(client_ids, str) else list(client_ids)
        check_id_list(client_ids)
        check_known(client_ids, self.rows.positions)
        check_client_ids(client_ids)
        return self._with_rows(self.rows.select(client_ids))

    def to_dataset(self) -> Dataset:
        """
        Return the rows of all clients in one `datasets.Dataset`, in the order of the clients.

        The client ids are lost, unless they are in a column.

        Raises:
            `TypeError`: If a client has an `IterableDataset` or a dataset of torch.
        """
        return self.rows.pooled()

    def pooled_examples(self) -> Any:
        """
        Return the examples of all clients for an evaluation.

        Returns:
            `datasets.Dataset` or `torch.utils.data.ConcatDataset`: [`~FederatedDataset.to_dataset`]. If a client has a
            map-style `torch.utils.data.Dataset`, a `ConcatDataset` of the same examples in the same order.
        """
        datasets = [self[client_id] for client_id in self] if isinstance(self.rows, SeparateDatasets) else []
        return concatenate(datasets) if any(map(is_map_style, datasets)) else self.to_dataset()

    def _with_rows(self, rows: ClientDatasets) -> Self:
        """Return a federated dataset with other rows and the same metadata."""
        return type(self)(rows, self.partitioning, self.origin)

    def _describe_sizes(self) -> str:
        sizes = [size for size in self.num_rows.values() if size is not None]
        if len(sizes) < len(self):
            return f"unknown for {len(self) - len(sizes)} iterable clients, {sum(sizes)} for the remaining clients"
        return f"{sum(sizes)} ({min(sizes)} to {max(sizes)} per client, median {float(np.median(sizes)):g})"


def _naming_columns(partitioning: Mapping[str, Any]) -> list[Any]:
    """Read the columns that name the client of a row from the settings of a partitioner."""
    names_clients = partitioning.get("partitioner") in ("from_column", NaturalPartitioner.__name__)
    nested = [_naming_columns(value) for value in partitioning.values() if isinstance(value, Mapping)]
    return [*([partitioning.get("column")] if names_clients else []), *(column for part in nested for column in part)]
