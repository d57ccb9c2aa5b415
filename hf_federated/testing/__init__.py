"""
The conformance kit: [`check_method`] runs a method on every engine and compares the bytes.

It needs no test framework, and `fork` of the operating system.
"""

from .check_method import check_method
from .report import ConformanceError, ConformanceReport
from .tiny import tiny_arguments, tiny_dataset, tiny_model


__all__ = [
    "ConformanceError",
    "ConformanceReport",
    "check_method",
    "tiny_arguments",
    "tiny_dataset",
    "tiny_model",
]
