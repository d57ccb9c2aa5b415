"""Checks of examples before training. Each file has one kind of finding, and `doctor.py` runs all of them."""

from .check import check_datasets
from .doctor import Limit, Report, examine
from .finding import Finding


__all__ = ["Finding", "Limit", "Report", "check_datasets", "examine"]
