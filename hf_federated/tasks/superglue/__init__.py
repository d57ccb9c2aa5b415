"""SuperGLUE as one multi-task problem, as FedDRS poses it: templates, two forms, official metrics."""

from .formulations import LABEL_NAMES, SuperGlueClassification, SuperGlueSeq2Seq, SuperGlueTask
from .scores import superglue_scores
from .templates import LABELS, superglue_rows


__all__ = [
    "LABELS",
    "LABEL_NAMES",
    "SuperGlueClassification",
    "SuperGlueSeq2Seq",
    "SuperGlueTask",
    "superglue_rows",
    "superglue_scores",
]
