"""Steps between local training and aggregation: clipping, noise, narrower dtypes, codecs, custom steps."""

from .base import (
    Memories,
    Memory,
    Postprocessor,
    run_client_receive,
    run_client_send,
    run_on_sums,
    run_server_receive,
    run_server_send,
)
from .clipping import ClipUpdate
from .encode_state import EncodeState
from .encode_update import EncodeUpdate
from .exchange_codec import codec_direction, exchange_codec_steps
from .exchange_dtype import SendChanges, cast_floating, exchange_dtype, narrowed
from .gaussian_noise import GaussianNoise
from .quantize_changes import QuantizeChanges


__all__ = [
    "ClipUpdate",
    "EncodeState",
    "EncodeUpdate",
    "GaussianNoise",
    "Memories",
    "Memory",
    "Postprocessor",
    "QuantizeChanges",
    "SendChanges",
    "cast_floating",
    "codec_direction",
    "exchange_codec_steps",
    "exchange_dtype",
    "narrowed",
    "run_client_receive",
    "run_client_send",
    "run_on_sums",
    "run_server_receive",
    "run_server_send",
]
