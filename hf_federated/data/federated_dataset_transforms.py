"""The methods of `FederatedDataset` that change rows and columns, as in `datasets.DatasetDict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, IterableDataset, Value

from .client_datasets import SeparateDatasets
from .client_mapping import ClientMapping
from .column_values import check_columns, is_categorical, rank_values, read_column
from .row_selection import client_generator


if TYPE_CHECKING:
    from typing_extensions import Self


class FederatedDatasetTransformsMixin(ClientMapping):
    """
    The methods of [`FederatedDataset`] that change rows and columns.

    Each method returns a new federated dataset. A method that only selects or renames does not read rows.
    """

    def map(self, function: Callable[..., Any] | None = None, *, by_client: bool = False, **kwargs: Any) -> Self:
        """
        Apply [`datasets.Dataset.map`] to all rows and keep the assignment of rows to clients.

        A partitioned dataset is mapped in one call instead of client by client, and only the rows that belong to a
        client are mapped. A batch, and the row numbers of `with_indices`, can therefore cover rows of several clients.
        Clients of `from_dict` are mapped one after the other, with one progress bar.

        A script that maps its dataset before it builds the trainer maps the federated dataset instead. The rows can
        also be mapped first and then partitioned, as long as the column with the client remains.

        Args:
            function (`Callable`, *optional*):
                As in `datasets.Dataset.map`. It must return one row for each row, unless `by_client=True`.
            by_client (`bool`, *optional*, defaults to `False`):
                Whether to map the clients one after the other, so that all rows of a batch belong to one client. The
                number of rows may then change, as with a function that joins the texts of a batch and cuts them into
                blocks. Each client then has a separate dataset.
            kwargs (*optional*):
                Passed to `datasets.Dataset.map`.

        Raises:
            `ValueError`: If the number of rows changes without `by_client=True`, if no row of a client remains, or if
                separate client datasets would share a cache file or fingerprint.
            `TypeError`: If a client has a dataset of torch.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated import FederatedDataset
        >>> reviews = Dataset.from_dict({"movie": ["Up", "Heat", "Up"], "text": ["good", "bad bad", "so so so"]})
        >>> clients = FederatedDataset.from_column(reviews, "movie")
        >>> def preprocess(rows):
        ...     return {"length": [len(text.split()) for text in rows["text"]]}
        >>> clients = clients.map(preprocess, batched=True, remove_columns=clients.column_names)
        >>> clients["Up"]["length"][:]
        [1, 3]

        ```
        """
        self._check_cache_arguments("map", kwargs, by_client)
        label = kwargs.get("desc") or "Map"
        if by_client:
            separate = SeparateDatasets({client_id: self.rows.open(client_id) for client_id in self.rows.client_ids})
            return self._with_rows(
                SeparateDatasets({i: rows.map(function, **kwargs) for i, rows in separate._with_progress(label)})
            )
        return self._transform(lambda dataset: dataset.map(function, **kwargs), label)

    def filter(
        self, function: Callable[..., Any] | None = None, drop_empty_clients: bool = False, **kwargs: Any
    ) -> Self:
        """
        Keep the rows for which a function is true, as [`datasets.Dataset.filter`].

        A partitioned dataset is filtered in one call, and rows are not copied. A batch, and the row numbers of
        `with_indices`, can therefore cover rows of several clients.

        Args:
            function (`Callable`, *optional*):
                As in `datasets.Dataset.filter`.
            drop_empty_clients (`bool`, *optional*, defaults to `False`):
                Whether to leave out clients of which no row remains.
            kwargs (*optional*):
                Passed to `datasets.Dataset.filter`.

        Raises:
            `ValueError`: If no row of a client remains, unless `drop_empty_clients=True`; if no row of any client
                remains; or if separate client datasets would share a cache file or fingerprint.
            `TypeError`: If a client has a dataset of torch.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated import FederatedDataset
        >>> rows = Dataset.from_dict({"site": ["a", "a", "b"], "label": [0, -1, -1]})
        >>> clients = FederatedDataset.from_column(rows, "site")
        >>> clients.filter(lambda row: row["label"] >= 0, drop_empty_clients=True).num_rows
        {'a': 1}

        ```
        """
        self._check_cache_arguments("filter", kwargs)
        rows, empty = self.rows.filter(function, **kwargs)
        if not rows.client_ids:
            raise ValueError("filter: the function is false for all rows of all clients, so no client remains.")
        if empty and not drop_empty_clients:
            shown = ", ".join(map(repr, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            raise ValueError(
                f"filter: no row remains of {len(empty)} clients: {shown}. Pass drop_empty_clients=True to leave these"
                " clients out, or change the function."
            )
        return self._with_rows(rows)

    def shuffle(self, seed: int = 0, buffer_size: int = 1000) -> Self:
        """
        Shuffle the rows within each client. The order of the clients does not change.

        The order depends on the seed and the id of the client only. A client therefore has the same order whichever
        other clients exist.

        Args:
            seed (`int`, *optional*, defaults to `0`):
                Random seed.
            buffer_size (`int`, *optional*, defaults to `1000`):
                Number of rows in the buffer of a client with a `datasets.IterableDataset`.

        Raises:
            `TypeError`: If a client is a `torch.utils.data.IterableDataset`.
        """
        generators = {client_id: client_generator(seed, client_id) for client_id in self.rows.client_ids}
        sizes = self.num_rows
        if None not in sizes.values():
            orders = {i: generators[i].permutation(size or 0) for i, size in sizes.items()}
            return self._with_rows(self.rows.take(orders))
        shuffled: dict[str, Any] = {}
        for client_id, generator in generators.items():
            rows = self.rows.open(client_id)
            if isinstance(rows, IterableDataset):
                shuffled[client_id] = rows.shuffle(seed=int(generator.integers(2**32)), buffer_size=buffer_size)
            else:
                order = generator.permutation(sizes[client_id] or 0)
                shuffled[client_id] = self.rows.select([client_id]).take({client_id: order}).open(client_id)
        return self._with_rows(SeparateDatasets(shuffled))

    def with_transform(
        self, transform: Callable[..., Any], columns: list[str] | None = None, output_all_columns: bool = False
    ) -> Self:
        """
        Apply a function to rows when they are read, as [`datasets.Dataset.with_transform`].

        As in `Trainer`, set `remove_unused_columns=False` if the function reads columns that the model does not take.

        Args:
            transform (`Callable`):
                Takes a batch as a dictionary and returns a batch. `with_format(None)` removes the function.
            columns (`list[str]`, *optional*):
                The columns that the function gets. Defaults to all columns.
            output_all_columns (`bool`, *optional*, defaults to `False`):
                Whether the other columns are returned, too.

        Raises:
            `TypeError`: If a client is a stream. `map` of an `IterableDataset` runs when rows are read.
        """
        self._check_not_streams("with_transform", " Use map, which runs when the rows of a stream are read.")
        return self._transform(lambda dataset: dataset.with_transform(transform, columns, output_all_columns))

    def with_format(
        self,
        type: str | None = None,
        columns: list[str] | None = None,
        output_all_columns: bool = False,
        **kwargs: Any,
    ) -> Self:
        """
        Set the type in which rows are read, such as `"numpy"` or `"torch"`, as [`datasets.Dataset.with_format`].

        Raises:
            `TypeError`: If a client is a stream.
        """
        self._check_not_streams("with_format")
        return self._transform(lambda dataset: dataset.with_format(type, columns, output_all_columns, **kwargs))

    def class_encode_column(self, column: str, include_nulls: bool = False) -> Self:
        """
        Convert a column to `ClassLabel`, as [`datasets.Dataset.class_encode_column`].

        All clients get the same class names in the same order: the sorted values of all clients. A client may lack
        some of them.

        Args:
            column (`str`):
                A column of strings, integers, booleans or dates. As in `datasets`, the names are sorted as strings.
            include_nulls (`bool`, *optional*, defaults to `False`):
                Whether missing values become the class `"None"`. Otherwise, they stay missing.

        Raises:
            `ValueError`: If the column does not exist, or already is a `ClassLabel`.
            `TypeError`: If a client is a stream, or if the column type cannot name classes.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated import FederatedDataset
        >>> north, south = Dataset.from_dict({"label": ["good", "bad"]}), Dataset.from_dict({"label": ["poor"]})
        >>> clients = FederatedDataset.from_dict({"north": north, "south": south}).class_encode_column("label")
        >>> clients.features["label"].names
        ['bad', 'good', 'poor']
        >>> clients["south"]["label"][:]
        [2]

        ```
        """
        return self.encode_classes(column, sorted(self.class_names(column, include_nulls)), include_nulls)

    def class_names(self, column: str, include_nulls: bool = False) -> set[str]:
        """Return the values of a column in all clients, as [`~FederatedDataset.class_encode_column`] names them."""
        feature = self._column(column, "class_encode_column").features[column]
        if not isinstance(feature, Value):
            raise ValueError(
                f"class_encode_column: the column {column!r} is a {type(feature).__name__}, expected a column of"
                " values. A ClassLabel already has names; to rename the classes, use cast_column."
            )
        codes, values = self._ranked(column, "class_encode_column")
        return {str(value) for value in values} | ({"None"} if include_nulls and (codes < 0).any() else set())

    def encode_classes(self, column: str, names: Sequence[str], include_nulls: bool = False) -> Self:
        """Convert a column to `ClassLabel` with the given names. Every value must be one of the names."""
        codes = {name: code for code, name in enumerate(names)}
        encode = partial(_encode_classes, column=column, codes=codes, null="None" if include_nulls else None)

        def convert(dataset: Dataset) -> Dataset:
            features = Features({**dataset.features, column: ClassLabel(names=list(names))})
            # With a format, the function would receive tensors or transformed rows instead of the values.
            plain = dataset.with_format(None)
            encoded = plain.map(encode, batched=True, features=features, desc="Encoding classes")
            form = dataset.format
            columns = None if form["columns"] == dataset.column_names else form["columns"]
            return encoded.with_format(form["type"], columns, form["output_all_columns"], **form["format_kwargs"])

        return self._transform(convert, "Encoding classes")

    def remove_columns(self, column_names: str | list[str]) -> Self:
        """Remove columns. Raises `ValueError` with the existing columns if a column does not exist."""
        self._check_columns(column_names)
        return self._transform(lambda dataset: dataset.remove_columns(column_names))

    def select_columns(self, column_names: str | list[str]) -> Self:
        """Keep only these columns. Raises `ValueError` with the existing columns if a column does not exist."""
        self._check_columns(column_names)
        return self._transform(lambda dataset: dataset.select_columns(column_names))

    def rename_column(self, original_column_name: str, new_column_name: str) -> Self:
        """Rename a column. Raises `ValueError` if the column does not exist, or if the new name already exists."""
        self._check_columns(original_column_name)
        return self._transform(lambda dataset: dataset.rename_column(original_column_name, new_column_name))

    def rename_columns(self, column_mapping: dict[str, str]) -> Self:
        """Rename several columns. Raises `ValueError` as [`~FederatedDataset.rename_column`]."""
        self._check_columns(list(column_mapping))
        return self._transform(lambda dataset: dataset.rename_columns(column_mapping))

    def cast_column(self, column: str, feature: Any) -> Self:
        """Cast a column to another feature, for example `ClassLabel(names=["bad", "good"])`."""
        self._check_columns(column)
        return self._transform(lambda dataset: dataset.cast_column(column, feature))

    def _transform(self, function: Callable[[Any], Any], label: str | None = None) -> Self:
        return self._with_rows(self.rows.transform(function, label))

    def _check_cache_arguments(self, method: str, kwargs: Mapping[str, Any], by_client: bool = False) -> None:
        is_separate = (by_client or isinstance(self.rows, SeparateDatasets)) and len(self.rows.client_ids) > 1
        for name in ("cache_file_name", "new_fingerprint"):
            if is_separate and kwargs.get(name) is not None:
                raise ValueError(
                    f"{method}: {name} would give all clients the rows of the first client. Remove {name}."
                )

    def _check_columns(self, columns: str | list[str]) -> None:
        if not self.column_names:  # an `IterableDataset` may not know its columns before its rows are read
            return
        required = [columns] if isinstance(columns, str) else list(columns)
        for column in self.naming_columns:
            if column in required and column not in self.column_names:
                raise ValueError(
                    f"There is no column {column!r}. The columns are: {', '.join(self.column_names)}. It names the"
                    " clients and was dropped when the dataset was partitioned. Pass keep_column=True there if a later"
                    " step reads the column, else leave this call out."
                )
        check_columns(self.column_names, required)

    def _check_not_streams(self, method: str, advice: str = "") -> None:
        for client_id, num_rows in zip(self.rows.client_ids, self.rows.num_rows(), strict=True):
            if num_rows is None:
                raise TypeError(
                    f"{method}: client {client_id!r} has a stream (IterableDataset), whose rows have no number and no"
                    f" positions.{advice}"
                )

    def _column(self, column: str, method: str) -> Dataset:
        """Return the rows of all clients, and check that they have a column."""
        self._check_not_streams(method)
        self._check_columns(column)
        return self.rows.pooled()

    def _ranked(self, column: str, method: str) -> tuple[np.ndarray, list[Any]]:
        """Return the rank of the value of each row, and the distinct values in order."""
        values, rows = read_column(self._column(column, method), column)
        if not is_categorical(values.type):
            raise TypeError(
                f"{method}: the column {column!r} has the type {values.type}. Use a column of strings, integers,"
                f' booleans or dates, or cast the column: clients.cast_column({column!r}, Value("string")).'
            )
        return rank_values(values, rows)


def _encode_classes(
    rows: dict[str, list[Any]], column: str, codes: Mapping[str, int], null: str | None
) -> dict[str, list[int | None]]:
    names = (null if value is None else str(value) for value in rows[column])
    return {column: [None if name is None else codes[name] for name in names]}
