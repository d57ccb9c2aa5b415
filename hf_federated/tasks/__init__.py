"""Tasks: encode raw examples as model inputs and compute metrics from predictions."""

from .base import Task
from .candidates import CandidateTask
from .cloze_classification import ClozeClassification
from .language_modeling import LanguageModeling
from .question_answering import QuestionAnswering
from .seq2seq import Seq2Seq
from .sequence_tagging import SequenceTagging
from .summarization import Summarization
from .superglue import SuperGlueClassification, SuperGlueCloze, SuperGlueSeq2Seq, superglue_cloze_rows, superglue_rows
from .text_classification import TextClassification
from .text_encoder import TextEncoder


# Task names in recipes.
TASKS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "cloze-classification": ClozeClassification,
    "sequence-tagging": SequenceTagging,
    "question-answering": QuestionAnswering,
    "seq2seq": Seq2Seq,
    "language-modeling": LanguageModeling,
    "summarization": Summarization,
    "superglue-classification": SuperGlueClassification,
    "superglue-seq2seq": SuperGlueSeq2Seq,
    "superglue-cloze": SuperGlueCloze,
}

__all__ = [
    "TASKS",
    "CandidateTask",
    "ClozeClassification",
    "LanguageModeling",
    "QuestionAnswering",
    "Seq2Seq",
    "SequenceTagging",
    "Summarization",
    "SuperGlueClassification",
    "SuperGlueCloze",
    "SuperGlueSeq2Seq",
    "Task",
    "TextClassification",
    "TextEncoder",
    "superglue_cloze_rows",
    "superglue_rows",
]
