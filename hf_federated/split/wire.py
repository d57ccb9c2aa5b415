"""How hidden states and their gradients become tensors that travel, and what came becomes states again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..messages.quantization import TRAVEL_DTYPES, dequantize_rows, quantize_rows


@dataclass(frozen=True)
class Wire:
    """
    The dtype in which hidden states and gradients travel.

    Args:
        dtype (`str`, *optional*, defaults to `"float32"`):
            `"float32"`, `"float16"`, `"bfloat16"`, or `"int8"` with a scale and a zero point for every position. A
            gradient below 3e-8 is zero in `"float16"`; `"int8"` is off by at most half of 1/255 of the range of a
            position's values.

    Raises:
        ValueError: If the dtype is another one.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.split import Wire

    >>> wire = Wire("bfloat16")
    >>> wire.num_bytes(batch_size=2, sequence_length=10, hidden_size=64)
    2560
    >>> wire.decode(wire.encode(torch.ones(2, 10, 64)), batch_size=2, dtype=torch.float32).shape
    torch.Size([2, 10, 64])
    ```
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in TRAVEL_DTYPES:
            raise ValueError(f"Hidden states travel as one of {', '.join(TRAVEL_DTYPES)}, not as {self.dtype!r}.")

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Args:
            states (`torch.Tensor`): Shape `(batch, sequence, hidden)`, floating, on any device.

        Returns:
            `dict[str, torch.Tensor]`: `values` of shape `(batch · sequence, hidden)`, for `"int8"` with `scale` and
            `zero_point` of shape `(batch · sequence,)`; on the CPU.
        """
        rows = states.detach().flatten(0, 1)
        if self.dtype == "int8":
            return {name: values.cpu() for name, values in quantize_rows(rows.float()).items()}
        return {"values": rows.to("cpu", TRAVEL_DTYPES[self.dtype])}

    def decode(self, encoded: dict[str, torch.Tensor], batch_size: int, dtype: torch.dtype) -> torch.Tensor:
        """
        Args:
            encoded (`dict[str, torch.Tensor]`): What came. It is not trusted.
            batch_size (`int`): Rows of the batch.
            dtype (`torch.dtype`): In which the receiver goes on.

        Returns:
            `torch.Tensor`: Shape `(batch, sequence, hidden)`, on the CPU.

        Raises:
            ValueError: If it is encoded otherwise, or holds NaN or infinite numbers.
        """
        values = encoded["values"]
        expected = {"values", "scale", "zero_point"} if self.dtype == "int8" else {"values"}
        if encoded.keys() != expected or values.dtype != TRAVEL_DTYPES[self.dtype]:
            raise ValueError(
                f"Hidden states came as {sorted(encoded)} of {values.dtype}, and this wire carries {self.dtype}: give "
                "both parties the same wire dtype."
            )
        for name in expected - {"values"}:
            if encoded[name].shape != values.shape[:1]:
                raise ValueError(f"{name} has shape {tuple(encoded[name].shape)} for {len(values)} positions.")
        if self.dtype == "int8":
            # A row that was not finite has no scale, and decodes to NaN.
            values = dequantize_rows(encoded)
        values = values.to(dtype)
        if len(values) % batch_size:
            raise ValueError(f"{len(values)} positions do not make {batch_size} rows.")
        if not values.isfinite().all():
            raise ValueError(
                f"Hidden states or gradients came with numbers that are not finite, or that {self.dtype!r} or {dtype} "
                "cannot hold: float16 ends at 65504."
            )
        return values.unflatten(0, (batch_size, -1))

    def num_bytes(self, batch_size: int, sequence_length: int, hidden_size: int) -> int:
        """Bytes of one passage of states or gradients, without the header of the message."""
        scale = 8 if self.dtype == "int8" else 0
        return batch_size * sequence_length * (hidden_size * TRAVEL_DTYPES[self.dtype].itemsize + scale)
