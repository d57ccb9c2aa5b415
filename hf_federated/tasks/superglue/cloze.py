"""SuperGLUE as cloze questions for causal models, which score each candidate for the blank.

Source: FL-GLM, section 4.1 and table 5, after GLM (Du et al., 2022), section 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction

from ..base import ComputeMetrics
from ..candidates import (
    NO_ANSWER,
    CandidateTask,
    candidate_log_loss,
    candidate_sums,
    check_features,
    encode_candidates,
)
from ..causal import end_token, tokenize_answers
from ..columns import Batch, check_length, is_blank, read_column, read_texts, row_name, rows_by_id
from .cloze_templates import MASK, WORDS
from .scores import superglue_scores
from .templates import LABELS, check_task


@dataclass(frozen=True)
class SuperGlueCloze(CandidateTask):
    """
    SuperGLUE for causal models as in FL-GLM: the model fills the blank ``[M]`` of a cloze question.

    The task reads the rows from [`superglue_cloze_rows`]. GLM reads the whole question with a marked blank and then
    generates the answer from left to right. This task does the same with a causal model:

    - if only punctuation follows ``[M]`` (BoolQ, COPA, MultiRC, WiC, WSC), the answer replaces ``[M]``, and this
      punctuation is removed;
    - if text follows ``[M]`` (CB, RTE, most queries of ReCoRD), `blank` replaces ``[M]``, and the answer follows the
      whole question and `slot`. Otherwise, the model would predict the answer without the text after the blank.

    Answers begin with a space. Answers that can have several words (COPA, ReCoRD, WSC) end with the tokenizer's end
    token, as in GLM. Without the end token, "Ada" would always be more likely than "Ada Lund".

    [`~Task.prepare`] creates training examples with the correct answer after the question. The `labels` are −100
    except for the answer. [`~CandidateTask.for_evaluation`] converts each of these examples to one example per
    candidate, with `labels` for the candidate. Evaluate with
    `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`, which reduces the logits of an example to the
    summed log-probability of its candidate. The metrics select candidates with [`score_candidates`]. `eval_loss` is
    the loss over all candidates, correct and wrong, and does not measure quality. Compare runs with the metrics, such
    as `log_loss`.

    Args:
        max_length (`int`, *optional*):
            Maximum number of tokens per example, including special tokens and the longest candidate. Truncation
            removes the last tokens of the truncatable part of the question. Defaults to the maximum of the tokenizer.
        blank (`str`, *optional*, defaults to `"____"`): The mark for a blank that text follows.
        slot (`str`, *optional*, defaults to `"\\nAnswer:"`): The text between a question with such a blank and the
            answer.
        end_answers (`bool`, *optional*, defaults to `True`):
            Whether answers that can have several words end with the end token. The model learns the end token, and the
            end token counts in the candidate scores.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if a row has no text, an unknown task, an
            unknown label or a candidate without tokens, or if a question is too long even without its truncatable
            part. The metrics raise it if `features`, `rows` and predictions do not belong together.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import SuperGlueCloze, superglue_cloze_rows

    >>> words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "no": 2, "yes": 3}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    >>> raw = Dataset.from_dict({"question": ["is it"], "passage": ["It is."], "label": [True]})
    >>> task, rows = SuperGlueCloze(), superglue_cloze_rows("boolq", raw)
    >>> task.prompts(rows[:])[0]
    ['It is. Question: is it? Answer:']
    >>> features = task.prepare(rows, tokenizer)
    >>> features[0]["labels"][-2:]
    [-100, 3]
    >>> [row["labels"][-1] for row in task.for_evaluation(features, tokenizer)]
    [2, 3]

    ```
    """

    max_length: int | None = None
    blank: str = "____"
    slot: str = "\nAnswer:"
    end_answers: bool = True

    # The metric for comparing runs.
    main_metric = "superglue_score"
    label_column: ClassVar[str] = "target"

    def __post_init__(self) -> None:
        check_length("max_length", self.max_length, minimum=2)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of [`superglue_cloze_rows`]."""
        positions = ("mask_start", "passage_start", "passage_end")
        return ("id", "task", "source", *positions, "candidates", "label", "target", "question", "answers")

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find rows without a source or candidates, or with an empty candidate."""
        rows = zip(read_column(batch, "source"), read_column(batch, "candidates"), strict=True)
        return [is_blank(source) or not candidates or any(map(is_blank, candidates)) for source, candidates in rows]

    def prompts(self, batch: Batch, indices: Sequence[int] | None = None) -> tuple[list[str], list[tuple[int, int]]]:
        """
        Return the questions as a causal model reads them.

        Args:
            batch (`Mapping[str, Sequence]`): The columns of [`superglue_cloze_rows`].
            indices (`Sequence[int]`, *optional*): Row numbers for error messages.

        Returns:
            `tuple[list[str], list[tuple[int, int]]]`: The prompts, and the character span of each prompt that can be
                truncated.
        """
        texts: list[str] = []
        truncatable_spans = []
        columns = [read_column(batch, name) for name in ("mask_start", "passage_start", "passage_end")]
        for source, mask, begin, end in zip(read_texts(batch, "source", indices), *columns, strict=True):
            if source[mask : mask + len(MASK)] != MASK:
                row = row_name(len(texts), indices)
                raise ValueError(
                    f"{row} has no {MASK} at character {mask} of its source: {source!r}. Create the rows with"
                    " `superglue_cloze_rows`."
                )
            before, after = source[:mask], source[mask + len(MASK) :]
            shift = len(self.blank) - len(MASK) if begin > mask else 0
            is_last = re.search(r"\w", after) is None
            texts.append(before.rstrip() if is_last else before + self.blank + after + self.slot)
            truncatable_spans.append((begin + shift, end + shift))
        return texts, truncatable_spans

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """
        Encode token IDs, attention mask and `labels`, one encoded example per row.

        [`~CandidateTask.for_evaluation`] uses the additional columns `id`, `prompt_length` and `candidates` (as token
        IDs). A row without a correct answer, or any row without labels, becomes only the prompt. See [`Task.encode`].
        """
        self._check_rows(batch, indices, with_labels)
        prompts, spans = self.prompts(batch, indices)
        candidates = self._tokenize_candidates(batch, tokenizer, indices)
        labels = read_column(batch, "label") if with_labels else None
        encoded = encode_candidates(prompts, spans, candidates, labels, tokenizer, self.max_length, indices)
        return {**encoded, "id": list(read_column(batch, "id"))}

    def _check_rows(self, batch: Batch, indices: Sequence[int] | None, with_labels: bool) -> None:
        empty = self.find_empty(batch)
        for position, task in enumerate(read_column(batch, "task")):
            row, candidates = row_name(position, indices), batch["candidates"][position]
            check_task(task, row)
            if empty[position] and not is_blank(batch["source"][position]):  # `read_texts` reports empty sources
                raise ValueError(
                    f"{row} has the candidates {candidates!r}; at least one is required, and none can be empty."
                )
            label = read_column(batch, "label")[position] if with_labels else NO_ANSWER
            if label not in range(NO_ANSWER if task in ("record", "wsc") else 0, len(candidates)) and with_labels:
                raise ValueError(
                    f"{row} has the label {label!r}; allowed are the candidate numbers 0 to {len(candidates) - 1}."
                    " Correct the label, or encode with `with_labels=False`."
                )

    def _tokenize_candidates(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None
    ) -> list[list[list[int]]]:
        texts = list(dict.fromkeys(text for row in batch["candidates"] for text in row))
        ids_of = dict(zip(texts, tokenize_answers(texts, tokenizer), strict=True))
        rows = []
        for position, (task, row) in enumerate(zip(batch["task"], batch["candidates"], strict=True)):
            for text in row:
                if not ids_of[text]:
                    raise ValueError(
                        f"{row_name(position, indices)} has the candidate {text!r}, but the tokenizer returns no"
                        " tokens for it. Remove the candidate, or use a tokenizer with a suitable vocabulary."
                    )
            if task in WORDS and len({tuple(ids_of[text]) for text in row}) < len(row):
                raise ValueError(
                    f"{row_name(position, indices)} has candidates with equal tokens: {', '.join(row)}. Use a"
                    " tokenizer with a suitable vocabulary."
                )
            end = [] if task in WORDS or not self.end_answers else [end_token(tokenizer)]
            rows.append([ids_of[text] + end for text in row])
        return rows

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes [`~hf_federated.tasks.superglue.superglue_scores`] of the best candidates.

        `accuracy` is the fraction of rows whose best candidate is correct. `log_loss` is the mean of −log p of the
        correct candidate, where p is the softmax over the candidates of a row. Rows without a known correct candidate
        do not count, and a ReCoRD query counts with the candidate in `label`. `log_loss` is left out if no row counts.

        The function requires `features`, the dataset from [`~CandidateTask.for_evaluation`] in evaluation order, and
        `rows`, the evaluation dataset before encoding in any order.
        """
        features, rows = check_features(features, rows)
        columns = {name: list(read_column(rows[:], name)) for name in self.columns}
        row_of = rows_by_id(columns["id"], features.unique("id"))
        feature_rows = np.array([row_of[name] for name in features["id"]])
        numbers = np.array(features["candidate"])

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            num_candidates = [len(row) for row in columns["candidates"]]
            row_sums = candidate_sums(prediction, feature_rows, numbers, num_candidates)
            answered = [row for row, label in enumerate(columns["label"]) if label != NO_ANSWER]
            metrics = _metrics(columns, row_sums)
            if answered:
                labels = [columns["label"][row] for row in answered]
                metrics["log_loss"] = candidate_log_loss([row_sums[row] for row in answered], labels)
            return metrics

        return compute_metrics


def score_candidates(task: str, sums: np.ndarray) -> np.ndarray:
    """
    Compute the scores of a row's candidates.

    For tasks with one-word answers (BoolQ, CB, MultiRC, RTE, WiC), the score is the softmax over the candidates,
    exp(s_i) / Σ_j exp(s_j). For COPA, ReCoRD and WSC, the score is the summed log-probability s_i (FL-GLM, section
    4.1.2). Both scores have the same best candidate.

    Args:
        task (`str`): The task of the row.
        sums (`np.ndarray` of shape `(candidates,)`): Σ log p over the tokens of each candidate.

    Returns:
        `np.ndarray` of shape `(candidates,)`, `float64`.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.tasks.superglue import score_candidates

    >>> score_candidates("boolq", np.log([0.1, 0.3])).round(2).tolist()
    [0.25, 0.75]

    ```
    """
    sums = np.asarray(sums, dtype=np.float64)
    if task not in WORDS:
        return sums
    odds = np.exp(sums - sums.max())
    return odds / odds.sum()


def _metrics(rows: Mapping[str, Sequence[Any]], sums: Sequence[np.ndarray]) -> dict[str, float]:
    """Compute the SuperGLUE metrics, with the best candidate as the answer of each row."""
    labels: list[str | None] = []
    answers, targets = [], []
    for row, task in enumerate(rows["task"]):
        best = int(np.argmax(score_candidates(task, sums[row])))
        answer, target, names = rows["candidates"][row][best], rows["target"][row], LABELS[task]
        if task == "record":  # the label is whether the selected answer is correct
            label, target = names["True"], names[str(answer in rows["answers"][row])]
        elif task == "wsc":  # the first candidate is the noun in question
            label = names[str(best == 0)]
        else:
            label = list(names.values())[best]
        labels.append(label)
        answers.append(answer)
        targets.append(target)
    return superglue_scores({**rows, "answer": answers, "target": targets}, labels, [0.0] * len(labels))
