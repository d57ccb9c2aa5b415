"""Sequence tagging: a tag for each word, such as the named entities of OntoNotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import evaluate
import numpy as np
import torch
from datasets import ClassLabel, Dataset
from transformers import (
    AutoModelForTokenClassification,
    BatchEncoding,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedModel,
)

from .base import (
    IGNORED,
    NUM_POSITIONS,
    Batch,
    ComputeMetrics,
    Task,
    check_length,
    check_names,
    first_output,
    is_blank,
    label_maps,
    read_column,
    row_name,
)
from .metrics import Accuracy, SpanF1
from .metrics.span_f1 import has_position


@dataclass(frozen=True)
class SequenceTagging(Task):
    """
    A tag for each word of a row (OntoNotes in FedNLP, section 3.1).

    A word's tag stands at its first sub-token; its other sub-tokens and special tokens have −100, which the loss and
    the metrics skip, as in Devlin et al., "BERT" (2019), section 5.3. A raw tag of −100 is skipped too. Words behind
    `max_length`, and words of which the tokenizer keeps nothing, are neither trained on nor scored.

    Encoded rows have the tokenizer's columns, always with an attention mask, and `labels` of shape `(length,)`. The
    metric is the accuracy of words (`token_accuracy`) and, where tags name spans (`B-PER`, `I-PER`, `O`), precision,
    recall and F1 of whole entities.

    Args:
        tag_names (`Sequence[str]`): The tags' names by number.
        tokens_column (`str`, *optional*, defaults to `"tokens"`): The column with the lists of words.
        tags_column (`str`, *optional*, defaults to `"ner_tags"`): The column with the lists of tags: numbers or names.
        max_length (`int`, *optional*):
            Tokens that are kept of a row, special ones counted. Defaults to what the tokenizer allows.

    Raises:
        ValueError: If an argument is out of range; from `encode`, if a row has no words, an unknown tag or
            another number of tags than of words, or if the tokenizer is not a fast one.
        ImportError: From `build_compute_metrics`, if seqeval (extra `metrics`) is not installed and tags name spans.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordPiece
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import SequenceTagging

    >>> pieces = Tokenizer(WordPiece({"[PAD]": 0, "[UNK]": 1, "in": 2, "par": 3, "##is": 4}, unk_token="[UNK]"))
    >>> pieces.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]")
    >>> task = SequenceTagging(tag_names=["O", "B-LOC", "I-LOC"])
    >>> encoded = task.encode({"tokens": [["in", "paris"]], "ner_tags": [["O", "B-LOC"]]}, tokenizer)
    >>> encoded["input_ids"], encoded["labels"]
    ([[2, 3, 4]], [[0, 1, -100]])

    ```
    """

    tag_names: Sequence[str]
    tokens_column: str = "tokens"
    tags_column: str = "ner_tags"
    max_length: int | None = None

    model_class: ClassVar[Any] = AutoModelForTokenClassification
    prediction_unit = "word"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag_names", check_names("tag_names", self.tag_names))
        check_length("max_length", self.max_length)

    @classmethod
    def from_dataset(cls, dataset: Dataset, tags_column: str = "ner_tags", **kwargs: Any) -> SequenceTagging:
        """
        The task with the names of a data set's tags: those of a `ClassLabel`, or the strings that occur, `O` first.

        Args:
            dataset (`datasets.Dataset`): Rows of all clients.
            tags_column (`str`, *optional*, defaults to `"ner_tags"`): The column with the lists of tags.
            kwargs (*optional*): Further arguments of the class.

        Raises:
            ValueError: If the column does not exist or holds numbers without names.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated.tasks import SequenceTagging

        >>> dataset = Dataset.from_dict({"tokens": [["in", "paris"]], "ner_tags": [["O", "B-LOC"]]})
        >>> SequenceTagging.from_dataset(dataset).tag_names
        ('O', 'B-LOC')

        ```
        """
        if tags_column not in dataset.column_names:
            raise ValueError(f"There is no column {tags_column!r}; the columns are {', '.join(dataset.column_names)}.")
        feature = getattr(dataset.features[tags_column], "feature", None)
        if isinstance(feature, ClassLabel):
            return cls(feature.names, tags_column=tags_column, **kwargs)
        values = set(chain.from_iterable(dataset[tags_column]))
        if not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"The column {tags_column!r} is {dataset.features[tags_column]}, whose tags have no names. Give"
                " `tag_names`, or cast the column to lists of ClassLabel."
            )
        return cls(sorted(values, key=lambda tag: (tag != "O", tag)), tags_column=tags_column, **kwargs)

    @property
    def main_metric(self) -> str:
        """The metric that runs are compared by."""
        return "token_accuracy" if self._span_metric() is None else "span_f1"

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.tokens_column, self.tags_column)

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """`num_labels`, `id2label` and `label2id`."""
        return label_maps(self.tag_names)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Rows without a word."""
        return [all(map(is_blank, words or ())) for words in read_column(batch, self.tokens_column)]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """The tokenizer's columns and `labels`, one row for each. See [`Task.encode`]."""
        words = self._read_words(batch, indices)
        tags = self._read_tags(batch, words, indices) if with_labels else None
        tokens = self._tokenize(words, tokenizer)
        encoded = dict(tokens.items())
        if tags is not None:
            encoded["labels"] = [
                _at_first_sub_tokens(tokens.word_ids(position), row_tags) for position, row_tags in enumerate(tags)
            ]
        return encoded

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        The tokenizer's columns; as `labels` each word's number in its row at its first sub-token, so that all
        tokenizers speak of the same words; and how many words the row has, those of which nothing is kept too. See
        [`Task.encode_public`].
        """
        words = self._read_words(batch, indices)
        tokens = self._tokenize(words, tokenizer)
        numbers = [
            _at_first_sub_tokens(tokens.word_ids(position), np.arange(len(row))) for position, row in enumerate(words)
        ]
        return {**tokens, "labels": numbers, NUM_POSITIONS: [len(row) for row in words]}

    def _tokenize(self, words: list[list[str]], tokenizer: Any) -> BatchEncoding:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which word a token belongs to. Use a fast tokenizer."
            )
        return tokenizer(
            words,
            is_split_into_words=True,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=True,
        )

    def _read_words(self, batch: Batch, indices: Sequence[int] | None) -> list[list[str]]:
        rows = list(read_column(batch, self.tokens_column))
        for position, words in enumerate(rows):
            if isinstance(words, str) or not all(isinstance(word, str) for word in words or ()):
                raise ValueError(
                    f"{row_name(position, indices)} has something else than a list of words in the column"
                    f" {self.tokens_column!r}. Correct it, or drop the row."
                )
            # Corpora have single empty words, of which the tokenizer keeps nothing.
            if not words or not any(word.strip() for word in words):
                raise ValueError(
                    f"{row_name(position, indices)} has no words in the column {self.tokens_column!r}. Drop such rows."
                )
        return rows

    def _read_tags(self, batch: Batch, words: list[list[str]], indices: Sequence[int] | None) -> list[np.ndarray]:
        rows = list(read_column(batch, self.tags_column))
        for position, (row_words, row_tags) in enumerate(zip(words, rows, strict=True)):
            if row_tags is None or len(row_tags) != len(row_words):
                found = "no tags" if not row_tags else f"{len(row_tags)} tags"
                raise ValueError(
                    f"{row_name(position, indices)} has {found} in the column {self.tags_column!r} for"
                    f" {len(row_words)} words. Give each word one, or encode with `with_labels=False`."
                )
        number_of: dict[Any, int] = {name: number for number, name in enumerate(self.tag_names)}
        number_of.update({number: number for number in (*range(len(self.tag_names)), IGNORED)})
        unknown = {tag for tag in set(chain.from_iterable(rows)) if tag not in number_of}
        if unknown:
            position, tag = next((i, tag) for i, tags in enumerate(rows) for tag in tags if tag in unknown)
            raise ValueError(
                f"{row_name(position, indices)} has the tag {tag!r}; allowed are"
                f" {', '.join(map(repr, self.tag_names))}, or 0 to {len(self.tag_names) - 1}."
            )
        return [np.fromiter(map(number_of.__getitem__, tags), dtype=np.int64, count=len(tags)) for tags in rows]

    def data_collator(
        self, tokenizer: Any, model: PreTrainedModel | None = None
    ) -> DataCollatorForTokenClassification:
        """Pads inputs and, with −100, labels, all of shape `(batch, length)`. See [`Task.data_collator`]."""
        return DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED)

    @staticmethod
    def preprocess_logits_for_metrics(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """
        The most likely tags, so that an evaluation keeps no logits.

        Args:
            logits (`torch.Tensor` of shape `(batch, length, tags)`, or a tuple that begins with it): The model's.
            labels (`torch.Tensor` of shape `(batch, length)`): The right tags, unused.

        Returns:
            `torch.Tensor` of shape `(batch, length)`, `int64`.
        """
        return first_output(logits).argmax(dim=-1)  # type: ignore[call-overload]  # here a tensor

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Accuracy of words and F1 of entities, from tags of shape `(rows, length)` or from their logits.

        Needs none of its arguments.
        """
        accuracy, spans = Accuracy(), self._span_metric()
        names = np.array(self.tag_names, dtype=object)

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            predicted, true = first_output(prediction.predictions), prediction.label_ids
            if predicted.ndim == 3:
                predicted = predicted.argmax(axis=-1)
            scored = true != IGNORED
            metrics = {
                "token_accuracy": accuracy.compute(predictions=predicted[scored], references=true[scored])["accuracy"]
            }
            if spans is not None:
                metrics |= spans.compute(
                    predictions=[names[row[keep]].tolist() for row, keep in zip(predicted, scored, strict=True)],
                    references=[names[row[keep]].tolist() for row, keep in zip(true, scored, strict=True)],
                )
            return metrics

        return compute_metrics

    def _span_metric(self) -> evaluate.Metric | None:
        """The metric of spans, if all tags name them."""
        tags = [tag for tag in self.tag_names if tag != "O"]
        if tags and all(has_position(tag) for tag in tags):
            return SpanF1()
        if tags and all(has_position(tag, "BILU") for tag in tags):
            return SpanF1(scheme="BILOU")
        return None


def _at_first_sub_tokens(word_ids: list[int | None], tags: np.ndarray) -> list[int]:
    """The tags of a row's words at their first sub-tokens, −100 elsewhere. Shapes: `(length,)` from `(words,)`."""
    words = np.array(word_ids, dtype=float)  # None becomes NaN, at special tokens
    first = ~np.isnan(words)
    first[1:] &= words[1:] != words[:-1]
    labels = np.full(len(words), IGNORED)
    labels[first] = tags[words[first].astype(np.int64)]
    return labels.tolist()
