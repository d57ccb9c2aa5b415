"""Text classification: predict one label for a text or for a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import ClassLabel, Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
)

from ..data.column_values import check_columns
from ..utils.arguments import require_one_of
from .base import ComputeMetrics, Task, first_output
from .columns import Batch, check_length, check_names, find_blank, label_maps, read_labels, read_texts
from .label_logits import LabelLogits
from .metrics import F1, Accuracy, MatthewsCorrelation
from .text_encoder import TextEncoder


METRICS = ("accuracy", "f1_macro", "f1_weighted", "f1", "matthews_correlation")


@dataclass(frozen=True)
class TextClassification(Task):
    """
    Text classification: one label per text (20 Newsgroups in FedNLP, section 3.1) or per pair of texts.

    Encoded examples have the tokenizer's columns, always with an attention mask, and `labels` (`int`). The metrics are
    accuracy, macro F1 and weighted F1, and additionally `metric` if it is none of these.

    Args:
        label_names (`Sequence[str]`): Label names. The position of a name is its label ID.
        text_column (`str` or `Sequence[str]`, *optional*, defaults to `"text"`):
            The column with the texts, or the two columns of a text pair.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels, as label IDs (`ClassLabel`) or label names.
        max_length (`int`, *optional*):
            Maximum number of tokens per example, including special tokens. Defaults to the maximum of the tokenizer.
        metric (`str`, *optional*, defaults to `"accuracy"`):
            The metric for comparing runs: `"accuracy"`, `"f1_macro"`, `"f1_weighted"`, `"f1"` or
            `"matthews_correlation"` (CoLA in GLUE). `"f1"` requires two labels and is the F1 of the second label (MRPC
            and QQP in GLUE).

    Raises:
        ValueError: If an argument is out of range, or if `metric` is `"f1"` and the number of labels is not two.
            `encode` raises it if a text is empty, or if a label is missing or unknown.
        ImportError: From `build_compute_metrics`, if scikit-learn (extra `metrics`) is not installed.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import TextClassification

    >>> words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "fine": 3, "film": 4}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    >>> task = TextClassification(label_names=["bad", "good"])
    >>> encoded = task.encode({"text": ["a fine film", "a film"], "label": ["good", "bad"]}, tokenizer)
    >>> encoded["input_ids"], encoded["labels"]
    ([[2, 3, 4], [2, 4]], [1, 0])

    ```
    """

    label_names: Sequence[str]
    text_column: str | Sequence[str] = "text"
    label_column: str = "label"
    max_length: int | None = None
    metric: str = "accuracy"

    model_class: ClassVar[Any] = AutoModelForSequenceClassification
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "f1_macro", "f1_weighted")

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_names", check_names("label_names", self.label_names))
        check_length("max_length", self.max_length)
        if len(self.text_columns) not in (1, 2):
            raise ValueError(f"`text_column` is {self.text_column!r}; set one column, or two columns for text pairs.")
        require_one_of("metric", self.metric, METRICS)
        if self.metric == "f1" and len(self.label_names) != 2:
            raise ValueError(
                f"`metric` is 'f1', which requires two labels, but there are {len(self.label_names)}. Use 'f1_macro'"
                " or 'f1_weighted'."
            )

    @classmethod
    def from_dataset(cls, dataset: Dataset, label_column: str = "label", **kwargs: Any) -> TextClassification:
        """
        Create the task with the label names of a dataset.

        The names are those of the `ClassLabel` feature. For a string column, they are the distinct values, sorted.

        Args:
            dataset (`datasets.Dataset`): The examples of all clients.
            label_column (`str`, *optional*, defaults to `"label"`): The column with the labels.
            kwargs (*optional*): Further arguments of the class.

        Raises:
            ValueError: If the column does not exist, or if it contains label IDs without names.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated.tasks import TextClassification

        >>> dataset = Dataset.from_dict({"text": ["a dull plot", "fine"], "label": ["bad", "good"]})
        >>> TextClassification.from_dataset(dataset).label_names
        ('bad', 'good')

        ```
        """
        check_columns(dataset.column_names, [label_column])
        feature = dataset.features[label_column]
        if isinstance(feature, ClassLabel):
            return cls(feature.names, label_column=label_column, **kwargs)
        values = [value for value in dataset.unique(label_column) if value is not None]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"The column {label_column!r} is {feature}, whose labels have no names. Set `label_names`, or convert"
                f" the column with dataset.class_encode_column({label_column!r})."
            )
        return cls(sorted(values), label_column=label_column, **kwargs)

    @property
    def main_metric(self) -> str:
        """The metric for comparing runs."""
        return self.metric

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The one or two text columns. Their texts must not be empty."""
        return (self.text_column,) if isinstance(self.text_column, str) else tuple(self.text_column)

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (*self.text_columns, self.label_column)

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """`num_labels`, `id2label` and `label2id`."""
        return label_maps(self.label_names)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find examples with an empty text. In a pair, one empty text is enough."""
        return find_blank(batch, self.text_columns)

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Return the tokenizer's columns and `labels`, one encoded example per raw example. See [`Task.encode`]."""
        texts = [read_texts(batch, column, indices) for column in self.text_columns]
        encoded = dict(tokenizer(*texts, truncation=True, max_length=self.max_length, return_attention_mask=True))
        if with_labels:
            encoded["labels"] = read_labels(batch, self.label_column, self.label_names, indices)
        return encoded

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> Any:
        """Pad inputs to shape `(batch, length)`. A text encoder has its own collator. See [`Task.data_collator`]."""
        return tokenizer.data_collator() if isinstance(tokenizer, TextEncoder) else DataCollatorWithPadding(tokenizer)

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes the metrics of the task from logits of shape `(examples, labels)`.

        No argument is used.
        """
        metrics: list[evaluate.Metric] = [Accuracy(), F1(positive_label=1 if self.metric == "f1" else None)]
        if self.metric == "matthews_correlation":
            metrics.append(MatthewsCorrelation())

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            labels = np.argmax(first_output(prediction.predictions), axis=-1)
            return evaluate.combine(metrics).compute(predictions=labels, references=prediction.label_ids)

        return compute_metrics

    def label_logits(
        self, prediction: EvalPrediction, features: Dataset | None = None, rows: Dataset | None = None
    ) -> LabelLogits:
        """Return the logits of shape `(examples, labels)`. See [`Task.label_logits`]."""
        scores = LabelLogits(first_output(prediction.predictions), np.asarray(prediction.label_ids))
        if rows is not None and scores.labels.tolist() != read_labels(
            rows[:], self.label_column, self.label_names, None
        ):
            raise ValueError(
                f"The labels of the {len(scores.labels)} predictions differ from the labels of the {len(rows)} `rows`."
                " Pass the evaluated rows, in evaluation order."
            )
        return scores
