"""`ResidentRows`: encoded examples as tensors, read and collated once for all clients of a process.

A `datasets.Dataset` decodes an example at each access, and a collator converts it to tensors. For small models, this
takes longer than training. This module keeps the tensors of the rows that were read and selects each batch from them.
A batch is equal to the collator's bit for bit: the same keys in the same order, the same types and the same values.

Rows are kept only for a `datasets.Dataset` without a transform (`set_transform`) and a collator on the list of
[`pure_collators`][hf_federated.clients.pure_collators]. A collator that draws random numbers, such as one that masks
tokens, runs for each batch. Rows that the tensors cannot represent exactly, such as rows with missing values or with
different shapes, are also read and collated for each batch.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset

from .._compat import dataset_fingerprint
from .pure_collators import PureCollator, describe


# Bytes of the rows that a process keeps. Rows that do not fit are read again for each batch.
MAX_RESIDENT_BYTES = 256 * 2**20

# Batches that are selected together, if their columns are not padded.
_BATCHES_PER_SELECTION = 16

_CPU = torch.device("cpu")

# Formats in which an access to several examples returns the same examples as single accesses.
_PLAIN_FORMATS = (None, "numpy", "torch")


def read_rows(dataset: Any, indices: Sequence[int] | torch.Tensor) -> list[Any]:
    """
    Return `[dataset[index] for index in indices]`.

    A `datasets.Dataset` is read in one access, except with a transform, which may draw random numbers for each access.

    Args:
        dataset (`datasets.Dataset` or `torch.utils.data.Dataset`): Examples with positions.
        indices (`Sequence[int]`): Positions of the examples.
    """
    numbers = [int(index) for index in indices]
    if isinstance(dataset, Dataset) and _is_plain(dataset) and dataset.column_names and numbers:
        rows: list[Any] = dataset.__getitems__(numbers)
        return rows
    return [dataset[number] for number in numbers]


def _is_plain(dataset: Dataset) -> bool:
    return dataset.format["type"] in _PLAIN_FORMATS


class ResidentRows:
    """
    Rows of datasets as tensors, within a budget of bytes. All methods may be called from several threads.

    Datasets with the same fingerprint share their rows, if their collators have the same settings. The rows of a
    dataset are dropped when the last of these datasets is deleted. If the budget is exceeded, the least recently used
    rows are dropped. Rows that exceed the budget alone are not kept. Memory grows only with the rows that were read.

    Args:
        max_bytes (`int`, *optional*): The budget. With 0, no rows are kept.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from transformers import default_data_collator
    >>> from hf_federated.clients.resident_rows import ResidentRows

    >>> rows = ResidentRows()
    >>> rows.batch(Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]]}), [1], default_data_collator)
    {'x': tensor([[3., 4.]])}

    ```
    """

    def __init__(self, max_bytes: int = MAX_RESIDENT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Rows] = {}  # in the order of their last use
        self._num_bytes = 0
        # Deleted datasets whose rows are not dropped yet: the key, the rows, and the reference to the dataset.
        self._deleted: deque[tuple[Hashable, _Rows, weakref.ref[Dataset]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, including the bytes of rows that were not read yet."""
        with self._lock:
            self._drop_deleted()
            return self._num_bytes

    def clear(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def batch(self, dataset: Any, indices: Sequence[int] | torch.Tensor, collator: Any) -> Any:
        """
        Return `collator([dataset[index] for index in indices])`, from kept rows where possible.

        Args:
            dataset (`datasets.Dataset` or `torch.utils.data.Dataset`): Encoded examples with positions.
            indices (`Sequence[int]`): Positions of the examples.
            collator (`Callable`): The data collator.

        Returns:
            The batch, in new tensors that the caller may change.
        """
        pure = self._describe(dataset, collator) if len(indices) else None
        if pure is not None:
            numbers = torch.as_tensor(indices, dtype=torch.int64, device=_CPU)
            with self._lock:
                batch = self._held_batch(dataset, numbers, collator, pure)
            if batch is not None:
                return batch
        return collator(read_rows(dataset, indices))

    def batches(self, dataset: Any, indices_of_batches: Iterable[Sequence[int]], collator: Any) -> Iterator[Any]:
        """
        Yield the batch of each list of indices, as [`~ResidentRows.batch`]. One selection reads several batches.

        Args:
            dataset (`datasets.Dataset` or `torch.utils.data.Dataset`): Encoded examples with positions.
            indices_of_batches (`Iterable[Sequence[int]]`): Positions of the examples of each batch.
            collator (`Callable`): The data collator.
        """
        remaining = iter(indices_of_batches)
        while chunk := list(itertools.islice(remaining, _BATCHES_PER_SELECTION)):
            selected = self._selected(dataset, chunk, collator)
            yield from (self.batch(dataset, each, collator) for each in chunk) if selected is None else selected

    def _selected(self, dataset: Any, chunk: list[Sequence[int]], collator: Any) -> list[Any] | None:
        """Several batches from one selection, or `None` if a row was not read yet or a column is padded."""
        pure = self._describe(dataset, collator)
        if pure is None:
            return None
        key = (dataset_fingerprint(dataset), len(dataset), pure)
        with self._lock:
            self._drop_deleted()
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._entries[key] = entry
            return entry.read_together(chunk)

    def _describe(self, dataset: Any, collator: Any) -> PureCollator | None:
        """The description of a collator, if the rows of a dataset can be kept for it."""
        is_kept = self.max_bytes and type(dataset) is Dataset and torch.get_default_device() == _CPU
        return describe(collator) if is_kept else None

    def _held_batch(self, dataset: Dataset, indices: torch.Tensor, collator: Any, pure: PureCollator) -> Any:
        """A batch from kept rows, or `None` if the rows cannot be kept."""
        self._drop_deleted()
        key = (dataset_fingerprint(dataset), len(dataset), pure)
        entry = self._entries.pop(key, None)
        if entry is None:
            with torch.inference_mode(False):  # tensors of the inference mode cannot be changed later
                entry = _Rows(dataset, pure)
        self._entries[key] = entry
        if id(dataset) not in entry.users:
            entry.users[id(dataset)] = weakref.ref(dataset, partial(self._forget, key, entry))
        if entry.is_refused:
            return None
        missing = entry.missing(indices)
        if not missing:
            return entry.read(indices)
        rows = read_rows(dataset, missing)
        has_values = all(value is not None for row in rows for value in row.values())
        collated = collator(rows) if has_values else None
        fits = has_values and entry.fits(collated) and self._allocate(entry, collated)
        if not fits or not entry.write(torch.tensor(missing), collated):
            self._num_bytes -= entry.num_bytes
            entry.refuse()
            return None
        return collated if len(missing) == len(indices) else entry.read(indices)

    def _allocate(self, entry: _Rows, collated: Any) -> bool:
        """
        Create the tensors of the rows that were used last. For this, drop the rows whose last use is longest ago.

        Returns:
            `bool`: Whether the tensors exist. They do not if they exceed the budget.
        """
        if entry.num_bytes:
            return True
        needed = entry.bytes_for(collated)
        if needed > self.max_bytes:
            return False
        while self._num_bytes + needed > self.max_bytes:
            self._remove(next(iter(self._entries)))
        with torch.inference_mode(False):
            entry.allocate(collated)
        self._num_bytes += needed
        return True

    def _remove(self, key: Hashable) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes

    def _forget(self, key: Hashable, entry: _Rows, dataset: weakref.ref[Dataset]) -> None:
        """Drop the rows of a deleted dataset. If the lock is taken, the next use of the rows drops them."""
        # Garbage collection can call this method at any time, also in a thread that has the lock.
        self._deleted.append((key, entry, dataset))
        if self._lock.acquire(blocking=False):
            try:
                self._drop_deleted()
            finally:
                self._lock.release()

    def _drop_deleted(self) -> None:
        while self._deleted:
            key, entry, dataset = self._deleted.popleft()
            entry.users = {number: user for number, user in entry.users.items() if user is not dataset}
            if not entry.users and self._entries.get(key) is entry:
                self._remove(key)


class _Rows:
    """
    The rows of one dataset.

    Columns of one shape are tensors of shape `(rows, ...)`. The values of a padded column are one tensor without
    padding, with the padding value at index 0.
    """

    def __init__(self, dataset: Dataset, pure: PureCollator) -> None:
        self.users: dict[int, weakref.ref[Dataset]] = {}
        self._pure = pure
        self._padded = {name: (length_of, fill) for name, length_of, fill in pure.padded}
        self._starts: dict[str, torch.Tensor] = {}
        self._lengths: dict[str, torch.Tensor] = {}
        self._columns: dict[str, torch.Tensor] = {}
        self._container: Any = None
        self._is_read = torch.zeros(len(dataset), dtype=torch.bool)
        self._is_complete = False
        types = dataset.features.arrow_schema.types
        self.is_refused = not _is_plain(dataset) or not all(map(_has_one_type, types))
        for name in {length_of for length_of, _ in self._padded.values()} & set(dataset.column_names):
            lengths = _row_lengths(dataset, name)
            if lengths is None:
                self.refuse()
                return
            self._lengths[name] = lengths
            self._starts[name] = lengths.cumsum(0) - lengths + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self._columns.values())

    def refuse(self) -> None:
        """Mark the rows as rows that are read and collated for each batch."""
        self.is_refused = True
        self._starts, self._lengths, self._columns = {}, {}, {}

    def missing(self, indices: torch.Tensor) -> list[int]:
        """The rows of a batch that were not read yet, in the order of the batch."""
        if self._is_complete:
            return []
        return list(dict.fromkeys(indices[~self._is_read[indices]].tolist()))

    def fits(self, collated: Any) -> bool:
        """Whether tensors as those of a collated batch represent all rows exactly."""
        if self._columns and (type(collated) is not self._container or list(collated) != list(self._columns)):
            return False
        return all(self._column_fits(name, value) for name, value in collated.items())

    def _column_fits(self, name: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.ndim:
            return False
        if name in self._padded and (self._padded[name][0] not in self._lengths or value.ndim != 2):
            return False
        column = self._columns.get(name)
        return column is None or name in self._padded or column.shape[1:] == value.shape[1:]

    def _shape_of(self, name: str, value: torch.Tensor) -> tuple[int, ...]:
        if name in self._padded:
            return (1 + int(self._lengths[self._padded[name][0]].sum()),)
        return (len(self._is_read), *value.shape[1:])

    def bytes_for(self, collated: Any) -> int:
        """Bytes of the tensors of all rows."""
        shapes = [torch.Size(self._shape_of(name, value)).numel() for name, value in collated.items()]
        return sum(size * value.element_size() for size, value in zip(shapes, collated.values(), strict=True))

    def allocate(self, collated: Any) -> None:
        """Create the tensors. The operating system provides their memory when rows are written."""
        self._container = type(collated)
        for name, value in collated.items():
            self._columns[name] = torch.empty(self._shape_of(name, value), dtype=value.dtype)
            if name in self._padded:
                self._columns[name][0] = self._padded[name][1]

    def write(self, indices: torch.Tensor, collated: Any) -> bool:
        """Keep collated rows. Return whether the kept rows give the same batch."""
        positions = self._positions(indices)
        for name, value in collated.items():
            if name not in self._padded:
                self._columns[name][indices] = value
                continue
            length_of, fill = self._padded[name]
            place, kept = positions[length_of], self._columns[name]
            if place.shape != value.shape:
                return False
            kept.index_copy_(0, place.flatten(), value.flatten())
            kept[0] = fill
            if not torch.equal(kept.index_select(0, place.flatten()), value.flatten()):
                return False
        self._is_read[indices] = True
        self._is_complete = bool(self._is_read.all())
        return True

    def read(self, indices: torch.Tensor) -> Any:
        """The batch of rows that were written."""
        positions = self._positions(indices)
        batch = {}
        for name, column in self._columns.items():
            if name in self._padded:
                place = positions[self._padded[name][0]]
                batch[name] = column.index_select(0, place.flatten()).view(place.shape)
            else:
                batch[name] = column.index_select(0, indices)
        return batch if self._container is dict else self._container(batch)

    def read_together(self, chunk: list[Sequence[int]]) -> list[Any] | None:
        """Several batches of rows that were written, or `None` if a row was not read yet or a column is padded."""
        indices = torch.tensor(list(itertools.chain.from_iterable(chunk)), dtype=torch.int64)
        if not self._columns or not self._padded.keys().isdisjoint(self._columns) or self.missing(indices):
            return None
        sizes = [len(each) for each in chunk]
        parts = [column.index_select(0, indices).split(sizes) for column in self._columns.values()]
        batches: list[Any] = [dict(zip(self._columns, values, strict=True)) for values in zip(*parts, strict=True)]
        return batches if self._container is dict else [self._container(batch) for batch in batches]

    def _positions(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        The indices of the values of padded rows, 0 for padding.

        Returns:
            `dict[str, torch.Tensor]`: Indices of shape `(rows, longest row)`, by the column whose length counts.
        """
        found = {}
        for name, all_lengths in self._lengths.items():
            lengths = all_lengths[indices].unsqueeze(1)
            multiple = self._pure.multiple
            width = -(-int(lengths.max()) // multiple) * multiple
            offsets = torch.arange(width) - (width - lengths if self._pure.pads_left else 0)
            is_value = offsets >= 0 if self._pure.pads_left else offsets < lengths
            found[name] = torch.where(is_value, self._starts[name][indices].unsqueeze(1) + offsets, 0)
        return found


def _has_one_type(kind: pa.DataType) -> bool:
    """Whether the values of a column are numbers, truth values or texts, or lists of them. JSON values can be any."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _has_one_type(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return is_number or types.is_string(kind) or types.is_large_string(kind)


def _row_lengths(dataset: Dataset, name: str) -> torch.Tensor | None:
    """The lengths of the lists of a column, int64. `None` if a row has no list, or an empty list."""
    parts = []
    for table in dataset.with_format("arrow").select_columns([name]).iter(1000):
        kind, column = table.schema.field(name).type, table[name]
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return None
        if column.null_count:
            return None
        parts.append(torch.as_tensor(pc.list_value_length(column).to_numpy().copy(), dtype=torch.int64))
    lengths = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    # A batch of empty lists has no value that defines its type.
    return lengths if len(lengths) and bool(lengths.all()) else None


# The rows of this process. All clients share them.
RESIDENT_ROWS = ResidentRows()
