"""Text classification with a causal model, which predicts one word for each label."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Dataset
from transformers import EvalPrediction

from .base import ComputeMetrics
from .candidates import NO_ANSWER, CandidateTask, candidate_log_loss, candidate_sums, check_features, encode_candidates
from .causal import tokenize_answers
from .columns import Batch, check_length, check_names, find_blank, is_blank, read_labels, read_texts
from .label_logits import LabelLogits
from .metrics import F1, Accuracy


@dataclass(frozen=True)
class ClozeClassification(CandidateTask):
    """
    Text classification with a causal language model: the model continues a prompt with the word of the label.

    For example, `"{sentence} It was"` continues with `great` or `terrible` (the templates of Gao et al., "Making
    Pre-trained Language Models Better Few-shot Learners", 2021). The model keeps its language modeling head, so split
    language models and models without a classification head can classify. `"{sentence1} {sentence2} Same?"` classifies
    pairs of texts.

    [`~Task.prepare`] creates training examples with the word of the label after the prompt. The `labels` are −100
    except for this word. [`~CandidateTask.for_evaluation`] creates one example per word. The task predicts the label
    whose word has the largest probability. The metrics are accuracy, macro F1, weighted F1 and `log_loss`: the
    mean of −log p of the correct label, where p is the softmax over the summed log-probabilities of the words.
    `eval_loss` is the loss over all words, correct and wrong, and does not measure quality.

    Args:
        label_names (`Sequence[str]`): Label names. The position of a name is its label ID.
        words (`Sequence[str]`): The word of each label, in the order of `label_names`. A space precedes each word.
        template (`str`, *optional*, defaults to `"{text} It was"`):
            The prompt, with names of text columns in braces.
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels, as label IDs (`ClassLabel`) or label names.
        max_length (`int`, *optional*):
            Maximum number of tokens per example, including special tokens and the longest word. Truncation removes the
            last tokens of the first column in the template. Defaults to the maximum of the tokenizer.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if a text is empty, if a label is missing or
            unknown, if a word has no tokens or its tokens are the first tokens of another word, or if a prompt is too
            long even without the text of the first column.
        ImportError: From `build_compute_metrics`, if scikit-learn (extra `metrics`) is not installed.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import ClozeClassification

    >>> vocabulary = {"[UNK]": 0, "a": 1, "film": 2, "It": 3, "was": 4, "great": 5, "terrible": 6}
    >>> words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[UNK]", unk_token="[UNK]")
    >>> task = ClozeClassification(["negative", "positive"], ["terrible", "great"])
    >>> features = task.prepare(Dataset.from_dict({"text": ["a film"], "label": [1]}), tokenizer)
    >>> features[0]["input_ids"], features[0]["labels"]
    ([1, 2, 3, 4, 5], [-100, -100, -100, -100, 5])
    >>> task.for_evaluation(features, tokenizer)["input_ids"][:]
    [[1, 2, 3, 4, 6], [1, 2, 3, 4, 5]]

    ```
    """

    label_names: Sequence[str]
    words: Sequence[str]
    template: str = "{text} It was"
    label_column: str = "label"
    max_length: int | None = None

    # The metric for comparing runs.
    main_metric = "accuracy"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "f1_macro", "f1_weighted", "log_loss")

    def __post_init__(self) -> None:
        for argument in ("label_names", "words"):
            object.__setattr__(self, argument, check_names(argument, getattr(self, argument)))
        if len(self.words) != len(self.label_names) or len(self.words) < 2:
            raise ValueError(
                f"There are {len(self.label_names)} `label_names` and {len(self.words)} `words`. Set one word for each"
                " label, and at least two labels."
            )
        if any(map(is_blank, self.words)):
            raise ValueError(f"`words` is {list(self.words)!r}; no word can be empty.")
        check_length("max_length", self.max_length, minimum=2)
        try:
            pieces = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"`template` is {self.template!r}, which is not a format string: {error}.") from None
        if not self.text_columns or not all(self.text_columns):
            raise ValueError(
                f"`template` is {self.template!r}; it must contain the name of at least one text column in braces."
            )
        if any(format_spec or conversion for _, _, format_spec, conversion in pieces):
            raise ValueError(
                f"`template` is {self.template!r}; braces can contain only the name of a column, without a format."
            )
        if self.label_column in self.text_columns:
            raise ValueError(
                f"`template` is {self.template!r}, which contains the label column {self.label_column!r}. The prompt"
                " must not contain the label."
            )

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The text columns in the template. Their texts must not be empty."""
        names = (name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None)
        return tuple(dict.fromkeys(names))

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (*self.text_columns, self.label_column)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find examples with an empty text. One empty text is enough."""
        return find_blank(batch, self.text_columns)

    def prompts(self, batch: Batch, indices: Sequence[int] | None = None) -> tuple[list[str], list[tuple[int, int]]]:
        """
        Return the prompts, without white space at their end.

        Args:
            batch (`Mapping[str, Sequence]`): The text columns.
            indices (`Sequence[int]`, *optional*): Row numbers for error messages.

        Returns:
            `tuple[list[str], list[tuple[int, int]]]`: The prompts, and the character span of each prompt that can be
                truncated.
        """
        columns = [read_texts(batch, column, indices) for column in self.text_columns]
        pieces = list(string.Formatter().parse(self.template))
        prompts, spans = [], []
        for texts in zip(*columns, strict=True):
            text_of = {name: text.strip() for name, text in zip(self.text_columns, texts, strict=True)}
            prompt, span = "", None
            for literal, name, _, _ in pieces:
                prompt += literal
                if name is not None:
                    span = span or (len(prompt), len(prompt) + len(text_of[name]))
                    prompt += text_of[name]
            prompts.append(prompt.rstrip())
            spans.append(span or (0, 0))
        return prompts, spans

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """
        Encode token IDs, attention mask and `labels`, one encoded example per raw example.

        The additional columns are those of [`CandidateTask`], with the row number as `id`, and `answer`, the label ID
        (−1 without labels). See [`Task.encode`].
        """
        prompts, spans = self.prompts(batch, indices)
        words = self._tokenize_words(tokenizer)
        labels = read_labels(batch, self.label_column, self.label_names, indices) if with_labels else None
        candidates = [words] * len(prompts)
        return {
            **encode_candidates(prompts, spans, candidates, labels, tokenizer, self.max_length, indices),
            "id": list(range(len(prompts)) if indices is None else indices),
            "answer": labels or [NO_ANSWER] * len(prompts),
        }

    def _tokenize_words(self, tokenizer: Any) -> list[list[int]]:
        words = tokenize_answers(self.words, tokenizer)
        # A word that begins another word is never less likely than this word.
        if any(longer[: len(word)] == word for word, longer in itertools.permutations(words, 2)) or not all(words):
            tokens = ", ".join(f"{word!r}: {ids}" for word, ids in zip(self.words, words, strict=True))
            raise ValueError(
                "The tokenizer returns no tokens for a word, or the tokens of a word begin with the tokens of another"
                f" word ({tokens}). Set other `words`, or use a tokenizer with a suitable vocabulary."
            )
        return words

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes accuracy, F1 and `log_loss`.

        The function requires `features`, the dataset from [`~CandidateTask.for_evaluation`] in evaluation order, and
        `rows`, the evaluation dataset before encoding, in the order in which it was encoded.
        """
        labels, feature_rows, numbers = self._read_features(features, rows)
        metrics = evaluate.combine([Accuracy(), F1()])

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            sums = candidate_sums(prediction, feature_rows, numbers, [len(self.words)] * len(labels))
            predictions = [int(np.argmax(values)) for values in sums]
            scores: dict[str, float] = metrics.compute(predictions=predictions, references=labels)
            return {**scores, "log_loss": candidate_log_loss(sums, labels)}

        return compute_metrics

    def label_logits(
        self, prediction: EvalPrediction, features: Dataset | None = None, rows: Dataset | None = None
    ) -> LabelLogits:
        """Return Σ log p over the tokens of each word, of shape `(rows, words)`. See [`Task.label_logits`]."""
        labels, feature_rows, numbers = self._read_features(features, rows)
        sums = candidate_sums(prediction, feature_rows, numbers, [len(self.words)] * len(labels))
        return LabelLogits(np.stack(sums), np.array(labels))

    def _read_features(
        self, features: Dataset | None, rows: Dataset | None
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the label of each row, and the row and the word of each feature."""
        features, rows = check_features(features, rows)
        feature_rows, numbers = np.array(features["id"]), np.array(features["candidate"])
        labels = read_labels(rows[:], self.label_column, self.label_names, None)
        has_all_rows = sorted(set(feature_rows.tolist())) == list(range(len(labels)))
        if not has_all_rows or features["answer"][:] != [labels[row] for row in feature_rows]:
            raise ValueError(
                "`features` and `rows` have different rows, or the same rows in another order. Encode `rows` to create"
                " matching features."
            )
        return labels, feature_rows, numbers
