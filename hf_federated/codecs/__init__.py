"""Codecs: how updates, predictions, hidden states and gradients are sent in fewer bytes."""

from .base import Codec, Layout, Shapes
from .quantized_blocks import QuantizedBlocks


__all__ = ["Codec", "Layout", "QuantizedBlocks", "Shapes"]
