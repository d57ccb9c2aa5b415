"""Model cards that are rendered from the record of a run."""

from .leakage import add_leakage, leakage_report, leakage_section
from .model_card import render, render_model_card
from .run_record import RunRecord
from .saved_records import render_saved
from .split_card import render_split, render_split_card
from .split_record import SplitRecord


__all__ = [
    "RunRecord",
    "SplitRecord",
    "add_leakage",
    "leakage_report",
    "leakage_section",
    "render",
    "render_model_card",
    "render_saved",
    "render_split",
    "render_split_card",
]
