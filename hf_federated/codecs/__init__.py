"""Codecs: how updates, predictions, hidden states and gradients are sent in fewer bytes."""

from types import MappingProxyType

from ..utils.algorithm_names import EXCHANGE_CODEC_NAMES, import_reference
from .base import Codec, Layout, Shapes
from .float32 import Float32
from .power_sgd import PowerSGD
from .quantized_blocks import QuantizedBlocks
from .scaled_integers import Int4, Int8
from .top_k import TopK


# The classes of `exchange_codec`, by name.
EXCHANGE_CODECS = MappingProxyType(
    {name: import_reference(reference) for name, reference in EXCHANGE_CODEC_NAMES.built_in.items()}
)

__all__ = [
    "EXCHANGE_CODECS",
    "Codec",
    "Float32",
    "Int4",
    "Int8",
    "Layout",
    "PowerSGD",
    "QuantizedBlocks",
    "Shapes",
    "TopK",
]
