"""`Encoding`: the predictions and targets of a distillation as the tensors that are sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..utils.weighted_mean import Tensors
from .codec import PredictionCodec, rows_of
from .lazy_rows import LazyRows, concatenate_encoded, decode_lazily


Targets = torch.Tensor | LazyRows

# Lower bound of a probability before its logarithm is encoded.
SMALLEST_PROBABILITY = 1e-9


@dataclass(frozen=True)
class Encoding:
    """
    Encodes predictions of the clients and targets of the server for sending, and decodes them.

    Args:
        codec ([`PredictionCodec`]): Encodes rows of logits.
        broadcasts (`str`, *optional*, defaults to `"logits"`): Kind of the targets that the clients learn: `"logits"`
            or `"probabilities"`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import Encoding, PredictionCodec

    >>> encoding = Encoding(PredictionCodec(top_k=1), "probabilities")
    >>> encoding.decode_targets(encoding.encode_targets(torch.tensor([[0.5, 0.25, 0.25]])), num_classes=3)
    tensor([[0.5000, 0.2500, 0.2500]])
    ```
    """

    codec: PredictionCodec
    broadcasts: str = "logits"

    def encode(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode predictions of shape `(rows, classes)`."""
        return self.codec.encode({"logits": logits})

    def decode(self, values: Tensors, num_classes: int) -> torch.Tensor:
        """Decode the return value of `encode` to a float32 tensor of shape `(rows, classes)`."""
        return self.codec.decode(values, rows_of(num_classes))["rows"]

    def encode_targets(self, targets: Targets) -> dict[str, torch.Tensor]:
        """Encode the clients' targets, of shape `(rows, classes)`."""
        if isinstance(targets, LazyRows):
            return concatenate_encoded([self.encode_targets(block) for block in targets.blocks()])
        if self.broadcasts == "logits" or self.codec.top_k is None:
            return self.codec.encode({"targets": targets})
        # The `top_k` classes keep their probabilities, and the remaining classes share the remaining probability.
        return self.codec.encode({"targets": targets.clamp(min=SMALLEST_PROBABILITY).log()})

    def decode_targets(self, values: Tensors, num_classes: int) -> torch.Tensor:
        """
        Decode the return value of `encode_targets` to a float32 tensor of shape `(rows, classes)`.

        Probabilities of a row sum to 1.
        """
        targets = self.codec.decode(values, rows_of(num_classes))["rows"]
        if self.broadcasts == "logits":
            return targets
        if self.codec.top_k is not None:
            return targets.softmax(-1)
        targets = targets.clamp(min=0)
        return targets / targets.sum(-1, keepdim=True)

    def unpack_targets(self, values: Tensors, num_classes: int) -> Targets:
        """Decode targets as `decode_targets` does. With `top_k`, decode each batch when it is needed."""
        if self.codec.top_k is None:
            return self.decode_targets(values, num_classes)
        return decode_lazily(values, lambda part: self.decode_targets(part, num_classes))
