"""Pooling of hidden states: one vector for a text."""

from __future__ import annotations

import torch


POOLINGS = ("mean", "cls")


def pool(hidden: torch.Tensor, mask: torch.Tensor | None, pooling: str = "mean") -> torch.Tensor:
    """
    Reduce the hidden states of each text to one vector.

    Args:
        hidden (`torch.Tensor` of shape `(batch, length, hidden_size)`): Hidden states.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): The attention mask. Without it, all positions
            count.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` for the mean over the positions that the mask
            selects, or `"cls"` for the first of these positions.

    Returns:
        `torch.Tensor`: Vectors of shape `(batch, hidden_size)`, float32 or wider.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.features.pooling import pool

    >>> hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> pool(hidden, torch.tensor([[1, 1, 0]])), pool(hidden, torch.tensor([[1, 1, 0]]), "cls")
    (tensor([[2.]]), tensor([[1.]]))

    ```
    """
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if mask is None:
        return hidden.mean(1) if pooling == "mean" else hidden[:, 0]
    if pooling == "cls":
        # With padding on the left, the first token is not at the first position.
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.argmax(1)]
    weights = mask.to(hidden).unsqueeze(-1)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
