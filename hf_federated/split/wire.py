"""Encoding of hidden states and gradients as the tensors that are sent between client and server."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..messages.quantization import TRAVEL_DTYPES, dequantize_rows, quantize_rows
from ..utils.finite_values import is_finite
from .compression import dequantize_groups, keep_largest, num_groups, num_kept, quantize_groups, restore_largest


WIRE_DTYPES = (*TRAVEL_DTYPES, "int4", "topk")


@dataclass(frozen=True)
class Wire:
    """
    Wire format of hidden states and gradients: the dtype in which they are sent.

    Args:
        dtype (`str`, *optional*, defaults to `"float32"`):
            `"float32"`, `"float16"`, `"bfloat16"`, `"int8"`, `"int4"` or `"topk"`.

            - `"float16"` rounds gradients below 3e-8 to zero.
            - `"int8"` sends a scale and a zero point for each position. The error is at most 1/510 of the range of the
              values at a position.
            - `"int4"` sends a scale and a zero point for each group of 64 values of a position: 5 bits a value. The
              error is at most 1/30 of the range of a group.
            - `"topk"` sends the quarter of the values of a position with the largest magnitudes in `bfloat16`, and a
              bit for each value: 5 bits a value. The other values become zero. With gradients it also sends the mean
              of what the positions of a message lose, in `float32`, and the receiver adds the mean to each position.

    Raises:
        ValueError: If the dtype is unknown.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.split import Wire

    >>> wire = Wire("bfloat16")
    >>> wire.num_bytes(batch_size=2, sequence_length=10, hidden_size=64)
    2560
    >>> encoded = wire.encode(torch.ones(2, 10, 64))
    >>> wire.decode(encoded, batch_size=2, hidden_size=64, dtype=torch.float32).shape
    torch.Size([2, 10, 64])
    ```
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in WIRE_DTYPES:
            raise ValueError(f"Unknown wire dtype {self.dtype!r}. Choose one of {', '.join(WIRE_DTYPES)}.")

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

    def encode(self, states: torch.Tensor, is_gradient: bool = False) -> dict[str, torch.Tensor]:
        """
        Encode hidden states or gradients.

        Args:
            states (`torch.Tensor`): Floating-point tensor of shape `(batch, sequence, hidden)`, on any device.
            is_gradient (`bool`, *optional*, defaults to `False`): Whether the tensor is a gradient.

        Returns:
            `dict[str, torch.Tensor]`: CPU tensors with the dtypes and shapes that [`~Wire.layout`] returns. One tensor
            has a row for each position. Gradients in `"topk"` also have `mean_error` of shape `(hidden,)`.
        """
        rows = states.detach().flatten(0, 1)
        if self._name == "values":
            return {"values": rows.to("cpu", TRAVEL_DTYPES[self.dtype])}
        rows = rows.float()
        if self.dtype == "topk":
            compressed = keep_largest(rows, with_mean=is_gradient)
        else:
            compressed = quantize_rows(rows) if self.dtype == "int8" else quantize_groups(rows)
        # Separate tensors would need a header of 60 bytes each, 1 % of a short message.
        columns = [compressed.pop(name) for name in self._columns(states.shape[-1])]
        joined = torch.cat([column.reshape(len(rows), -1).view(torch.uint8) for column in columns], dim=1)
        return {name: values.cpu() for name, values in {self._name: joined, **compressed}.items()}

    def decode(
        self, encoded: dict[str, torch.Tensor], batch_size: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """
        Decode received hidden states or gradients.

        Args:
            encoded (`dict[str, torch.Tensor]`): The received tensors. They are untrusted input.
            batch_size (`int`): Number of sequences in the batch.
            hidden_size (`int`): Number of values of a position.
            dtype (`torch.dtype`): The dtype of the result.

        Returns:
            `torch.Tensor`: CPU tensor of shape `(batch, sequence, hidden)`.

        Raises:
            ValueError: If the wire dtype or the hidden size of the tensors differs, or the values are not finite.
        """
        self._check(encoded, hidden_size)
        values = encoded[self._name]
        if self._name != "values":
            columns = self._split(values, hidden_size)
            # A position with non-finite values decodes to NaN, which the check below rejects.
            if self.dtype == "int8":
                values = dequantize_rows(columns)
            elif self.dtype == "int4":
                values = dequantize_groups(columns, hidden_size)
            else:
                values = restore_largest({**encoded, **columns}, hidden_size)
        values = values.to(dtype)
        if len(values) % batch_size:
            raise ValueError(f"{len(values)} positions cannot be divided into {batch_size} sequences of equal length.")
        if not is_finite(values):
            raise ValueError(
                "Received hidden states or gradients have values that are not finite, or that are out of the range of "
                f"{self.dtype!r} or {dtype}. Use 'bfloat16' or 'float32' for values above 65504, the largest float16 "
                "value."
            )
        return values.unflatten(0, (batch_size, -1))

    def layout(
        self, num_positions: int, hidden_size: int, is_gradient: bool = False
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """
        Return the dtype and the shape of each encoded tensor.

        The floating-point dtypes send a tensor `values`. The other dtypes send a tensor with their name, whose rows
        are bytes:

        | dtype | bytes of a row | shape in the row |
        | --- | --- | --- |
        | `int8` | scale and zero point, float32 | `(1,)` each |
        | | integers, int8 | `(hidden,)` |
        | `int4` | scales and zero points, float32 | `(ceil(hidden / 64),)` each |
        | | integers, uint8, two in each byte | `(ceil(hidden / 2),)` |
        | `topk` | values, bfloat16 | `(ceil(hidden / 4),)` |
        | | bits of their places, uint8 | `(ceil(hidden / 8),)` |
        """
        if self._name == "values":
            return {"values": (TRAVEL_DTYPES[self.dtype], (num_positions, hidden_size))}
        row_bytes = sum(dtype.itemsize * length for dtype, length in self._columns(hidden_size).values())
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            self._name: (torch.uint8, (num_positions, row_bytes))
        }
        if self.dtype == "topk" and is_gradient:
            layout["mean_error"] = (torch.float32, (hidden_size,))
        return layout

    def num_bytes(self, batch_size: int, sequence_length: int, hidden_size: int, is_gradient: bool = False) -> int:
        """Return the size in bytes of one message's hidden states or gradients, without the message header."""
        layout = self.layout(batch_size * sequence_length, hidden_size, is_gradient)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())

    @property
    def _name(self) -> str:
        """Name of the tensor that has a row for each position."""
        return self.dtype if self.dtype in ("int8", "int4", "topk") else "values"

    def _columns(self, hidden_size: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return the dtype and the number of values of what the rows of bytes contain, in the order of the row."""
        if self.dtype == "topk":
            return {"values": (torch.bfloat16, num_kept(hidden_size)), "kept": (torch.uint8, -(-hidden_size // 8))}
        groups = (torch.float32, 1 if self.dtype == "int8" else num_groups(hidden_size))
        values = (torch.int8, hidden_size) if self.dtype == "int8" else (torch.uint8, -(-hidden_size // 2))
        return {"scale": groups, "zero_point": groups, "values": values}

    def _split(self, rows: torch.Tensor, hidden_size: int) -> dict[str, torch.Tensor]:
        """Split rows of bytes into the tensors that were joined."""
        columns = self._columns(hidden_size)
        parts = rows.split([dtype.itemsize * length for dtype, length in columns.values()], dim=1)
        # A copy is aligned for every dtype.
        split = {
            name: part.clone(memory_format=torch.contiguous_format).view(dtype)
            for (name, (dtype, _)), part in zip(columns.items(), parts, strict=True)
        }
        if self.dtype == "int8":
            split |= {name: split[name].squeeze(1) for name in ("scale", "zero_point")}
        return split

    def _check(self, encoded: dict[str, torch.Tensor], hidden_size: int) -> None:
        """Check names, dtypes and shapes of received tensors."""
        num_positions = len(encoded[self._name]) if self._name in encoded else 0
        layout = self.layout(num_positions, hidden_size, is_gradient="mean_error" in encoded)
        if encoded.keys() != layout.keys() or any(encoded[name].dtype != layout[name][0] for name in layout):
            dtypes = ", ".join(sorted(str(tensor.dtype) for tensor in encoded.values()))
            raise ValueError(
                f"Received hidden states encoded as {sorted(encoded)} of dtype {dtypes}, but this party expects "
                f"wire dtype {self.dtype}. Set the same wire dtype for both parties."
            )
        for name, (_, shape) in layout.items():
            if encoded[name].shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(encoded[name].shape)}, but {num_positions} positions of hidden size "
                    f"{hidden_size} need shape {shape}. Load client and server parts from the same model."
                )
