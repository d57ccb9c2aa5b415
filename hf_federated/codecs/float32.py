"""`Float32`: floating-point tensors as float32, for the direction that `exchange_codec` does not compress."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..utils.weighted_mean import Tensors
from .base import Codec, Layout, Shapes


@dataclass(frozen=True, repr=False)
class Float32(Codec):
    """
    Sends each tensor as float32, under its own name.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import Float32

    >>> Float32().encode({"w": torch.ones(2, dtype=torch.bfloat16)})["w"]
    tensor([1., 1.])
    ```
    """

    @property
    def is_exact(self) -> bool:
        return True

    def layout(self, shapes: Shapes) -> Layout:
        return {name: (torch.float32, tuple(shape)) for name, shape in shapes.items()}

    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        # Copies, because the values may be parameters of a model that will change.
        return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in tensors.items()}

    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        self.check(encoded, {name: value.shape for name, value in reference.items()})
        return {name: encoded[name] for name in reference}
