"""`PowerSGD`: two factors of low rank for each matrix, from one step of a power iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..utils.arguments import require
from ..utils.weighted_mean import Tensors
from .base import Codec, Layout, Shapes


# Key of the memory with the right factors of the last call.
RIGHT = "right_factors"


@dataclass(frozen=True, repr=False)
class PowerSGD(Codec):
    """
    Sends a matrix `M` of shape `(n, m)` as `P̂ Qᵀ` with `P̂ = orthogonalize(M Q₀)` and `Q = Mᵀ P̂`.

    `Q₀`, of shape `(m, rank)`, is `Q` of the preceding call with the same memory (warm start), so that the factors
    follow the largest singular values over several rounds ([Vogels et al., 2019](https://arxiv.org/abs/1905.13727)).
    The first `Q₀` has normal values that depend on the shape only. In the paper, the workers average `P` before they
    compute `Q`, which needs two messages. Here, each sender computes its own factors, and the server adds the
    products.

    A tensor with more dimensions is a matrix with the first dimension as rows. Vectors, and matrices for which the
    factors have as many values as the matrix, are sent in float32. A tensor is sent under its own name: the values of
    `P̂`, followed by those of `Q`.

    Args:
        rank (`int`, *optional*, defaults to `2`): Rank of the factors, at least 1.

    Raises:
        ValueError: If `rank` is below 1.

    Requirements:
        Error feedback, which `exchange_codec` provides. The sender keeps `Q`.

    Relations:
        [`MutualKD`] chooses the rank by a share of the squared singular values, without feedback.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import PowerSGD

    >>> codec, change = PowerSGD(rank=1), {"w": torch.outer(torch.arange(40.0), torch.ones(30))}
    >>> torch.allclose(codec.decode(codec.encode(change), change)["w"], change["w"], atol=1e-3)
    True
    >>> codec.num_bytes({"w": (40, 30), "b": (40,)})
    440
    ```
    """

    rank: int = 2

    def __post_init__(self) -> None:
        require("rank", self.rank, self.rank >= 1, "at least 1")

    def layout(self, shapes: Shapes) -> Layout:
        return {name: (torch.float32, self._packed_shape(shape)) for name, shape in shapes.items()}

    def _packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        num_rows, num_columns = _matrix(shape)
        num_packed = self.rank * (num_rows + num_columns)
        return (num_packed,) if num_packed < num_rows * num_columns else tuple(shape)

    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return self.compress_next(tensors, {})

    def compress_next(self, tensors: Tensors, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
        factors = dict(memory.get(RIGHT, {}))
        encoded = {}
        for name, value in tensors.items():
            value = value.detach().cpu().float()
            if self._packed_shape(value.shape) == tuple(value.shape):
                encoded[name] = value.clone()
                continue
            matrix = value.reshape(_matrix(value.shape))
            start = factors[name] if name in factors else _first_factor(matrix.shape[1], self.rank)
            # A few columns, for which the precision costs nothing.
            left = torch.linalg.qr((matrix @ start).double()).Q.float()
            factors[name] = matrix.t() @ left
            encoded[name] = torch.cat([left.reshape(-1), factors[name].reshape(-1)])
        if factors:
            memory[RIGHT] = factors
        return encoded

    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        """
        Decode what [`~Codec.encode`] returned. All machines compute the same bytes.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): The received tensors. They are untrusted input.
            reference (`Mapping[str, torch.Tensor]`): Tensors with the names and shapes of the encoded ones.

        Returns:
            `dict[str, torch.Tensor]`: The decoded tensors, float32, on the CPU.

        Raises:
            ValueError: If the names, dtypes or shapes of `encoded` differ from [`~Codec.layout`].
        """
        self.check(encoded, {name: value.shape for name, value in reference.items()})
        return {name: self._decode(encoded[name], value.shape) for name, value in reference.items()}

    def _decode(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if self._packed_shape(shape) == tuple(shape):
            return packed
        num_rows, num_columns = _matrix(shape)
        left, right = packed.split([self.rank * num_rows, self.rank * num_columns])
        left, right = left.view(num_rows, self.rank), right.view(num_columns, self.rank)
        # The order of additions in a matrix product differs between processors, but the state of a client must equal
        # the reference of the server.
        total = left[:, :1] * right[:, 0]
        for column in range(1, self.rank):
            total += left[:, column, None] * right[:, column]
        return total.view(shape)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor as a matrix. A vector has one column."""
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def _first_factor(num_columns: int, rank: int) -> torch.Tensor:
    """Return the start of the power iteration of shape `(num_columns, rank)`, equal for all clients."""
    return torch.randn(num_columns, rank, generator=torch.Generator().manual_seed(num_columns))
