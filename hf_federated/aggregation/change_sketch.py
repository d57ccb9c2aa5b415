"""`ChangeSketch`: a random projection of a change of parameters to about a thousand numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..utils.random import derived_seed
from ..utils.shards import shard_rank, sum_over_shards
from ..utils.weighted_mean import Tensors
from .lora_factors import change_factors, split_names


# A prime number, so that the columns of a matrix do not fall on the same numbers of the sketch.
SKETCH_SIZE = 1021
# Number of values that are projected at a time.
PIECE = 2**20


class ChangeSketch:
    """
    Project changes of parameters, so that inner products can be estimated without the changes.

    Every value gets a random sign, and the signed values at positions with the same remainder of a division by
    [`SKETCH_SIZE`] are added. The inner product of two sketches is an unbiased estimate of the inner product of the
    changes over the choice of the signs. Its standard deviation is at most `√(2 / 1021) ≈ 0.044` times the product of
    the norms, if the energy of the changes is spread over the remainders. [Feature
    Hashing](https://arxiv.org/abs/0902.2206) (Weinberger et al., ICML 2009) proves the bound for random positions.

    A LoRA module with both factors counts by the change of the product `B A`, which is computed in blocks of rows.

    Args:
        before (`Mapping[str, torch.Tensor]`): The global state that the clients received.
        seed (`int`): Seed of the signs. A client that knows it can hide a change from the sketch.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation.change_sketch import ChangeSketch

    >>> sketch = ChangeSketch({"w": torch.zeros(3)}, seed=0)
    >>> change = sketch({"w": torch.tensor([3.0, 0.0, 4.0])})
    >>> float(change @ change)
    25.0
    ```
    """

    def __init__(self, before: Tensors, seed: int) -> None:
        self._before = before
        self._seed = seed
        self._names, self._pairs = split_names(before)

    @torch.no_grad()
    def __call__(self, state: Tensors) -> torch.Tensor:
        """
        Project the change of a state.

        Args:
            state (`Mapping[str, torch.Tensor]`): A state with the names and shapes of the global state.

        Returns:
            `torch.Tensor` of shape `(1021,)`, float64, on the CPU: The sketch.
        """
        sketch = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
        generator = torch.Generator()
        position = 0
        # Values of different shards get independent signs.
        rank_of_shards = (rank,) if (rank := shard_rank()) else ()
        for number, piece in enumerate(self._pieces(state)):
            generator.manual_seed(derived_seed(self._seed, *rank_of_shards, "sketch", number))
            values = piece * torch.randint(2, piece.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            # Positions count over all pieces. Otherwise, the values of small tensors would fall on the same numbers.
            before = position % SKETCH_SIZE
            position += len(values)
            padded = torch.nn.functional.pad(values, (before, -position % SKETCH_SIZE))
            sketch += padded.view(-1, SKETCH_SIZE).sum(0)
        return sum_over_shards(sketch)

    def _pieces(self, state: Tensors) -> Iterator[torch.Tensor]:
        """Yield all values of the change in float64, as vectors in a fixed order."""
        for name in self._names:
            values, before = state[name].detach().reshape(-1), self._before[name].detach().reshape(-1)
            for new, old in zip(values.split(PIECE), before.split(PIECE), strict=True):
                yield new.cpu().double() - old.cpu().double()
        for pair in self._pairs:
            left, right = change_factors(pair.matrices(self._before), pair.matrices(state))
            for rows in left.split(max(1, PIECE // right.shape[1]), dim=1):
                yield (rows.T @ right).reshape(-1)
