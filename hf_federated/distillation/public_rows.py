"""`PublicRows`: a range of the public examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..messages import public_order


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
        return public_order(num_rows, self.order)[self.start : self.stop]
