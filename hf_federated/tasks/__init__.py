"""From raw rows to model inputs, and from predictions to metrics: one object a task."""

from .question_answering import QuestionAnswering
from .sequence_tagging import SequenceTagging
from .text_classification import TextClassification


__all__ = ["QuestionAnswering", "SequenceTagging", "TextClassification"]
