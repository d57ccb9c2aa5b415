"""Codec for sending predictions: narrow dtypes, and the most likely classes only.

`int8` is the usual affine quantization with one scale per row. `top_k` keeps the largest logits of a row and one
number for the remaining classes. The receiver rebuilds a row whose softmax is exact for the kept classes. The codec
does not hide invalid values: if a row with NaN or infinite values is sent, the receiver refuses the row by number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..codecs import Codec, Layout, Shapes
from ..codecs.quantization import TRAVEL_DTYPES, dequantize_rows, quantize_rows
from ..utils.arguments import require
from ..utils.weighted_mean import Tensors


@dataclass(frozen=True)
class PredictionCodec(Codec):
    """
    Encodes rows of predictions as small tensors, and decodes them.

    Without `top_k`, the rows may hold any numbers: logits, probabilities or gradients. **With `top_k`, the rows must
    be logits**, because the number for the remaining classes is made for a softmax. [`~PredictionCodec.dense`] is the
    codec for everything else. Probabilities in a narrow dtype sum to 1 only within the precision of the dtype. In
    `float16`, gradients below 3e-8 are 0.

    With `top_k`, the remaining classes share one logit, their log-mean-exp `log((1/(C−k)) Σ exp z_c)`. The softmax of
    a decoded row gives every kept class its exact probability and spreads the rest evenly. In `float16` and
    `bfloat16`, the kept logits are sent as differences from the shared logit. A constant that is common to all logits
    of a row changes no softmax, and this way it costs no precision.

    | tensor | shape | dtype | when |
    |---|---|---|---|
    | `values` | `(N, C)` or `(N, k)` | `dtype` | always |
    | `scale`, `zero_point` | `(N,)` | float32 | `int8`: the integer `n` encodes `zero_point + scale · (n + 128)` |
    | `indices` | `(N, k)` | uint8, uint16 or int32, the narrowest that holds `C − 1` | `top_k` |
    | `rest` | `(N,)` | float32 | `top_k` |

    Args:
        dtype (`str`, *optional*, defaults to `"float32"`):
            `"float32"`, `"float16"` (at most 65504; larger numbers become infinite and the receiver refuses them),
            `"bfloat16"` or `"int8"` (finite numbers only, with an error of at most half of 1/255 of the row's range
            plus float32 rounding; constant rows are exact).
        top_k (`int`, *optional*):
            `k`, the number of logits of each row that are sent. By default, and if a row has at most `k` classes, all
            logits are sent.

    Raises:
        ValueError: If the dtype is unknown or `top_k` is not positive.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import PredictionCodec

    >>> codec = PredictionCodec("bfloat16", top_k=2)
    >>> predictions = {"logits": torch.tensor([[1.0, 0.0, 4.0, 0.0]])}
    >>> encoded = codec.encode(predictions)
    >>> encoded["values"], encoded["indices"], encoded["rest"]
    (tensor([[4., 1.]], dtype=torch.bfloat16), tensor([[2, 0]], dtype=torch.uint8), tensor([0.]))
    >>> codec.decode(encoded, reference=predictions)
    {'logits': tensor([[1., 0., 4., 0.]])}
    >>> codec.num_bytes({"logits": (1, 50_000)}), PredictionCodec().num_bytes({"logits": (1, 50_000)})
    (12, 200000)
    ```
    """

    content: ClassVar[str] = "predictions"

    dtype: str = "float32"
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in TRAVEL_DTYPES:
            raise ValueError(f"`dtype` is {self.dtype!r}; allowed are {', '.join(TRAVEL_DTYPES)}.")
        is_allowed = self.top_k is None or self.top_k >= 1
        require("top_k", self.top_k, is_allowed, "at least 1, or `None` to send every class")

    @property
    def dense(self) -> PredictionCodec:
        """The codec with the same dtype and without `top_k`, for probabilities and gradients."""
        return replace(self, top_k=None)

    def layout(self, shapes: Shapes) -> Layout:
        ((num_rows, num_classes),) = shapes.values()
        kept = self._num_kept(num_classes)
        layout: Layout = {"values": (TRAVEL_DTYPES[self.dtype], (num_rows, kept))}
        if self.dtype == "int8":
            layout["scale"] = layout["zero_point"] = (torch.float32, (num_rows,))
        if kept < num_classes:
            layout["indices"] = (_index_dtype(num_classes), (num_rows, kept))
            layout["rest"] = (torch.float32, (num_rows,))
        return layout

    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """
        Encode predictions for sending.

        Args:
            tensors (`Mapping[str, torch.Tensor]`):
                Floating point predictions of shape `(N, C)` on any device, under any name. With `top_k` they must be
                logits. Classes that are masked by `-inf` can be sent in every dtype except `int8`. In `int8`, they
                must not be among the `top_k` classes.

        Returns:
            `dict[str, torch.Tensor]`: Tensors on the CPU, as in the table above.

        Raises:
            ValueError: If the tensor has the wrong number of dimensions, has no classes, or is not floating point.
        """
        (predictions,) = tensors.values()
        if predictions.ndim != 2 or predictions.shape[1] == 0 or not predictions.is_floating_point():
            raise ValueError(
                f"Predictions are {predictions.dtype} of shape {tuple(predictions.shape)}; expected a floating tensor "
                "with a row for each prediction and a column for each class."
            )
        rows = predictions.detach().float()
        num_classes = rows.shape[1]
        kept = self._num_kept(num_classes)
        values = rows
        encoded: dict[str, torch.Tensor] = {}
        if kept < num_classes:
            values, indices = rows.topk(kept, dim=1)
            rest = rows.scatter(1, indices, -torch.inf).logsumexp(dim=1) - math.log(num_classes - kept)
            encoded.update(indices=indices.cpu().to(_index_dtype(num_classes)), rest=rest)
            values = values - self._base(rest)
        if self.dtype == "int8":
            encoded |= quantize_rows(values)
        else:
            encoded["values"] = values.to(TRAVEL_DTYPES[self.dtype], copy=True)
        return {name: encoded[name].cpu() for name in self.layout({"": (0, num_classes)})}

    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        """
        Decode what [`~Codec.encode`] returned.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): Received tensors. They may come from an untrusted sender.
            reference (`Mapping[str, torch.Tensor]`): A tensor with `C` columns. The received tensors define `N`.

        Returns:
            `dict[str, torch.Tensor]`: Predictions of shape `(N, C)` in float32, on the device of the received tensors,
            under the name in `reference`. They may share memory with the received tensors. They are finite except for
            classes with `-inf`. No row has only such classes.

        Raises:
            ValueError: If a tensor is missing or unexpected, or has a different dtype or shape than this codec sends
                for `C` classes. Also if a class does not exist or occurs twice in a row, or if a row has no softmax
                because it holds NaN or `+inf` or only `-inf`. The message names the row.
        """
        ((name, like),) = reference.items()
        num_classes = like.shape[-1]
        self.check(encoded, {name: (_num_rows(encoded), num_classes)})
        if encoded["values"].is_meta:
            return {name: torch.empty(_num_rows(encoded), num_classes, device="meta")}
        values = dequantize_rows(encoded) if self.dtype == "int8" else encoded["values"].float()
        if "indices" in encoded:
            indices = encoded["indices"].long()
            _check_indices(indices, num_classes)
            # (N, k) -> (N, C)
            rest = encoded["rest"]
            values = rest.unsqueeze(1).repeat(1, num_classes).scatter(1, indices, values + self._base(rest))
        # `amax` propagates NaN, so one pass finds all rows without a softmax.
        bad = ~values.amax(dim=1).isfinite()
        if bad.any():
            limit = {"float16": "float16 ends at 65504", "int8": "int8 has no -inf"}.get(self.dtype)
            raise ValueError(
                f"{int(bad.sum())} of {len(bad)} rows hold NaN or +inf, or -inf in every class, the first is row "
                f"{int(bad.nonzero()[0])}; expected predictions that have a softmax."
                + (f" If they had one before encoding, {limit}: use 'bfloat16' or 'float32'." if limit else "")
            )
        return {name: values}

    def _describe(self, shapes: Shapes) -> str:
        ((_, num_classes),) = shapes.values()
        return f"{num_classes} classes"

    def _base(self, rest: torch.Tensor) -> torch.Tensor:
        """The logits that are subtracted from the kept logits: (N) -> (N, 1)."""
        if self.dtype not in ("float16", "bfloat16"):
            return torch.zeros_like(rest).unsqueeze(1)
        return rest.where(rest.isfinite(), 0.0).unsqueeze(1)

    def _num_kept(self, num_classes: int) -> int:
        return num_classes if self.top_k is None else min(self.top_k, num_classes)


def rows_of(num_classes: int) -> dict[str, torch.Tensor]:
    """Return a reference for [`~PredictionCodec.decode`]: a tensor `rows` with `num_classes` columns."""
    return {"rows": torch.empty(0, num_classes, device="meta")}


def _num_rows(encoded: object) -> int:
    """Return the number of rows of untrusted tensors, 0 if there are none."""
    values = encoded.get("values") if isinstance(encoded, Mapping) else None
    return len(values) if isinstance(values, torch.Tensor) and values.ndim else 0


def _index_dtype(num_classes: int) -> torch.dtype:
    """The narrowest dtype that holds every class index and that safetensors supports."""
    dtypes = (torch.uint8, torch.uint16, torch.int32)
    return next(dtype for dtype in dtypes if num_classes - 1 <= torch.iinfo(dtype).max)


def _check_indices(indices: torch.Tensor, num_classes: int) -> None:
    beyond = ((indices < 0) | (indices >= num_classes)).any(dim=1)
    if beyond.any():
        row = int(beyond.nonzero()[0])
        raise ValueError(
            f"Row {row} of `indices` names a class outside 0 to {num_classes - 1}: {indices[row].tolist()[:16]}. "
            "Sender and receiver must agree on the classes and their order."
        )
    ordered = indices.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if repeated.any():
        row = int(repeated.nonzero()[0])
        raise ValueError(f"Row {row} of `indices` names a class twice; expected {indices.shape[1]} different ones.")
