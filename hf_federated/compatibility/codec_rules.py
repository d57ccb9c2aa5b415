"""The rules of `exchange_codec`, and of postprocessors that encode."""

from __future__ import annotations

from . import features as f
from .codec_features import (
    ANY_CODEC,
    BEFORE_NOISE,
    CHANGES_REQUESTS,
    CHECKED_STEP,
    CODEC_DOWN,
    CODEC_UP,
    SENDS_EXTRA,
)
from .rule import Rule


CODEC_RULES: tuple[Rule, ...] = (
    Rule(
        ANY_CODEC,
        f.NO_PARAMETERS,
        "the codec works on parameters, but clients send none",
        "Leave `exchange_codec` out.",
    ),
    Rule(
        ANY_CODEC,
        f.PREDICTIONS_ONLY,
        "the codec works on parameters, but clients send predictions and no parameters",
        "Leave `exchange_codec` out. To reduce the size of the predictions, set `prediction_dtype` and `top_k` of the "
        "distillation.",
    ),
    Rule(
        ANY_CODEC,
        f.OWN_ENCODING,
        "the method encodes the exchanged parameters itself",
        "Leave `exchange_codec` out.",
    ),
    Rule(
        ANY_CODEC,
        SENDS_EXTRA,
        "the codec does not encode `extra`, and the method assumes that the server receives the exact change of a "
        "client",
        "Use a method without such tensors, such as aggregation='fedavg', or set `exchange_dtype`.",
    ),
    Rule(
        ANY_CODEC,
        f.EXCHANGE_DTYPE,
        "both encode the exchanged parameters",
        "Leave `exchange_dtype` out.",
    ),
    Rule(
        ANY_CODEC,
        f.ENCODES,
        "both encode the exchanged parameters",
        "Leave the postprocessor or `exchange_codec` out.",
    ),
    Rule(
        ANY_CODEC,
        f.SHARDED,
        "the codec encodes whole tensors, and each process holds shards of them",
        "Set exchange_dtype='bfloat16' in place of `exchange_codec`, or use plain data parallelism.",
    ),
    Rule(
        CODEC_DOWN,
        CHANGES_REQUESTS,
        "the codec sends all clients of a round the same state",
        "Set direction='up' in `exchange_codec_kwargs`.",
    ),
    Rule(
        CODEC_DOWN,
        f.OWN_STATES,
        "the codec sends all clients of a round the same state",
        "Set direction='up' in `exchange_codec_kwargs`.",
    ),
    Rule(
        CODEC_DOWN,
        f.OPEN_REQUESTS,
        "a client that trains over several rounds has no reference of the last round",
        "Set direction='up' in `exchange_codec_kwargs`, or use the postprocessor QuantizeChanges.",
    ),
    Rule(
        CODEC_UP,
        CHECKED_STEP,
        "the server checks the decoded change, to which the error feedback adds what earlier rounds lost",
        "Set direction='down' in `exchange_codec_kwargs`.",
    ),
    Rule(
        CODEC_UP,
        f.SECURE_AGGREGATION,
        "the server cannot decode the updates in a sum",
        "Set direction='down' in `exchange_codec_kwargs`, and bits=16 in `secure_aggregation_kwargs` for a smaller "
        "upload.",
    ),
    Rule(
        BEFORE_NOISE,
        f.ADDS_NOISE,
        "the later step would add its noise to encoded values",
        "Pass the step with the noise first in `postprocessors`.",
    ),
)
