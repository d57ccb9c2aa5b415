"""Tensors on the meta device: the shapes and dtypes of a dry round, without values."""

from __future__ import annotations

import torch


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU. A tensor on the meta device has no values and is returned as it is."""
    return tensor if tensor.is_meta else tensor.cpu()
