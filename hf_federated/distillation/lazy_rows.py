"""Predictions over a vocabulary that stay encoded until a batch of them is needed.

Logits of 100,000 positions over 50,000 tokens take 20 GB per client. With `top_k=64` they take 39 MB. A method
combines the predictions of each position independently, so it can process the positions block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..utils.weighted_mean import Tensors


# Number of rows that are decoded together.
BLOCK_SIZE = 256


class LazyRows:
    """
    A matrix whose rows are computed when they are needed.

    Args:
        num_rows (`int`): Number of rows.
        rows (`Callable[[torch.Tensor], torch.Tensor]`):
            Computes rows: maps int64 indices of shape `(n,)` to a tensor of shape `(n, classes)`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.lazy_rows import LazyRows

    >>> squares = LazyRows(4, lambda indices: indices.unsqueeze(1) ** 2)
    >>> len(squares), squares[torch.tensor([3, 1])].tolist()
    (4, [[9], [1]])
    >>> squares.select(torch.tensor([0, 3]))[torch.tensor([1])].tolist()
    [[9]]
    ```
    """

    def __init__(self, num_rows: int, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._num_rows = num_rows
        self._rows = rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, indices: torch.Tensor) -> torch.Tensor:
        return self._rows(indices)

    def select(self, indices: torch.Tensor) -> LazyRows:
        """Select rows by index, without computing them."""
        return LazyRows(len(indices), lambda selected: self._rows(indices[selected]))

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield all rows in blocks of `BLOCK_SIZE`. If there are no rows, yield one empty block."""
        for _, indices in self.index_blocks():
            yield self._rows(indices)

    def index_blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the index of the first row and the indices of all rows of each block."""
        for number, indices in enumerate(torch.arange(self._num_rows).split(BLOCK_SIZE)):
            yield number * BLOCK_SIZE, indices


def decode_lazily(values: Tensors, decode: Callable[[Tensors], torch.Tensor]) -> LazyRows:
    """
    Decode the encoded rows when they are needed.

    Args:
        values (`Mapping[str, torch.Tensor]`): Encoded tensors. The first dimension of each tensor counts the rows. The
            tensors may come from an untrusted sender.
        decode (`Callable`): Decodes the tensors, or a selection of their rows.

    Raises:
        ValueError: If the tensors have different numbers of rows.
    """
    lengths = {name: len(value) if value.ndim else 0 for name, value in values.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"Encoded predictions contain tensors of different lengths: {lengths}. Expected one entry for each row in "
            "every tensor."
        )
    return LazyRows(
        next(iter(lengths.values())),
        lambda indices: decode({name: _take(value, indices) for name, value in values.items()}),
    )


def concatenate_encoded(parts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Concatenate encoded blocks of rows, as if all rows had been encoded at once."""
    return {
        name: torch.cat([part[name].view(_indexable(part[name])) for part in parts]).view(parts[0][name].dtype)
        for name in parts[0]
    }


def _take(value: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return value.view(_indexable(value))[indices].view(value.dtype)


def _indexable(value: torch.Tensor) -> torch.dtype:
    """The dtype in which a tensor is indexed: int16 for uint16, because some versions of torch cannot index uint16."""
    return torch.int16 if value.dtype == torch.uint16 else value.dtype
