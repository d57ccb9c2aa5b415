"""From raw rows to model inputs, and from predictions to metrics: one object a task."""

from .base import Task
from .language_modeling import LanguageModeling
from .question_answering import QuestionAnswering
from .seq2seq import Seq2Seq
from .sequence_tagging import SequenceTagging
from .superglue import SuperGlueClassification, SuperGlueSeq2Seq, superglue_rows
from .text_classification import TextClassification


# Their names in recipes.
TASKS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "sequence-tagging": SequenceTagging,
    "question-answering": QuestionAnswering,
    "seq2seq": Seq2Seq,
    "language-modeling": LanguageModeling,
    "superglue-classification": SuperGlueClassification,
    "superglue-seq2seq": SuperGlueSeq2Seq,
}

__all__ = [
    "TASKS",
    "LanguageModeling",
    "QuestionAnswering",
    "Seq2Seq",
    "SequenceTagging",
    "SuperGlueClassification",
    "SuperGlueSeq2Seq",
    "Task",
    "TextClassification",
    "superglue_rows",
]
