"""Render the card of a saved record, for federated runs and for split training."""

from __future__ import annotations

import os
from pathlib import Path

from ..audits import LeakageAudit
from ..utils.untrusted_json import read_json
from .card_record import record_errors
from .curve import CURVE_NAME
from .leakage import add_leakage
from .model_card import render
from .run_record import RunRecord
from .split_card import render_split
from .split_record import SplitRecord
from .tables import plural


def render_saved(path: str | os.PathLike[str], audit: str | os.PathLike[str] | None = None) -> str:
    """
    Render the card of a saved record.

    Args:
        path (`str` or `os.PathLike`):
            JSON file that [`RunRecord`] or [`SplitRecord`] saved. The card shows the learning curve if its file is in
            the same folder.
        audit (`str` or `os.PathLike`, *optional*):
            The `audit.json` that `hf-federated audit` wrote for this split model. If given, the card gets a section
            with the results at the cut of this model.

    Returns:
        `str`: The text of the card.

    Raises:
        ValueError: If the file is not a record, the audit did not measure the cuts or the wire dtype of the model, or
            an audit is given for a model that was not split.
    """
    with record_errors(path):
        values = read_json(path)
        record = SplitRecord.from_dict(values) if "split" in values else RunRecord.from_dict(values)
        picture = CURVE_NAME if (Path(path).parent / CURVE_NAME).is_file() else None
        card = render_split(record, picture) if isinstance(record, SplitRecord) else render(record, picture)
    if audit is None:
        return card
    if not isinstance(record, SplitRecord):
        raise ValueError(
            f"{path} is not the record of a split model, but an audit was given. `hf-federated audit` applies to split"
            " models only: pass the record of the audited model, or leave `audit` out."
        )
    leakage_audit = LeakageAudit.load(audit)
    _check_audit_settings(leakage_audit, record)
    return add_leakage(card, leakage_audit, record.split["head_blocks"])


def _check_audit_settings(audit: LeakageAudit, record: SplitRecord) -> None:
    wire_dtype, tail_blocks = record.split["wire_dtype"], record.split["tail_blocks"]
    if wire_dtype not in audit.config.wire_dtypes:
        raise ValueError(
            f"The model sent hidden states as {wire_dtype}, but the audit measured"
            f" {', '.join(audit.config.wire_dtypes)}. Run the audit with --wire-dtypes {wire_dtype}."
        )
    if audit.targets and audit.config.tail_blocks != tail_blocks:
        raise ValueError(
            f"The tail of the model has {plural(tail_blocks, 'block')}, but the audit measured a tail of"
            f" {audit.config.tail_blocks}. Run the audit with --tail-blocks {tail_blocks}."
        )
