"""Values of Python as strict JSON, which has neither NaN nor infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_strict_json(value: Any) -> Any:
    """Convert a value to types of strict JSON. NaN and infinity become `None`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_strict_json(item) for item in value]
    return value
