"""`PublicRows`: a range of the public examples."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..messages import public_order


@functools.lru_cache(maxsize=2)
def _drawn_order(num_rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """The order of the examples. The server and all clients of a process read each mini-batch of an epoch from it."""
    return public_order(num_rows, seed)


@dataclass(frozen=True)
class PublicRows:
    """
    A range of public examples, as messages name it.

    Args:
        start (`int`): Index of the first example.
        stop (`int`): Index after the last example.
        order (`int`, *optional*): Seed of the permutation to which `start` and `stop` refer. `None` is the original
            order.

    Example:

    ```python
    >>> from hf_federated.distillation import PublicRows

    >>> len(PublicRows(0, 32))
    32
    ```
    """

    start: int
    stop: int
    order: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def indices(self, num_rows: int) -> torch.Tensor:
        """
        The indices of the examples.

        Args:
            num_rows (`int`): Number of all public examples.

        Returns:
            `torch.Tensor`: Indices of shape `(stop - start,)`.
        """
        if self.order is None:
            return public_order(num_rows, None)[self.start : self.stop]
        return _drawn_order(num_rows, self.order, torch.get_default_device())[self.start : self.stop].clone()
