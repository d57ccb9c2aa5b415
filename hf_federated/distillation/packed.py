"""Predictions of a vocabulary that stay as small as they travelled until a batch of them is needed.

A hundred thousand positions of fifty thousand tokens are 20 GB of each client; their `top_k=64` are 39 MB. What a
method makes of predictions, it makes of each position alone, so it can be made of some positions as well as of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch


# Positions that are unpacked together, where nothing says which belong together.
BLOCK = 256


class PackedRows:
    """
    Rows of numbers that are made when they are asked for.

    Args:
        num_rows (`int`): How many there are.
        rows (`Callable[[torch.Tensor], torch.Tensor]`):
            Makes some of them: from their numbers, int64 of shape `(some,)`, to a tensor of shape `(some, classes)`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.packed import PackedRows

    >>> squares = PackedRows(4, lambda places: places.unsqueeze(1) ** 2)
    >>> len(squares), squares[torch.tensor([3, 1])].tolist()
    (4, [[9], [1]])
    >>> squares.only(torch.tensor([0, 3]))[torch.tensor([1])].tolist()
    [[9]]
    ```
    """

    def __init__(self, num_rows: int, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._num_rows = num_rows
        self._rows = rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, places: torch.Tensor) -> torch.Tensor:
        return self._rows(places)

    def only(self, places: torch.Tensor) -> PackedRows:
        """Some of the rows, by their numbers."""
        return PackedRows(len(places), lambda some: self._rows(places[some]))

    def blocks(self) -> Iterator[torch.Tensor]:
        """All rows, some at a time; at least one block, which is empty if there are none."""
        for _, places in self.places():
            yield self._rows(places)

    def places(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The numbers of the rows of each block, and before them that of the first."""
        for number, places in enumerate(torch.arange(self._num_rows).split(BLOCK)):
            yield number * BLOCK, places


def packed(
    values: Mapping[str, torch.Tensor], decode: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
) -> PackedRows:
    """
    What a codec wrote, a row of each tensor for each row.

    Args:
        values (`Mapping[str, torch.Tensor]`): What came, or will go. It is not trusted.
        decode (`Callable`): Unpacks it, or a part of it.

    Raises:
        ValueError: If the tensors have different numbers of rows.
    """
    lengths = {name: len(value) if value.ndim else 0 for name, value in values.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Encoded predictions hold tensors of different lengths: {lengths}.")
    return PackedRows(
        next(iter(lengths.values())),
        lambda places: decode({name: _take(value, places) for name, value in values.items()}),
    )


def joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What a codec wrote of blocks of rows, as it would have written it of all of them."""
    return {
        name: torch.cat([part[name].view(_indexable(part[name])) for part in parts]).view(parts[0][name].dtype)
        for name in parts[0]
    }


def _take(value: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return value.view(_indexable(value))[places].view(value.dtype)


def _indexable(value: torch.Tensor) -> torch.dtype:
    """torch has no operations on uint16 in all the versions that are supported."""
    return torch.int16 if value.dtype == torch.uint16 else value.dtype
