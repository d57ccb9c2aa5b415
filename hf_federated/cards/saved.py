"""The card of a saved record, of whichever kind of run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .model_card import render
from .run_record import RunRecord
from .split_card import render_split
from .split_record import SplitRecord


def render_saved(path: str | os.PathLike[str]) -> str:
    """
    The text of the card of a saved record.

    Args:
        path (`str` or `os.PathLike`): What [`RunRecord`] or [`SplitRecord`] saved.
    """
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    return render_split(SplitRecord.from_dict(values)) if "split" in values else render(RunRecord.from_dict(values))
