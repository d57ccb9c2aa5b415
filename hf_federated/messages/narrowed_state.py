"""`NarrowedState`: a state in a narrower dtype, without a copy of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class NarrowedTensor:
    """
    A tensor whose values are converted when they are read.

    Args:
        source (`torch.Tensor`): The values.
        dtype (`torch.dtype`): The dtype of the read values.
    """

    source: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.source.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.source.ndim

    def is_floating_point(self) -> bool:
        """Whether the read values are floating-point numbers."""
        return self.dtype.is_floating_point

    @property
    def nbytes(self) -> int:
        """Number of bytes of the read values."""
        return self.source.numel() * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Convert the values."""
        return self.source.to(self.dtype)


class NarrowedState(Mapping[str, torch.Tensor]):
    """
    A state whose floating tensors are converted to a narrower dtype each time they are read.

    A message with such a state is serialized tensor by tensor, so that the whole narrowed state is never in memory.

    Args:
        state (`Mapping[str, torch.Tensor]`): The state. Its tensors must not change.
        dtype (`torch.dtype`): The dtype of the floating tensors.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages.narrowed_state import NarrowedState

    >>> state = NarrowedState({"w": torch.ones(2), "steps": torch.tensor(3)}, torch.bfloat16)
    >>> state["w"], state["steps"]
    (tensor([1., 1.], dtype=torch.bfloat16), tensor(3))
    ```
    """

    def __init__(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._unread = {
            name: NarrowedTensor(value, dtype) if value.is_floating_point() and value.dtype != dtype else value
            for name, value in state.items()
        }

    @property
    def unread(self) -> dict[str, torch.Tensor | NarrowedTensor]:
        """The entries, without a conversion of their values."""
        return self._unread

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._unread[name]
        return value.read() if isinstance(value, NarrowedTensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._unread)

    # A message has a dictionary as its state after it was sent to another process.

    def __or__(self, other: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**other, **self}

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a dictionary of the converted tensors."""
        return dict(self)

    def __len__(self) -> int:
        return len(self._unread)
