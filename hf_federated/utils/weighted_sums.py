"""`WeightedSums`: the sums of a weighted mean, which replace the updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from .lazy_tensors import LazyTensors, Reader


@dataclass(frozen=True, eq=False)
class WeightedSums:
    """
    The sums of a [`WeightedMean`]. Sums of different clients can be added, for example by secure aggregation.

    Args:
        weight (`float`): `Σ_i w_i`.
        num_updates (`int`): Number of states.
        values (`Mapping[str, torch.Tensor]`): `Σ_i w_i (x_i − c)` in float64, by the name of the floating tensor. The
            center `c` is an argument of [`WeightedMean.sums`].

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.utils.weighted_sums import WeightedSums

    >>> WeightedSums(2.0, 1, {"w": torch.ones(1)}) + WeightedSums(3.0, 1, {"w": torch.ones(1)})
    WeightedSums(weight=5.0, num_updates=2, values={'w': tensor([2.])})
    ```
    """

    weight: float
    num_updates: int
    values: Mapping[str, torch.Tensor]

    def __add__(self, other: WeightedSums) -> WeightedSums:
        check_shapes(other.values, shapes_of(self.values))
        values = {name: value + other.values[name] for name, value in self.values.items()}
        return WeightedSums(self.weight + other.weight, self.num_updates + other.num_updates, values)


def shapes_of(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of the floating tensors, without computing lazy tensors."""
    if isinstance(values, LazyTensors):
        return values.shapes
    return {name: value.shape for name, value in values.items() if value.is_floating_point()}


def check_shapes(values: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Raise an error if the names and shapes of the floating tensors are not the expected ones."""
    if (given := shapes_of(values)) != expected:
        different = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
        raise ValueError(
            f"The sums of {different[0]!r} have the shape {given.get(different[0])}, but the shape "
            f"{expected.get(different[0])} is expected. Use the same exchanged tensors for all sums."
        )


def pieces_of(values: Mapping[str, torch.Tensor], name: str, length: int) -> Iterator[torch.Tensor]:
    """Yield the values of a flat tensor in pieces that are not empty. Lazy tensors are computed in pieces."""
    if isinstance(values, LazyTensors):
        yield from values.pieces(name, length)
    else:
        yield from (piece for piece in values[name].detach().reshape(-1).split(length) if len(piece))


def weighted_changes(source: torch.Tensor, center: torch.Tensor | None, weight: float, num_updates: int) -> Reader:
    """Return a function that computes pieces of `Σ_i w_i (x_i − c)` from the sum, or from the state of one update."""
    values = source.detach().reshape(-1)
    centers = None if center is None else center.detach().reshape(-1)
    device = "cpu" if values.device.type == "mps" else values.device

    @torch.no_grad()
    def read(start: int, stop: int) -> torch.Tensor:
        if not num_updates:
            return torch.zeros(stop - start, dtype=torch.float64, device=device)
        piece = values[start:stop].to(device, torch.float64, copy=True)
        if centers is not None:
            piece.sub_(centers[start:stop].to(piece), alpha=1.0 if num_updates == 1 else weight)
        return piece.mul_(weight) if num_updates == 1 else piece

    return read
