"""A model card from a run: what was trained, by whom, on what, and what the run logged."""

from .leakage import add_leakage, leakage_report, leakage_section
from .model_card import render, render_model_card
from .run_record import RunRecord


__all__ = ["RunRecord", "add_leakage", "leakage_report", "leakage_section", "render", "render_model_card"]
