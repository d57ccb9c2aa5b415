"""The card of a saved record, of whichever kind of run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..audits import LeakageAudit
from .leakage import add_leakage
from .model_card import render
from .run_record import RunRecord
from .split_card import render_split
from .split_record import SplitRecord
from .tables import plural


def render_saved(path: str | os.PathLike[str], audit: str | os.PathLike[str] | None = None) -> str:
    """
    The text of the card of a saved record.

    Args:
        path (`str` or `os.PathLike`): What [`RunRecord`] or [`SplitRecord`] saved.
        audit (`str` or `os.PathLike`, *optional*):
            What `hf-federated audit` measured of a split model, its `audit.json`: the card gets a section with
            what it found at this model's cut.

    Raises:
        ValueError: If the audit did not measure the model's cuts or how its states travelled, or the model was not
            split.
    """
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    if "split" in values:
        record = SplitRecord.from_dict(values)
        if audit is None:
            return render_split(record)
        measured = LeakageAudit.load(audit)
        _check_measured(measured, record)
        return add_leakage(render_split(record), measured, record.split["head_blocks"])
    if audit is not None:
        raise ValueError(f"{path} is not the record of a split model: `hf-federated audit` measured another one.")
    return render(RunRecord.from_dict(values))


def _check_measured(audit: LeakageAudit, record: SplitRecord) -> None:
    wire_dtype, tail_blocks = record.split["wire_dtype"], record.split["tail_blocks"]
    if wire_dtype not in audit.config.wire_dtypes:
        raise ValueError(
            f"States of this model travelled as {wire_dtype}, and the audit measured"
            f" {', '.join(audit.config.wire_dtypes)}: give it --wire-dtypes {wire_dtype}."
        )
    if audit.targets and audit.config.tail_blocks != tail_blocks:
        raise ValueError(
            f"This model's tail has {plural(tail_blocks, 'block')}, and the audit's {audit.config.tail_blocks}: give"
            f" it --tail-blocks {tail_blocks}."
        )
