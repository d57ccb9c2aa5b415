"""SuperGLUE as one multi-task problem: FedDRS's templates in two forms, FL-GLM's cloze questions, official metrics."""

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
