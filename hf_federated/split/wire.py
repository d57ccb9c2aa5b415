"""Encoding of hidden states and gradients as the tensors that are sent between client and server."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..messages.quantization import TRAVEL_DTYPES, dequantize_rows, quantize_rows


@dataclass(frozen=True)
class Wire:
    """
    Wire format of hidden states and gradients: the dtype in which they are sent.

    Args:
        dtype (`str`, *optional*, defaults to `"float32"`):
            `"float32"`, `"float16"`, `"bfloat16"`, or `"int8"` with a scale and a zero point for each position.
            `"float16"` rounds gradients below 3e-8 to zero. The error of `"int8"` is at most 1/510 of the range of the
            values at a position.

    Raises:
        ValueError: If the dtype is unknown.

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
            raise ValueError(f"Unknown wire dtype {self.dtype!r}. Choose one of {', '.join(TRAVEL_DTYPES)}.")

    @classmethod
    def for_weights(cls, dtype: torch.dtype, wire_dtype: str = "auto") -> Wire:
        """
        Create the wire format of a model.

        Args:
            dtype (`torch.dtype`): The dtype of the model's weights.
            wire_dtype (`str`, *optional*, defaults to `"auto"`): The dtype of the wire format. `"auto"` selects the
                dtype of the weights, or `"float32"` if it is not a wire dtype.
        """
        if wire_dtype == "auto":
            name = str(dtype).removeprefix("torch.")
            wire_dtype = name if name in TRAVEL_DTYPES else "float32"
        return cls(wire_dtype)

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Encode hidden states or gradients.

        Args:
            states (`torch.Tensor`): Floating-point tensor of shape `(batch, sequence, hidden)`, on any device.

        Returns:
            `dict[str, torch.Tensor]`: CPU tensors. `values` of shape `(batch · sequence, hidden)`, and for `"int8"`
            also `scale` and `zero_point` of shape `(batch · sequence,)`.
        """
        rows = states.detach().flatten(0, 1)
        if self.dtype == "int8":
            return {name: values.cpu() for name, values in quantize_rows(rows.float()).items()}
        return {"values": rows.to("cpu", TRAVEL_DTYPES[self.dtype])}

    def decode(self, encoded: dict[str, torch.Tensor], batch_size: int, dtype: torch.dtype) -> torch.Tensor:
        """
        Decode received hidden states or gradients.

        Args:
            encoded (`dict[str, torch.Tensor]`): The received tensors. They are untrusted input.
            batch_size (`int`): Number of sequences in the batch.
            dtype (`torch.dtype`): The dtype of the result.

        Returns:
            `torch.Tensor`: CPU tensor of shape `(batch, sequence, hidden)`.

        Raises:
            ValueError: If the wire dtype of the tensors differs, or the values are not finite.
        """
        values = encoded["values"]
        expected = {"values", "scale", "zero_point"} if self.dtype == "int8" else {"values"}
        if encoded.keys() != expected or values.dtype != TRAVEL_DTYPES[self.dtype]:
            raise ValueError(
                f"Received hidden states encoded as {sorted(encoded)} of dtype {values.dtype}, but this party expects "
                f"wire dtype {self.dtype}. Set the same wire dtype for both parties."
            )
        for name in expected - {"values"}:
            if encoded[name].shape != values.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(encoded[name].shape)}, but it must have one value for each of "
                    f"{len(values)} positions."
                )
        if self.dtype == "int8":
            # A position with non-finite values has a NaN scale and decodes to NaN, which the check below rejects.
            values = dequantize_rows(encoded)
        values = values.to(dtype)
        if len(values) % batch_size:
            raise ValueError(f"{len(values)} positions cannot be divided into {batch_size} sequences of equal length.")
        if not values.isfinite().all():
            raise ValueError(
                "Received hidden states or gradients have values that are not finite, or that are out of the range of "
                f"{self.dtype!r} or {dtype}. Use 'bfloat16' or 'float32' for values above 65504, the largest float16 "
                "value."
            )
        return values.unflatten(0, (batch_size, -1))

    def num_bytes(self, batch_size: int, sequence_length: int, hidden_size: int) -> int:
        """Return the size in bytes of one message's hidden states or gradients, without the message header."""
        scale = 8 if self.dtype == "int8" else 0
        return batch_size * sequence_length * (hidden_size * TRAVEL_DTYPES[self.dtype].itemsize + scale)
