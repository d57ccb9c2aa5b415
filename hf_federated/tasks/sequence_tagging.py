"""Sequence tagging: predict a tag for each word, such as the named entities of OntoNotes."""

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

from ..data.column_values import check_columns
from ..utils.errors import IncompleteRowError
from .base import IGNORED, NUM_POSITIONS, ComputeMetrics, Task, first_output
from .columns import Batch, check_length, check_names, is_blank, label_maps, list_names, read_column, row_name
from .metrics import Accuracy, SpanF1
from .metrics.span_f1 import has_position


@dataclass(frozen=True)
class SequenceTagging(Task):
    """
    Sequence tagging: one tag for each word of an example (OntoNotes in FedNLP, section 3.1).

    The first sub-token of a word has the word's tag. The other sub-tokens and the special tokens have −100, which the
    loss and the metrics skip, as in Devlin et al., "BERT" (2019), section 5.3. A raw tag of −100 is also skipped.
    Words beyond `max_length`, and words for which the tokenizer returns no tokens, are not used for training or
    metrics.

    Encoded examples have the tokenizer's columns, always with an attention mask, and `labels` of shape `(length,)`.
    The metric is the accuracy over words (`token_accuracy`). If the tags describe spans (`B-PER`, `I-PER`, `O`), the
    metrics also include precision, recall and F1 of whole entities.

    Args:
        tag_names (`Sequence[str]`): Tag names. The position of a name is its tag ID.
        tokens_column (`str`, *optional*, defaults to `"tokens"`): The column with the lists of words.
        tags_column (`str`, *optional*, defaults to `"ner_tags"`):
            The column with the lists of tags, as tag IDs or tag names.
        max_length (`int`, *optional*):
            Maximum number of tokens per example, including special tokens. Defaults to the maximum of the tokenizer.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if an example has no words, an unknown tag or a
            different number of tags and words, or if the tokenizer is not a fast tokenizer.
        ImportError: From `build_compute_metrics`, if the tags describe spans and seqeval (extra `metrics`) is not
            installed.

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
    metric_names: ClassVar[tuple[str, ...]] = ("token_accuracy", "span_precision", "span_recall", "span_f1")
    prediction_unit = "word"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag_names", check_names("tag_names", self.tag_names))
        check_length("max_length", self.max_length)

    @classmethod
    def from_dataset(cls, dataset: Dataset, tags_column: str = "ner_tags", **kwargs: Any) -> SequenceTagging:
        """
        Create the task with the tag names of a dataset.

        The names are those of the `ClassLabel` feature. For string tags, they are the distinct values, with `O` first.

        Args:
            dataset (`datasets.Dataset`): The examples of all clients.
            tags_column (`str`, *optional*, defaults to `"ner_tags"`): The column with the lists of tags.
            kwargs (*optional*): Further arguments of the class.

        Raises:
            ValueError: If the column does not exist, or if it contains tag IDs without names.

        Example:

        ```python
        >>> from datasets import Dataset
        >>> from hf_federated.tasks import SequenceTagging

        >>> dataset = Dataset.from_dict({"tokens": [["in", "paris"]], "ner_tags": [["O", "B-LOC"]]})
        >>> SequenceTagging.from_dataset(dataset).tag_names
        ('O', 'B-LOC')

        ```
        """
        check_columns(dataset.column_names, [tags_column])
        feature = getattr(dataset.features[tags_column], "feature", None)
        if isinstance(feature, ClassLabel):
            return cls(feature.names, tags_column=tags_column, **kwargs)
        values = set(chain.from_iterable(dataset[tags_column]))
        if not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"The column {tags_column!r} is {dataset.features[tags_column]}, whose tags have no names. Set"
                " `tag_names`, or cast the column to lists of ClassLabel."
            )
        return cls(sorted(values, key=lambda tag: (tag != "O", tag)), tags_column=tags_column, **kwargs)

    @property
    def main_metric(self) -> str:
        """The metric for comparing runs."""
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
        """Find examples without words."""
        return [all(map(is_blank, words or ())) for words in read_column(batch, self.tokens_column)]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Return the tokenizer's columns and `labels`, one encoded example per raw example. See [`Task.encode`]."""
        words = self._read_words(batch, indices)
        tags = self._read_tags(batch, words, indices) if with_labels else None
        tokens = self._tokenize(words, tokenizer)
        encoded = dict(tokens.items())
        if tags is not None:
            encoded["labels"] = _at_first_sub_tokens(tokens, tags)
        return encoded

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        Return the tokenizer's columns, with word numbers as `labels` and the number of words as `num_positions`.

        The first sub-token of a word has the word's position in the example as its label, so that all tokenizers refer
        to the same words. `num_positions` also counts words for which the tokenizer returns no tokens. See
        [`Task.encode_public`].
        """
        words = self._read_words(batch, indices)
        tokens = self._tokenize(words, tokenizer)
        numbers = _at_first_sub_tokens(tokens, [np.arange(len(row)) for row in words])
        return {**tokens, "labels": numbers, NUM_POSITIONS: [len(row) for row in words]}

    def _tokenize(self, words: list[list[str]], tokenizer: Any) -> BatchEncoding:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not return the word of each token. Use a fast tokenizer."
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
                    f"{row_name(position, indices)} has no list of words in the column {self.tokens_column!r}. Correct"
                    " the value, or drop the row."
                )
            # Some corpora contain empty words. The tokenizer returns no tokens for them.
            if not words or not any(word.strip() for word in words):
                raise IncompleteRowError(
                    f"{row_name(position, indices)} has no words in the column {self.tokens_column!r}. Drop such rows."
                )
        return rows

    def _read_tags(self, batch: Batch, words: list[list[str]], indices: Sequence[int] | None) -> list[np.ndarray]:
        rows = list(read_column(batch, self.tags_column))
        for position, (row_words, row_tags) in enumerate(zip(words, rows, strict=True)):
            if row_tags is None or len(row_tags) != len(row_words):
                found = "no tags" if not row_tags else f"{len(row_tags)} tags"
                raise ValueError(
                    f"{row_name(position, indices)} has {found} in the column {self.tags_column!r}, but"
                    f" {len(row_words)} words. Provide one tag per word, or encode with `with_labels=False`."
                )
        number_of: dict[Any, int] = {name: number for number, name in enumerate(self.tag_names)}
        number_of.update({number: number for number in (*range(len(self.tag_names)), IGNORED)})
        unknown = {tag for tag in set(chain.from_iterable(rows)) if tag not in number_of}
        if unknown:
            position, tag = next((i, tag) for i, tags in enumerate(rows) for tag in tags if tag in unknown)
            raise ValueError(
                f"{row_name(position, indices)} has the tag {tag!r} in the column {self.tags_column!r}; allowed are"
                f" {list_names(self.tag_names)}."
            )
        return [np.fromiter(map(number_of.__getitem__, tags), dtype=np.int64, count=len(tags)) for tags in rows]

    def data_collator(
        self, tokenizer: Any, model: PreTrainedModel | None = None
    ) -> DataCollatorForTokenClassification:
        """Pad inputs, and pad labels with −100, to shape `(batch, length)`. See [`Task.data_collator`]."""
        return DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED)

    @staticmethod
    def preprocess_logits_for_metrics(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """
        Reduce logits to the most likely tags, so that evaluation does not store logits.

        Args:
            logits (`torch.Tensor` of shape `(batch, length, tags)`, or a tuple that begins with it):
                The logits of the model.
            labels (`torch.Tensor` of shape `(batch, length)`): The correct tags. Not used.

        Returns:
            `torch.Tensor` of shape `(batch, length)`, `int64`.
        """
        return first_output(logits).argmax(dim=-1)  # type: ignore[call-overload]  # a tensor here

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes the accuracy over words and, for tags of spans, the F1 of entities.

        The function accepts predicted tags of shape `(examples, length)` or logits of the tags. No argument is used.
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
        """Return the entity metric if all tags describe spans, otherwise `None`."""
        tags = [tag for tag in self.tag_names if tag != "O"]
        if tags and all(has_position(tag) for tag in tags):
            return SpanF1()
        if tags and all(has_position(tag, "BILU") for tag in tags):
            return SpanF1(scheme="BILOU")
        return None


def _at_first_sub_tokens(tokens: BatchEncoding, tags: Sequence[np.ndarray]) -> list[list[int]]:
    """Set the tags of words at first sub-tokens, and −100 elsewhere. The tags of an example have shape `(words,)`."""
    rows = []
    for position, word_tags in enumerate(tags):
        # Special tokens have the word ID None, which becomes NaN.
        words = np.array(tokens.word_ids(position), dtype=float)
        first = ~np.isnan(words)
        first[1:] &= words[1:] != words[:-1]
        labels = np.full(len(words), IGNORED)
        labels[first] = word_tags[words[first].astype(np.int64)]
        rows.append(labels.tolist())
    return rows
