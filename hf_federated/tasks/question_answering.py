"""Extractive question answering: the answer is a span of a context, which can exceed the model's maximum length.

Sources: Devlin et al., "BERT" (2019), sections 4.2 and 4.3, for spans and for the score of an empty answer; Rajpurkar
et al. (2016, 2018) for the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, EvalPrediction, PreTrainedModel

from ..utils.errors import IncompleteRowError
from .base import ComputeMetrics, Task
from .columns import Batch, check_length, find_blank, read_column, read_texts, row_name, rows_by_id
from .metrics import ExactMatch, TokenF1


FEATURES_AT_ONCE = 256  # limits the memory for candidate spans


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """
    Extractive question answering (MRQA in FedNLP, section 3.1).

    Each example becomes one or more *features*. A feature contains the whole question, followed by a window of the
    context. Consecutive windows overlap by `stride` tokens. Encoded features have the tokenizer's columns, always with
    an attention mask, and these columns:

    - `start_positions`, `end_positions` (`int`): the first and last token of the first answer. Both are
      `null_position` if the window does not contain the whole answer;
    - `example_id` (`str`): the ID of the example;
    - `offset_starts`, `offset_ends` (shape `(length,)`): the start and end of each token in the context, in
      characters. They are −1 for tokens outside the context;
    - `null_position` (`int`): the token that represents "no answer".

    `Trainer` removes `example_id`, `offset_starts`, `offset_ends` and `null_position` from the model inputs.

    The predicted answer is the span with the highest score, which is start logit + end logit, over all features of the
    example. Each feature contributes the spans between its `n_best` starts and its `n_best` ends. With `no_answer`,
    the null score is the smallest sum of the two logits at the null position over the features of the example. The
    predicted answer is empty if the null score exceeds the highest span score by more than `null_threshold`. The
    metrics are exact match and token F1, with the maximum over the gold answers of each example.

    Args:
        max_length (`int`, *optional*, defaults to 384): Maximum number of tokens per feature, including the question
            and special tokens.
        stride (`int`, *optional*, defaults to 128): Number of context tokens that consecutive windows share.
        no_answer (`bool`, *optional*, defaults to `False`):
            Whether examples can have no answer, as in SQuAD 2. Such examples have empty `answers` or empty texts in
            `answers`.
        null_threshold (`float`, *optional*, defaults to 0.0): Minimum score difference for predicting no answer.
        n_best (`int`, *optional*, defaults to 20): Number of starts and number of ends per feature to combine.
        max_answer_length (`int`, *optional*, defaults to 30): Maximum number of tokens of an answer.
        id_column (`str`, *optional*, defaults to `"id"`): The column with unique IDs.
        question_column (`str`, *optional*, defaults to `"question"`): The column with the questions.
        context_column (`str`, *optional*, defaults to `"context"`): The column with the contexts.
        answers_column (`str`, *optional*, defaults to `"answers"`):
            The column with the gold answers, either in SQuAD format, `{"text": [...], "answer_start": [...]}`, or as a
            list of `{"text": ..., "answer_start": ...}`.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if a question or a context is empty, an answer
            is missing or is not at its position in the context, or a question leaves no space for the context. It also
            raises it if the tokenizer is not a fast tokenizer that pads on the right.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import QuestionAnswering

    >>> words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "who": 2, "it": 3, "was": 4, "anna": 5}, "[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    >>> answers = {"text": ["anna"], "answer_start": [7]}
    >>> row = {"id": ["q1"], "question": ["who"], "context": ["it was anna"], "answers": [answers]}
    >>> encoded = QuestionAnswering().encode(row, tokenizer)
    >>> encoded["input_ids"], encoded["start_positions"], encoded["end_positions"]
    ([[2, 3, 4, 5]], [3], [3])

    ```
    """

    max_length: int = 384
    stride: int = 128
    no_answer: bool = False
    null_threshold: float = 0.0
    n_best: int = 20
    max_answer_length: int = 30
    id_column: str = "id"
    question_column: str = "question"
    context_column: str = "context"
    answers_column: str = "answers"

    # The metric for comparing runs.
    main_metric = "token_f1"
    metric_names: ClassVar[tuple[str, ...]] = ("exact_match", "token_f1")
    model_class: ClassVar[Any] = AutoModelForQuestionAnswering
    # The softmax is over the tokens of the input, which depend on the tokenizer.
    prediction_unit = None
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("stride", self.stride, minimum=0)
        check_length("max_length", self.max_length, minimum=self.stride + 1)
        check_length("n_best", self.n_best)
        check_length("max_answer_length", self.max_answer_length)

    @property
    def one_feature_per_example(self) -> bool:
        """`False`, because a long context becomes several features."""
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.id_column, self.question_column, self.context_column, self.answers_column)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find examples without a question, without a context or, if required, without an answer."""
        empty = find_blank(batch, (self.question_column, self.context_column))
        if self.no_answer:
            return empty
        answers = read_column(batch, self.answers_column)
        return [before or not _gold_answers(golds) for before, golds in zip(empty, answers, strict=True)]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Return one or more features per example. See [`Task.encode`]."""
        if not tokenizer.is_fast or tokenizer.padding_side != "right":
            raise ValueError(
                f"{type(tokenizer).__name__} returns no character offsets, or it pads on the left. Use a fast"
                ' tokenizer with tokenizer.padding_side = "right".'
            )
        ids = read_column(batch, self.id_column)
        questions = [question.strip() for question in read_texts(batch, self.question_column, indices)]
        contexts = read_texts(batch, self.context_column, indices)
        spans = self._read_spans(batch, contexts, indices) if with_labels else None
        self._check_question_lengths(questions, tokenizer, indices)
        tokens = tokenizer(
            questions,
            contexts,
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=True,
        )
        encoded: dict[str, list[Any]] = dict(tokens.items())
        offsets, rows = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
        encoded["example_id"] = [str(ids[row]) for row in rows]
        encoded |= {name: [] for name in ("offset_starts", "offset_ends", "null_position")}
        if spans is not None:
            encoded |= {"start_positions": [], "end_positions": []}
        for feature, row in enumerate(rows):
            input_ids = encoded["input_ids"][feature]
            sequences = tokens.sequence_ids(feature)
            begin, length = (sequences.index(1), sequences.count(1)) if 1 in sequences else (0, 0)
            context = slice(begin, begin + length)  # the tokens of the context are contiguous
            flat = np.fromiter(chain.from_iterable(offsets[feature][context]), dtype=np.int64, count=2 * length)
            characters = np.full((2, len(input_ids)), -1)
            characters[:, context] = flat.reshape(-1, 2).T
            encoded["offset_starts"].append(characters[0])
            encoded["offset_ends"].append(characters[1])
            null = input_ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in input_ids else 0
            encoded["null_position"].append(null)
            if spans is not None:
                span = _token_span(characters[:, context], spans[row])
                first, last = (null, null) if span is None else (begin + span[0], begin + span[1])
                encoded["start_positions"].append(first)
                encoded["end_positions"].append(last)
        return encoded

    def _check_question_lengths(self, questions: list[str], tokenizer: Any, indices: Sequence[int] | None) -> None:
        """Check that each question leaves more tokens than the stride. Otherwise, the tokenizer panics."""
        special = tokenizer.num_special_tokens_to_add(pair=True)
        for position, question in enumerate(tokenizer(questions, add_special_tokens=False)["input_ids"]):
            if self.max_length - special - len(question) <= self.stride:
                raise ValueError(
                    f"{row_name(position, indices)} has a question of {len(question)} tokens. With {special} special"
                    f" tokens and a stride of {self.stride}, {self.max_length} tokens leave no space for the context."
                    " Increase `max_length`, decrease `stride`, or shorten the question."
                )

    def _read_spans(
        self, batch: Batch, contexts: list[str], indices: Sequence[int] | None
    ) -> list[tuple[int, int] | None]:
        """Return the character span of each first answer, without surrounding spaces, or None without an answer."""
        spans: list[tuple[int, int] | None] = []
        for position, answers in enumerate(read_column(batch, self.answers_column)):
            row, golds = row_name(position, indices), _gold_answers(answers)
            if not golds and not self.no_answer:
                raise IncompleteRowError(
                    f"{row} has no answer in the column {self.answers_column!r}. Drop such rows, set `no_answer=True`,"
                    " or encode with `with_labels=False`."
                )
            for text, begin in golds:
                found = contexts[position][begin : begin + len(text)] if begin >= 0 else ""
                if found != text:
                    where = "outside the context" if not found else f"but the context has {found!r} there"
                    raise ValueError(
                        f"{row} has the answer {text!r} at character {begin}, {where}. Correct `answer_start`, which"
                        " counts characters from 0."
                    )
            if golds:
                text, begin = golds[0]
                begin += len(text) - len(text.lstrip())
                spans.append((begin, begin + len(text.strip())))
            else:
                spans.append(None)
        return spans

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> DataCollatorWithPadding:
        """Pad inputs to shape `(batch, length)`. See [`Task.data_collator`]."""
        return DataCollatorWithPadding(tokenizer)

    def postprocess(
        self, start_logits: np.ndarray, end_logits: np.ndarray, features: Dataset, rows: Dataset
    ) -> list[str]:
        """
        Return the predicted answer of each example from the logits of its features.

        Args:
            start_logits (`np.ndarray` of shape `(features, length)`): Logits of the first token of an answer.
            end_logits (`np.ndarray` of shape `(features, length)`): Logits of the last token of an answer.
            features (`Dataset`): The features from [`~QuestionAnswering.encode`], in the order of the logits.
            rows (`Dataset`): The raw examples.

        Returns:
            `list[str]`: A span of the context, or `""`, for each example.

        Raises:
            ValueError: If logits, features and examples do not belong together.
        """
        if len(start_logits) != len(features):
            raise ValueError(
                f"There are logits for {len(start_logits)} features, but `features` has {len(features)} rows. Pass the"
                " features that produced the logits."
            )
        ids = [str(value) for value in rows[self.id_column]]
        row_of = rows_by_id(ids, features["example_id"])
        best: list[tuple[float, int, int]] = [(-np.inf, 0, 0)] * len(ids)
        null_scores = np.full(len(ids), np.inf)
        for begin in range(0, len(features), FEATURES_AT_ONCE):
            part = features[begin : begin + FEATURES_AT_ONCE]
            starts, ends = start_logits[begin:][:FEATURES_AT_ONCE], end_logits[begin:][:FEATURES_AT_ONCE]
            scores, characters = self._best_spans(starts, ends, part["offset_starts"], part["offset_ends"])
            for feature, (example_id, null) in enumerate(zip(part["example_id"], part["null_position"], strict=True)):
                row = row_of[example_id]
                if scores[feature] > best[row][0]:
                    best[row] = (scores[feature], *characters[feature])
                null_scores[row] = min(null_scores[row], starts[feature, null] + ends[feature, null])
        answers = []
        for context, (score, first, last), null_score in zip(
            rows[self.context_column], best, null_scores, strict=True
        ):
            empty = self.no_answer and null_score > score + self.null_threshold
            answers.append("" if empty else context[first:last])
        return answers

    def _best_spans(
        self, starts: np.ndarray, ends: np.ndarray, offset_starts: list[list[int]], offset_ends: list[list[int]]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return the best score and the character span of each feature. The logits have shape `(features, length)`."""
        offsets = np.full((2, *starts.shape), -1)
        for feature, (begins, finishes) in enumerate(zip(offset_starts, offset_ends, strict=True)):
            offsets[0, feature, : len(begins)], offsets[1, feature, : len(finishes)] = begins, finishes
        outside = offsets[0] < 0
        first, first_logits = _top_k(np.where(outside, -np.inf, starts), self.n_best)
        last, last_logits = _top_k(np.where(outside, -np.inf, ends), self.n_best)
        # Combine every start with every end. Shape (features, n_best, n_best).
        lengths = last[:, None, :] - first[:, :, None] + 1
        scores = first_logits[:, :, None] + last_logits[:, None, :]
        scores = np.where((lengths >= 1) & (lengths <= self.max_answer_length), scores, -np.inf)
        scores = scores.reshape(len(starts), -1)
        chosen = scores.argmax(axis=1)
        each = np.arange(len(starts))
        first, last = first[each, chosen // last.shape[1]], last[each, chosen % last.shape[1]]
        characters = zip(offsets[0, each, first].tolist(), offsets[1, each, last].tolist(), strict=True)
        return scores[each, chosen], list(characters)

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes `exact_match` and `token_f1` from start and end logits.

        Both logits have shape `(features, length)`. The function requires `features` and `rows` of the evaluation
        dataset, in evaluation order.
        """
        if features is None or rows is None:
            raise ValueError(
                "`features` or `rows` is missing, but answers are read from the raw dataset. Pass the encoded"
                " evaluation dataset as `features` and the raw evaluation dataset as `rows`."
            )
        # Find duplicate and missing IDs before training starts.
        rows_by_id([str(value) for value in rows[self.id_column]], features["example_id"])
        metric = evaluate.combine([ExactMatch(), TokenF1()])

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            answers = self.postprocess(prediction.predictions[0], prediction.predictions[1], features, rows)
            golds = [[text for text, _ in _gold_answers(row)] for row in rows[self.answers_column]]
            return metric.compute(predictions=answers, references=golds)

        return compute_metrics


def _gold_answers(answers: Any) -> list[tuple[str, int]]:
    """Return the non-empty answers of an example as pairs of text and position of the first character."""
    if not answers:
        return []
    if isinstance(answers, dict):
        pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
    else:
        pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
    return [(text, begin) for text, begin in pairs if text and text.strip()]


def _token_span(offsets: np.ndarray, span: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the first and last token of a character span, or None if tokens are missing.

    `offsets` has the shape `(2, context length)`.
    """
    begins, ends = offsets
    if span is None or not len(begins) or span[0] < begins[0] or span[1] > ends[-1]:
        return None
    first = int(np.searchsorted(ends, span[0], side="right"))
    last = int(np.searchsorted(begins, span[1], side="left")) - 1
    return (first, last) if first <= last else None


def _top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and values of the `k` highest logits of each feature, both of shape `(features, k)`."""
    k = min(k, logits.shape[1])
    positions = np.argpartition(-logits, k - 1, axis=1)[:, :k]
    return positions, np.take_along_axis(logits, positions, axis=1)
