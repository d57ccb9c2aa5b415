"""Postprocessing of updates between local training and aggregation: clipping, noise, narrower dtypes, custom steps."""

from .base import Postprocessor, run_client_side, run_server_side
from .clipping import ClipUpdate
from .exchange_dtype import SendChanges, cast_floating, exchange_dtype
from .gaussian_noise import GaussianNoise


__all__ = [
    "ClipUpdate",
    "GaussianNoise",
    "Postprocessor",
    "SendChanges",
    "cast_floating",
    "exchange_dtype",
    "run_client_side",
    "run_server_side",
]
