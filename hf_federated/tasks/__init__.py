"""From raw rows to model inputs, and from predictions to metrics: one object a task."""

from .base import Task
from .language_modeling import LanguageModeling
from .question_answering import QuestionAnswering
from .seq2seq import Seq2Seq
from .sequence_tagging import SequenceTagging
from .text_classification import TextClassification


__all__ = ["LanguageModeling", "QuestionAnswering", "Seq2Seq", "SequenceTagging", "Task", "TextClassification"]
