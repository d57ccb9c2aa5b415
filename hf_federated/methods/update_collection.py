"""`UpdateCollection`: the updates of a round in a temporary file, for algorithms that compare all updates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..utils.weighted_mean import State, Tensors, wide_dtype


# Every tensor starts at a multiple of this number of bytes, so that it can be read in its dtype.
ALIGNMENT = 16
# Number of bytes that processes exchange at a time.
TRANSFER_BYTES = 2**24
# Largest number of coordinates of a block. Small blocks stay in the cache.
MAX_COLUMNS = 2**17


class UpdateCollection:
    """
    The states of a round's updates in one temporary file, read in blocks of coordinates.

    The file holds the states in their dtypes, so it has the size of the state times the number of clients. It has no
    name: the operating system removes it with the process, even if the process is killed. Memory is limited by
    `max_memory_mb` and does not grow with the number of clients.

    The clients have the order of their ids, so that nothing depends on the order in which the updates arrive or on the
    assignment of clients to processes.

    Args:
        reference (`Mapping[str, torch.Tensor]`):
            The global state that the clients received. Its tensors are not copied.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for a block of coordinates of all clients, in MB.
        directory (`str`, *optional*):
            Directory of the file. Defaults to the directory for temporary files of the system, which the environment
            variable `TMPDIR` sets.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import UpdateCollection

    >>> updates = UpdateCollection({"w": torch.zeros(3)})
    >>> updates.add("b", {"w": torch.tensor([1.0, 2.0, 3.0])})
    >>> updates.add("a", {"w": torch.tensor([4.0, 5.0, 6.0])})
    >>> updates.client_ids
    ['a', 'b']
    >>> [block for start, stop, block in updates.blocks("w")]
    [tensor([[4., 5., 6.],
            [1., 2., 3.]])]
    >>> updates.close()
    ```
    """

    def __init__(self, reference: Tensors, max_memory_mb: float = 256, directory: str | None = None) -> None:
        self.reference: State = dict(reference)
        self.block_bytes = int(max_memory_mb * 1e6)
        self._directory = directory
        self._file: Any = None
        # The place of each client's state in the file, and its weight.
        self._slots: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        sizes = [-(-value.nbytes // ALIGNMENT) * ALIGNMENT for value in self.reference.values()]
        *offsets, self.state_bytes = accumulate(sizes, initial=0)
        self._offsets = dict(zip(self.reference, offsets, strict=True))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def client_ids(self) -> list[str]:
        """Ids of the clients, sorted. All rows have this order."""
        return sorted(self._slots)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each client, in the order of the rows."""
        return {client_id: self._weights[client_id] for client_id in self.client_ids}

    @property
    def floating_names(self) -> list[str]:
        """Names of the floating tensors."""
        return [name for name, value in self.reference.items() if value.is_floating_point()]

    @property
    def other_names(self) -> list[str]:
        """Names of the integer and boolean tensors."""
        return [name for name, value in self.reference.items() if not value.is_floating_point()]

    def add(self, client_id: str, state: Tensors, weight: float = 1.0) -> None:
        """
        Add the state of a client.

        Args:
            client_id (`str`): Id of the client.
            state (`Mapping[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of the reference.
            weight (`float`, *optional*, defaults to `1.0`): Weight of the client.

        Raises:
            ValueError: If the client has already been added.
            OSError: If the file system has no space. The message names the needed space.
        """
        slot = self._reserve(client_id, weight)
        for name in self.reference:
            data = state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._write(slot * self.state_bytes + self._offsets[name], data)
        if self._file is not None:
            # The padding behind the last tensor.
            self._file.truncate((slot + 1) * self.state_bytes)

    def _reserve(self, client_id: str, weight: float) -> int:
        if client_id in self._slots:
            raise ValueError(f"Client {client_id!r} has already been added to the collection.")
        self._slots[client_id] = len(self._slots)
        self._weights[client_id] = weight
        return self._slots[client_id]

    def _write(self, position: int, data: torch.Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="hf_federated_updates_")
        try:
            self._file.seek(position)
            self._file.write(data.numpy())
            self._file.flush()
        except OSError as error:
            directory = self._directory or tempfile.gettempdir()
            raise OSError(
                error.errno,
                f"The updates of a round could not be written to {directory!r} ({error.strerror}). They need "
                f"{self.state_bytes / 1e6:.0f} MB for each client of the cohort. Free space, or set the environment "
                "variable TMPDIR to a directory with more space.",
            ) from error

    def _read(self, position: int, data: torch.Tensor) -> None:
        self._file.seek(position)
        if self._file.readinto(data.numpy()) < data.nbytes:
            raise OSError("The temporary file with the updates of the round is shorter than expected.")

    # ---- Reading

    def read(self, client_id: str, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """
        Read values of one tensor of one client.

        Args:
            client_id (`str`): Id of the client.
            name (`str`): Name of the tensor.
            start, stop (`int`, *optional*): Range of the flattened values. Defaults to all values.

        Returns:
            `torch.Tensor` of shape `(stop - start,)`, or of the shape of the tensor: The values, on the CPU.
        """
        reference = self.reference[name]
        size, dtype = reference.dtype.itemsize, reference.dtype
        num_values = (reference.numel() if stop is None else stop) - start
        data = torch.empty(num_values * size, dtype=torch.uint8)
        self._read(self._slots[client_id] * self.state_bytes + self._offsets[name] + start * size, data)
        values = data.view(dtype)
        return values.view(reference.shape) if start == 0 and stop is None else values

    def blocks(self, name: str, client_ids: Sequence[str] | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """
        Read a tensor of all clients in blocks of coordinates.

        Args:
            name (`str`): Name of a floating tensor.
            client_ids (`Sequence[str]`, *optional*): The clients to read. Defaults to all clients.

        Yields:
            `tuple[int, int, torch.Tensor]`: First coordinate, end coordinate, and the values of shape
            `(num_clients, stop - start)` in float32 or wider, on the CPU.
        """
        value = self.reference[name]
        dtype = wide_dtype(value.dtype)
        clients = self.client_ids if client_ids is None else client_ids
        columns = self.num_columns(len(clients))
        for start in range(0, value.numel(), columns):
            stop = min(start + columns, value.numel())
            block = torch.empty(len(clients), stop - start, dtype=dtype)
            for row, client_id in zip(block, clients, strict=True):
                if dtype == value.dtype:
                    offset = self._offsets[name] + start * dtype.itemsize
                    self._read(self._slots[client_id] * self.state_bytes + offset, row.view(torch.uint8))
                else:
                    row.copy_(self.read(client_id, name, start, stop))
            yield start, stop, block

    def num_columns(self, num_rows: int) -> int:
        """Number of coordinates of a block. A computation may use three float64 numbers for each value."""
        return max(1, min(MAX_COLUMNS, self.block_bytes // (24 * max(1, num_rows))))

    def changes(self, name: str, client_ids: Sequence[str] | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Like [`~UpdateCollection.blocks`], with the changes `x_i − x` of the values by the clients, in float64."""
        value = self.reference[name].detach().reshape(-1)
        for start, stop, block in self.blocks(name, client_ids):
            yield start, stop, block.double().sub_(value[start:stop].cpu().double())

    def median_of_integers(self, name: str, client_ids: Sequence[str] | None = None) -> torch.Tensor:
        """
        The element-wise lower median of an integer or boolean tensor.

        Every element is the value of a client, and a minority of the clients cannot choose it.

        Args:
            name (`str`): Name of the tensor.
            client_ids (`Sequence[str]`, *optional*): The clients to use. Defaults to all clients.
        """
        value = self.reference[name]
        clients = self.client_ids if client_ids is None else client_ids
        rows = np.stack([self.read(client_id, name).reshape(-1).numpy() for client_id in clients])
        middle = (len(rows) - 1) // 2
        return torch.from_numpy(np.partition(rows, middle, axis=0)[middle]).view(value.shape).to(value.device)

    # ---- Several processes

    def transfer(self, client_id: str, weight: float) -> Iterator[torch.Tensor]:
        """
        Copy the state of a client between processes, in pieces.

        Every process calls this method for every client, in the same order. The caller replaces each yielded tensor by
        the tensor of the process that has the client, before it takes the next one.

        Args:
            client_id (`str`): Id of the client.
            weight (`float`): Weight of the client.

        Yields:
            `torch.Tensor`: A piece of the state, as bytes.
        """
        has_client = client_id in self._slots
        slot = self._slots[client_id] if has_client else self._reserve(client_id, weight)
        for start in range(0, self.state_bytes, TRANSFER_BYTES):
            piece = torch.zeros(min(TRANSFER_BYTES, self.state_bytes - start), dtype=torch.uint8)
            position = slot * self.state_bytes + start
            if has_client:
                self._read(position, piece)
            yield piece
            if not has_client:
                self._write(position, piece)

    def merge(self, other: UpdateCollection) -> None:
        """
        Add the clients of another collection, and remove its file.

        Args:
            other ([`UpdateCollection`]): A collection of other clients with the same reference.
        """
        for client_id, weight in other.weights.items():
            self.add(client_id, {name: other.read(client_id, name) for name in other.reference}, weight)
        other.clear()

    # ---- End

    def clear(self) -> None:
        """Remove all updates and the file."""
        self.close()
        self._slots, self._weights = {}, {}

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
