"""Encoding of hidden states and gradients as the tensors that are sent between client and server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..codecs import Codec, Layout, Shapes
from ..codecs.quantization import TRAVEL_DTYPES
from ..codecs.row_bytes import ROW_DTYPES, num_row_bytes, pack_rows, unpack_rows
from ..utils.finite_values import is_finite


WIRE_DTYPES = (*TRAVEL_DTYPES, "int4", "topk")


@dataclass(frozen=True)
class Wire(Codec):
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
    >>> wire.num_bytes({"hidden": (2, 10, 64)})
    2560
    >>> states = {"hidden": torch.ones(2, 10, 64)}
    >>> wire.decode(wire.encode(states), reference=states)["hidden"].shape
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

    def layout(self, shapes: Shapes) -> Layout:
        """
        Return the dtype and the shape of each encoded tensor.

        The floating-point dtypes send a tensor `values`, with a row for each position. All other dtypes send a tensor
        with their name. Its rows are bytes, as [`~hf_federated.codecs.row_bytes.columns_of`] lists them. Gradients in
        `"topk"` also have `mean_error` of shape `(hidden,)`.

        Args:
            shapes (`Mapping[str, Sequence[int]]`): `(batch, sequence, hidden)` under the name `"hidden"` or
                `"gradient"`.
        """
        ((name, (batch_size, length, hidden_size)),) = shapes.items()
        num_positions = batch_size * length
        if self.dtype not in ROW_DTYPES:
            return {"values": (TRAVEL_DTYPES[self.dtype], (num_positions, hidden_size))}
        layout: Layout = {self.dtype: (torch.uint8, (num_positions, num_row_bytes(self.dtype, hidden_size)))}
        if self.dtype == "topk" and name == "gradient":
            layout["mean_error"] = (torch.float32, (hidden_size,))
        return layout

    def compress(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        Encode hidden states or gradients.

        Args:
            tensors (`Mapping[str, torch.Tensor]`): A floating-point tensor of shape `(batch, sequence, hidden)`, on
                any device, under the name `"hidden"` or `"gradient"`.

        Returns:
            `dict[str, torch.Tensor]`: CPU tensors with the dtypes and shapes that [`~Wire.layout`] returns.
        """
        ((name, states),) = tensors.items()
        rows = states.detach().flatten(0, 1)
        if self.dtype not in ROW_DTYPES:
            return {"values": rows.to("cpu", TRAVEL_DTYPES[self.dtype])}
        return pack_rows(self.dtype, rows.float(), with_mean=name == "gradient")

    def decode(
        self, encoded: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """
        Decode received hidden states or gradients.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): The received tensors. They are untrusted input.
            reference (`Mapping[str, torch.Tensor]`): A tensor with the batch size, the hidden size and the dtype of
                the result. The received tensors define the sequence length.

        Returns:
            `dict[str, torch.Tensor]`: CPU tensor of shape `(batch, sequence, hidden)`, under the name in `reference`.

        Raises:
            ValueError: If the wire dtype or the hidden size of the tensors differs, or the values are not finite.
        """
        ((name, like),) = reference.items()
        (batch_size, _, hidden_size), dtype = like.shape, like.dtype
        self._check(encoded, hidden_size)
        if self.dtype in ROW_DTYPES:
            # A position with non-finite values decodes to NaN, which the check below rejects.
            values = unpack_rows(self.dtype, encoded, hidden_size).to(dtype)
        else:
            values = encoded["values"].to(dtype)
        if len(values) % batch_size:
            raise ValueError(f"{len(values)} positions cannot be divided into {batch_size} sequences of equal length.")
        if not is_finite(values):
            raise ValueError(
                "Received hidden states or gradients have values that are not finite, or that are out of the range of "
                f"{self.dtype!r} or {dtype}. Use 'bfloat16' or 'float32' for values above 65504, the largest float16 "
                "value."
            )
        return {name: values.unflatten(0, (batch_size, -1))}

    def _check(self, encoded: Mapping[str, torch.Tensor], hidden_size: int) -> None:
        """Check names, dtypes and shapes of received tensors."""
        rows = encoded.get(self.dtype if self.dtype in ROW_DTYPES else "values")
        num_positions = 0 if rows is None else len(rows)
        layout = self.layout({"gradient" if "mean_error" in encoded else "hidden": (1, num_positions, hidden_size)})
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
