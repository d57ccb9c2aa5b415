"""`LazyTensors`: tensors by name that are computed when they are read, a tensor or a piece of a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch


# Computes the values from `start` to `stop` of a flat tensor.
Reader = Callable[[int, int], torch.Tensor]


class LazyTensors(Mapping[str, torch.Tensor]):
    """
    A read-only mapping whose tensors are computed each time they are read. It keeps no computed tensor.

    Args:
        shapes (`Mapping[str, torch.Size]`): Shape of each tensor, by name, in the order of the mapping.
        open (`Callable[[str], Reader]`):
            Returns, for a name, the function that computes the values from `start` to `stop` of the flat tensor.

    Attributes:
        shapes (`dict[str, torch.Size]`): Shape of each tensor, by name. Nothing is computed to read it.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.utils.lazy_tensors import LazyTensors

    >>> source = torch.arange(4.0)
    >>> squares = LazyTensors({"w": torch.Size([2, 2])}, lambda name: lambda start, stop: source[start:stop] ** 2)
    >>> squares["w"].tolist()
    [[0.0, 1.0], [4.0, 9.0]]
    >>> [piece.tolist() for piece in squares.pieces("w", 3)]
    [[0.0, 1.0, 4.0], [9.0]]
    ```
    """

    def __init__(self, shapes: Mapping[str, torch.Size], open: Callable[[str], Reader]) -> None:
        self.shapes = dict(shapes)
        self._open = open

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        return self._open(name)(0, shape.numel()).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def pieces(self, name: str, length: int) -> Iterator[torch.Tensor]:
        """
        Compute a tensor in flat pieces.

        Args:
            name (`str`): Name of the tensor.
            length (`int`): Largest number of values of a piece.
        """
        read, num_values = self._open(name), self.shapes[name].numel()
        for start in range(0, num_values, length):
            yield read(start, min(start + length, num_values))
