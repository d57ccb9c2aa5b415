"""The features that the rules of `exchange_codec` name."""

from __future__ import annotations

import copy

import torch

from ..postprocessing import Postprocessor, codec_direction
from .combination import Combination
from .features import AVERAGING, STEP, Feature, decodes, step_feature


def _codec(name: str, *directions: str) -> Feature:
    def find(c: Combination) -> str:
        return f"exchange_codec={c.config.exchange_codec!r}" if codec_direction(c.config) in directions else ""

    return Feature(STEP, name, find)


ANY_CODEC = _codec("`exchange_codec`", "both", "up", "down")
CODEC_UP = _codec("`exchange_codec` on the way up", "both", "up")
CODEC_DOWN = _codec("`exchange_codec` on the way down", "both", "down")
CHECKED_STEP = step_feature(
    "A postprocessor with `check_update`, such as `ClipUpdate`",
    lambda step: type(step).check_update is not Postprocessor.check_update,
    with_own=True,
)
CHANGES_REQUESTS = step_feature(
    "A postprocessor that changes messages to clients", lambda step: step.changes_requests, with_own=True
)


def _encodes_before_noise(c: Combination) -> str:
    for number, step in enumerate(c.postprocessors):
        if decodes(step) and any(later.adds_noise for later in c.postprocessors[number + 1 :]):
            return type(step).__name__
    return ""


BEFORE_NOISE = Feature(STEP, "A postprocessor with `server_receive` before noise", _encodes_before_noise)


def _sends_extra(c: Combination) -> str:
    # A copy, because a method may prepare a round.
    extra = copy.copy(c.averaging).update_extra({"parameter": torch.zeros(2, 2)})
    return f"aggregation={c.averaging.name!r}" if any(value.ndim for value in extra.values()) else ""


SENDS_EXTRA = Feature(AVERAGING, "A method whose clients send tensors in `extra`, such as `scaffold`", _sends_extra)
