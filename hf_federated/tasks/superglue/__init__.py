"""SuperGLUE as one multi-task problem: FedDRS's templates, FL-GLM's cloze questions, and the official metrics."""

from .cloze import SuperGlueCloze, score_candidates
from .cloze_templates import superglue_cloze_rows
from .formulations import LABEL_NAMES, SuperGlueClassification, SuperGlueSeq2Seq, SuperGlueTask
from .scores import superglue_scores
from .templates import LABELS, superglue_rows


__all__ = [
    "LABELS",
    "LABEL_NAMES",
    "SuperGlueClassification",
    "SuperGlueCloze",
    "SuperGlueSeq2Seq",
    "SuperGlueTask",
    "score_candidates",
    "superglue_cloze_rows",
    "superglue_rows",
    "superglue_scores",
]
