"""Extractive question answering: an answer is a piece of a context, which may be longer than the model's input.

Sources: Devlin et al., "BERT" (2019), sections 4.2 and 4.3, for spans and the score of no answer; Rajpurkar et al.
(2016, 2018) for the metrics.
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

from .base import Batch, ComputeMetrics, Task, check_length, is_blank, read_column, read_texts, row_name
from .metrics import ExactMatch, TokenF1


FEATURES_AT_ONCE = 256  # bounds the memory for candidate spans


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """
    A span of a context that answers a question (MRQA in FedNLP, section 3.1).

    A row becomes one or more *features*, windows over its context that overlap by `stride` tokens, each behind the
    whole question. Encoded features have the tokenizer's columns, always with an attention mask, and:

    - `start_positions`, `end_positions` (`int`): the first and last token of the first answer; `null_position` where
      the window does not hold all of it;
    - `example_id` (`str`), `offset_starts`, `offset_ends` (shape `(length,)`): the row, and where in its context each
      token begins and ends, −1 for what is no context; `null_position` (`int`), the token that stands for "no answer".
      `Trainer` leaves these out of the model's inputs.

    The answer of a row is the span with the highest start logit + end logit over all its features, among the `n_best`
    starts and ends of each. With `no_answer`, it is empty if the smallest logit sum at the null position over features
    is higher than that by more than `null_threshold`. The metrics are exact match and token F1, the maximum over a
    row's gold answers.

    Args:
        max_length (`int`, *optional*, defaults to 384): Tokens of a feature, with the question and special tokens.
        stride (`int`, *optional*, defaults to 128): Tokens of context that two windows in a row share.
        no_answer (`bool`, *optional*, defaults to `False`):
            Whether rows may have no answer (SQuAD 2): empty `answers`, or empty texts in them.
        null_threshold (`float`, *optional*, defaults to 0.0): How much higher "no answer" has to score.
        n_best (`int`, *optional*, defaults to 20): Starts and ends of a feature that are combined.
        max_answer_length (`int`, *optional*, defaults to 30): Tokens of an answer.
        id_column (`str`, *optional*, defaults to `"id"`): The column with a unique name of each row.
        question_column (`str`, *optional*, defaults to `"question"`): The column with the questions.
        context_column (`str`, *optional*, defaults to `"context"`): The column with the contexts.
        answers_column (`str`, *optional*, defaults to `"answers"`):
            The column with a row's gold answers, as SQuAD has them, `{"text": [...], "answer_start": [...]}`, or as a
            list of `{"text": ..., "answer_start": ...}`.

    Raises:
        ValueError: If an argument is out of range; from `encode`, if a question or a context is empty, an answer is
            missing or does not stand in the context where it says, a question leaves no room for the context, or the
            tokenizer is not a fast one that pads on the right.

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

    model_class: ClassVar[Any] = AutoModelForQuestionAnswering
    # Starts and ends compete over the tokens of a tokenizer.
    prediction_unit = None
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("stride", self.stride, least=0)
        check_length("max_length", self.max_length, least=self.stride + 1)
        check_length("n_best", self.n_best)
        check_length("max_answer_length", self.max_answer_length)

    @property
    def main_metric(self) -> str:
        """The metric that runs are compared by."""
        return "token_f1"

    @property
    def one_feature_a_row(self) -> bool:
        """A long context becomes several features."""
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.id_column, self.question_column, self.context_column, self.answers_column)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Rows without a question or a context, or without an answer unless they may have none."""
        texts = zip(read_column(batch, self.question_column), read_column(batch, self.context_column), strict=True)
        empty = [is_blank(question) or is_blank(context) for question, context in texts]
        if self.no_answer:
            return empty
        answers = read_column(batch, self.answers_column)
        return [before or not _gold_answers(golds) for before, golds in zip(empty, answers, strict=True)]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """One or more features for each row. See [`Task.encode`]."""
        if not tokenizer.is_fast or tokenizer.padding_side != "right":
            raise ValueError(
                f"{type(tokenizer).__name__} gives no character offsets or pads on the left. Use a fast tokenizer and"
                ' set tokenizer.padding_side = "right".'
            )
        ids = read_column(batch, self.id_column)
        questions = [question.strip() for question in read_texts(batch, self.question_column, indices)]
        contexts = read_texts(batch, self.context_column, indices)
        spans = self._read_spans(batch, contexts, indices) if with_labels else None
        self._check_room(questions, tokenizer, indices)
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
            input_ids, begin, places = encoded["input_ids"][feature], 0, np.empty((0, 2), dtype=np.int64)
            sequences = tokens.sequence_ids(feature)
            if 1 in sequences:
                # The context's tokens stand in a row. Shape (context length, 2).
                begin, length = sequences.index(1), sequences.count(1)
                characters = chain.from_iterable(offsets[feature][begin : begin + length])
                places = np.fromiter(characters, dtype=np.int64, count=2 * length).reshape(-1, 2)
            for name, column in (("offset_starts", 0), ("offset_ends", 1)):
                padded = np.full(len(input_ids), -1)
                padded[begin : begin + len(places)] = places[:, column]
                encoded[name].append(padded)
            null = input_ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in input_ids else 0
            encoded["null_position"].append(null)
            if spans is not None:
                span = _token_span(places, spans[row])
                first, last = (null, null) if span is None else (begin + span[0], begin + span[1])
                encoded["start_positions"].append(first)
                encoded["end_positions"].append(last)
        return encoded

    def _check_room(self, questions: list[str], tokenizer: Any, indices: Sequence[int] | None) -> None:
        """The tokenizer panics where a question leaves less room than the stride."""
        special = tokenizer.num_special_tokens_to_add(pair=True)
        for position, question in enumerate(tokenizer(questions, add_special_tokens=False)["input_ids"]):
            if self.max_length - special - len(question) <= self.stride:
                raise ValueError(
                    f"{row_name(position, indices)} has a question of {len(question)} tokens, which with {special}"
                    f" special ones and a stride of {self.stride} leaves no room for the context in"
                    f" {self.max_length} tokens. Raise `max_length`, lower `stride`, or shorten the question."
                )

    def _read_spans(
        self, batch: Batch, contexts: list[str], indices: Sequence[int] | None
    ) -> list[tuple[int, int] | None]:
        """The characters of each row's first answer without spaces around it; None for rows without an answer."""
        spans: list[tuple[int, int] | None] = []
        for position, answers in enumerate(read_column(batch, self.answers_column)):
            row, golds = row_name(position, indices), _gold_answers(answers)
            if not golds and not self.no_answer:
                raise ValueError(
                    f"{row} has no answer in the column {self.answers_column!r}. Drop such rows, set `no_answer=True`,"
                    " or encode with `with_labels=False`."
                )
            for text, begin in golds:
                found = contexts[position][begin : begin + len(text)] if begin >= 0 else ""
                if found != text:
                    where = "outside the context" if not found else f"where the context has {found!r}"
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
        """Pads inputs of shape `(batch, length)`. See [`Task.data_collator`]."""
        return DataCollatorWithPadding(tokenizer)

    def postprocess(
        self, start_logits: np.ndarray, end_logits: np.ndarray, features: Dataset, rows: Dataset
    ) -> list[str]:
        """
        The answer of each row, out of the logits of its features.

        Args:
            start_logits (`np.ndarray` of shape `(features, length)`): Logits of an answer's first token.
            end_logits (`np.ndarray` of shape `(features, length)`): Logits of its last token.
            features (`Dataset`): What [`~QuestionAnswering.encode`] made of the rows, in the order of the logits.
            rows (`Dataset`): The raw rows.

        Returns:
            `list[str]`: A piece of each row's context, or `""`.

        Raises:
            ValueError: If logits, features and rows do not belong together.
        """
        if len(start_logits) != len(features):
            raise ValueError(f"There are logits of {len(start_logits)} features, but {len(features)} features.")
        ids = [str(value) for value in rows[self.id_column]]
        row_of = _numbers_of(ids)
        if set(features["example_id"]) != set(ids):
            raise ValueError("Features and rows do not belong together: encode these rows to get their features.")

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
        """The best score of each feature, and the characters of its span. Shapes of logits: `(features, length)`."""
        places = np.full((2, *starts.shape), -1)
        for feature, (begins, finishes) in enumerate(zip(offset_starts, offset_ends, strict=True)):
            places[0, feature, : len(begins)], places[1, feature, : len(finishes)] = begins, finishes
        outside = places[0] < 0
        first, first_logits = _highest(np.where(outside, -np.inf, starts), self.n_best)
        last, last_logits = _highest(np.where(outside, -np.inf, ends), self.n_best)
        # Every start with every end. Shape (features, n_best, n_best).
        lengths = last[:, None, :] - first[:, :, None] + 1
        scores = first_logits[:, :, None] + last_logits[:, None, :]
        scores = np.where((lengths >= 1) & (lengths <= self.max_answer_length), scores, -np.inf)
        scores = scores.reshape(len(starts), -1)
        chosen = scores.argmax(axis=1)
        each = np.arange(len(starts))
        first, last = first[each, chosen // last.shape[1]], last[each, chosen % last.shape[1]]
        characters = zip(places[0, each, first].tolist(), places[1, each, last].tolist(), strict=True)
        return scores[each, chosen], list(characters)

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        `exact_match` and `token_f1` of start and end logits, each of shape `(features, length)`.

        Needs `features` and `rows` of the evaluation data set, in its order.
        """
        if features is None or rows is None:
            raise ValueError(
                "Answers are read from raw rows. Give `features`, the encoded evaluation data set, and `rows`, the raw"
                " one."
            )
        _numbers_of([str(value) for value in rows[self.id_column]])  # not first after an hour of training
        metric = evaluate.combine([ExactMatch(), TokenF1()])

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            answers = self.postprocess(prediction.predictions[0], prediction.predictions[1], features, rows)
            golds = [[text for text, _ in _gold_answers(row)] for row in rows[self.answers_column]]
            return metric.compute(predictions=answers, references=golds)

        return compute_metrics


def _gold_answers(answers: Any) -> list[tuple[str, int]]:
    """A row's answers as pairs of text and first character, without empty ones."""
    if not answers:
        return []
    if isinstance(answers, dict):
        pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
    else:
        pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
    return [(text, begin) for text, begin in pairs if text and text.strip()]


def _numbers_of(ids: list[str]) -> dict[str, int]:
    """The number of the row of each id, which no two rows share."""
    row_of = {value: row for row, value in enumerate(ids)}
    if len(row_of) < len(ids):
        repeated = next(row for row, value in enumerate(ids) if row_of[value] != row)
        raise ValueError(f"Row {repeated} shares the id {ids[repeated]!r} with another row; make ids unique.")
    return row_of


def _token_span(places: np.ndarray, span: tuple[int, int] | None) -> tuple[int, int] | None:
    """The first and last token of a span of characters, if all of it is there. `places`: `(context length, 2)`."""
    if span is None or len(places) == 0:
        return None
    begins, ends = places.T
    if span[0] < begins[0] or span[1] > ends[-1]:
        return None
    first = int(np.searchsorted(ends, span[0], side="right"))
    last = int(np.searchsorted(begins, span[1], side="left")) - 1
    return (first, last) if first <= last else None


def _highest(logits: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of the highest logits of each feature, both of shape `(features, number)`."""
    number = min(number, logits.shape[1])
    positions = np.argpartition(-logits, number - 1, axis=1)[:, :number]
    return positions, np.take_along_axis(logits, positions, axis=1)
