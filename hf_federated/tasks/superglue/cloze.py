"""SuperGLUE as cloze questions for causal models: the blank is filled with each candidate, and the likeliest is taken.

Source: FL-GLM, section 4.1 and table 5, after GLM (Du et al., 2022), section 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedModel

from ..base import Batch, ComputeMetrics, Task, check_length, first_output, is_blank, read_column, read_texts, row_name
from ..causal import (
    IGNORED,
    CausalCollator,
    check_fast_tokenizer,
    end_token,
    padding_token,
    start_tokens,
    tokenize_answers,
    tokenize_prompts,
)
from .cloze_templates import MASK, NO_ANSWER, WORDS
from .scores import superglue_scores
from .templates import LABELS


@dataclass(frozen=True)
class SuperGlueCloze(Task):
    """
    SuperGLUE for causal models, as FL-GLM poses it: a model fills the blank ``[M]`` of a cloze question.

    Reads what [`superglue_cloze_rows`] makes of raw rows. GLM reads a whole question, the blank marked in it, and then
    writes the answer from left to right. So does a causal model here:

    - where nothing but punctuation follows ``[M]`` (BoolQ, COPA, MultiRC, WiC, WSC), the answer stands in its place,
      and that punctuation is left out;
    - where text follows it (CB, RTE, most queries of ReCoRD), `blank` stands in its place, and the answer behind the
      whole question and `slot`. Put in the place of ``[M]``, an answer would be predicted from half of the question.

    Answers begin with a space. Those of several words (COPA, ReCoRD, WSC) end with the tokenizer's end token, as GLM
    ends them with its own: otherwise "Ada" would always be likelier than "Ada Lund".

    [`~Task.prepare`] makes rows for training: the right answer behind the question, `labels` −100 but on the answer.
    [`~SuperGlueCloze.for_evaluation`] makes of these a row for each candidate, with `labels` on it. Evaluate with
    `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`, which leaves of a row's logits the summed
    log-probability of its candidate. Metrics choose by [`score_candidates`]. `eval_loss` is then over all candidates,
    right and wrong, so it is no measure: compare runs by the metrics.

    Args:
        max_length (`int`, *optional*):
            Tokens that are kept of a row, special ones and the longest candidate counted; the passage's last ones are
            cut. Defaults to what the tokenizer allows.
        blank (`str`, *optional*, defaults to `"____"`): Marks the blank of a question that goes on behind it.
        slot (`str`, *optional*, defaults to `"\\nAnswer:"`): Stands between such a question and the answer.
        end_answers (`bool`, *optional*, defaults to `True`):
            Whether answers of several words end with the end token. It is learned, and counts in their scores.

    Raises:
        ValueError: If an argument is out of range; from `encode`, if a row has no text, an unknown task or label, a
            candidate that the tokenizer leaves nothing of, or a question that is too long without its passage; from
            the metrics, if `features`, `rows` and predictions do not belong together.

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

    model_class: ClassVar[Any] = AutoModelForCausalLM
    label_column: ClassVar[str] = "target"
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("max_length", self.max_length, minimum=2)

    @property
    def main_metric(self) -> str:
        """The metric that runs are compared by."""
        return "superglue_score"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of [`superglue_cloze_rows`]."""
        places = ("mask_start", "passage_start", "passage_end")
        return ("id", "task", "source", *places, "candidates", "label", "target", "question", "answers")

    def find_empty(self, batch: Batch) -> list[bool]:
        """Rows without a source or candidates, or with an empty one among these."""
        rows = zip(read_column(batch, "source"), read_column(batch, "candidates"), strict=True)
        return [is_blank(source) or not candidates or any(map(is_blank, candidates)) for source, candidates in rows]

    def prompts(self, batch: Batch, indices: Sequence[int] | None = None) -> tuple[list[str], list[tuple[int, int]]]:
        """
        The questions as a causal model reads them.

        Args:
            batch (`Mapping[str, Sequence]`): The columns of [`superglue_cloze_rows`].
            indices (`Sequence[int]`, *optional*): The rows' numbers, which errors name.

        Returns:
            `tuple[list[str], list[tuple[int, int]]]`: The texts, which answers follow, and the characters of the
            passage in each.
        """
        texts: list[str] = []
        passages = []
        places = [read_column(batch, name) for name in ("mask_start", "passage_start", "passage_end")]
        for source, mask, begin, end in zip(read_texts(batch, "source", indices), *places, strict=True):
            if source[mask : mask + len(MASK)] != MASK:
                row = row_name(len(texts), indices)
                raise ValueError(f"{row} has no {MASK} at character {mask} of its source: {source!r}.")
            before, after = source[:mask], source[mask + len(MASK) :]
            shift = len(self.blank) - len(MASK) if begin > mask else 0
            is_last = re.search(r"\w", after) is None
            texts.append(before.rstrip() if is_last else before + self.blank + after + self.slot)
            passages.append((begin + shift, end + shift))
        return texts, passages

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """
        Ids, attention mask and `labels`, one row for each; with `id`, `prompt_length` and the tokens of `candidates`
        for [`~SuperGlueCloze.for_evaluation`]. A row without a right answer, and every row without labels, is the
        question alone. See [`Task.encode`].
        """
        check_fast_tokenizer(tokenizer)
        self._check_rows(batch, indices, with_labels)
        texts, passages = self.prompts(batch, indices)
        start = start_tokens(tokenizer)
        candidates = self._tokenize_candidates(batch, tokenizer, indices)
        most = tokenizer.model_max_length if self.max_length is None else self.max_length
        rooms = [most - len(start) - max(map(len, row)) for row in candidates]
        labels = read_column(batch, "label") if with_labels else [NO_ANSWER] * len(texts)
        encoded: dict[str, list[Any]] = {name: [] for name in ("input_ids", "attention_mask", "labels")}
        lengths = []
        for row, ids in enumerate(tokenize_prompts(texts, passages, rooms, tokenizer, indices)):
            prompt = start + ids
            answer = [] if labels[row] == NO_ANSWER else candidates[row][labels[row]]
            _add(encoded, prompt, answer)
            lengths.append(len(prompt))
        if not with_labels:
            del encoded["labels"]
        return {**encoded, "id": list(read_column(batch, "id")), "prompt_length": lengths, "candidates": candidates}

    def _check_rows(self, batch: Batch, indices: Sequence[int] | None, with_labels: bool) -> None:
        empty = self.find_empty(batch)
        for position, task in enumerate(read_column(batch, "task")):
            row, candidates = row_name(position, indices), batch["candidates"][position]
            if task not in LABELS:
                raise ValueError(f"{row} has the task {task!r}; allowed are {', '.join(map(repr, LABELS))}.")
            if empty[position] and not is_blank(batch["source"][position]):  # an empty source is refused as it is read
                raise ValueError(f"{row} has the candidates {candidates!r}; give at least one, and none empty.")
            label = read_column(batch, "label")[position] if with_labels else NO_ANSWER
            if label not in range(NO_ANSWER if task in ("record", "wsc") else 0, len(candidates)) and with_labels:
                raise ValueError(
                    f"{row} has the label {label!r}; allowed are the numbers of its candidates, 0 to"
                    f" {len(candidates) - 1}, or encode with `with_labels=False`."
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
                        f"{row_name(position, indices)} has the candidate {text!r}, of which the tokenizer leaves"
                        " nothing. Leave the candidate out, or take a tokenizer that knows it."
                    )
            if task in WORDS and len({tuple(ids_of[text]) for text in row}) < len(row):
                raise ValueError(
                    f"{row_name(position, indices)} has candidates that are the same tokens: {', '.join(row)}. Take a"
                    " tokenizer that knows these words."
                )
            end = [] if task in WORDS or not self.end_answers else [end_token(tokenizer)]
            rows.append([ids_of[text] + end for text in row])
        return rows

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> CausalCollator:
        """Pads rows on the right. Shapes: `(batch, length)`. See [`Task.data_collator`]."""
        return CausalCollator(padding_token(tokenizer))

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        A row for each candidate, behind the question, with `labels` on it alone. `id` and `candidate` say of which
        row, and its which candidate. Rows of a length stand together, so that a batch has little padding. See
        [`Task.for_evaluation`].
        """

        def expand(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
            expanded: dict[str, list[Any]] = {name: [] for name in ("input_ids", "attention_mask", "labels")}
            owners, numbers = [], []
            columns = [batch[name] for name in ("id", "input_ids", "prompt_length", "candidates")]
            for owner, ids, length, candidates in zip(*columns, strict=True):
                for number, candidate in enumerate(candidates):
                    _add(expanded, ids[:length], candidate)
                    owners.append(owner)
                    numbers.append(number)
            return {**expanded, "id": owners, "candidate": numbers}

        expanded = features.map(expand, batched=True, remove_columns=features.column_names)
        lengths = [len(ids) for ids in expanded["input_ids"]]
        return expanded.select(np.argsort(lengths, kind="stable"))

    def preprocess_logits_for_metrics(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """
        What metrics need of logits, so that an evaluation keeps no vocabulary for each token.

        Args:
            logits (`torch.Tensor` of shape `(batch, length, vocabulary)`, or a tuple that begins with it):
                The model's.
            labels (`torch.Tensor` of shape `(batch, length)`): Token ids, −100 for what is not predicted.

        Returns:
            `torch.Tensor` of shape `(batch,)`, `float32`: Σ log p of each row's predicted tokens.
        """
        scores: Any = first_output(logits)
        row, place = torch.nonzero(labels[:, 1:] != IGNORED, as_tuple=True)
        # Of a batch's tokens only those of answers: a tenth of them, or less. Shape (tokens, vocabulary).
        predicted = torch.log_softmax(scores[row, place].float(), dim=-1)
        of_token = predicted.gather(1, labels[row, place + 1].unsqueeze(1)).squeeze(1)
        return torch.zeros(len(labels), device=of_token.device).index_add(0, row, of_token)

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        What [`~hf_federated.tasks.superglue.superglue_scores`] computes of the likeliest candidates; `accuracy` is the
        share of all rows of which this is a right one.

        Needs `features`, what [`~SuperGlueCloze.for_evaluation`] made, in the order in which they are evaluated, and
        `rows`, the evaluation data set before it was encoded, in any order.
        """
        if features is None or rows is None or "candidate" not in features.column_names:
            raise ValueError(
                "The candidates of a row are compared. Give `features`, what `for_evaluation` made of the encoded"
                " evaluation data set, and `rows`, that data set before it was encoded."
            )
        columns = {name: list(read_column(rows[:], name)) for name in self.columns}
        row_of = {name: row for row, name in enumerate(columns["id"])}
        if len(row_of) < len(rows):
            raise ValueError("Two rows have the same `id`. Give each its own, where data sets were joined.")
        if set(features.unique("id")) != set(row_of):
            raise ValueError("Features and rows do not belong together: encode these rows to get their features.")
        owners = np.array([row_of[name] for name in features["id"]])
        numbers = np.array(features["candidate"])

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            sums = _joined(prediction.predictions)
            if sums.shape != owners.shape:
                raise ValueError(
                    f"Predictions have the shape {sums.shape} instead of ({len(owners)},), one for each candidate."
                    " Give the trainer `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`, and the"
                    " rows that `for_evaluation` made."
                )
            of_rows: list[np.ndarray] = [np.full(len(row), -np.inf) for row in columns["candidates"]]
            for owner, number, value in zip(owners, numbers, sums, strict=True):
                of_rows[owner][number] = value
            return _metrics(columns, of_rows)

        return compute_metrics


def score_candidates(task: str, sums: np.ndarray) -> np.ndarray:
    """
    How a row's candidates score: of tasks that answer with one word (BoolQ, CB, MultiRC, RTE, WiC) the softmax over
    candidates of their probabilities, exp(s_i) / Σ_j exp(s_j); of COPA, ReCoRD and WSC the summed log-probability s_i
    itself (FL-GLM, section 4.1.2). The best candidate is the same either way.

    Args:
        task (`str`): The row's task.
        sums (`np.ndarray` of shape `(candidates,)`): Σ log p over the tokens of each.

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
    """SuperGLUE's metrics, with each row answered by its best candidate."""
    labels: list[str | None] = []
    answers, targets = [], []
    for row, task in enumerate(rows["task"]):
        if np.isnan(sums[row]).any() or not np.isfinite(sums[row].max()):
            raise ValueError(f"Of the candidates' scores of row {row} some are not numbers, or none is finite.")
        best = int(np.argmax(score_candidates(task, sums[row])))
        answer, target, names = rows["candidates"][row][best], rows["target"][row], LABELS[task]
        if task == "record":  # the answer that was chosen, called correct, is so or is not
            label, target = names["True"], names[str(answer in rows["answers"][row])]
        elif task == "wsc":  # the first candidate is the noun that the row asks about
            label = names[str(best == 0)]
        else:
            label = list(names.values())[best]
        labels.append(label)
        answers.append(answer)
        targets.append(target)
    return superglue_scores({**rows, "answer": answers, "target": targets}, labels, [0.0] * len(labels))


def _add(columns: dict[str, list[Any]], prompt: list[int], answer: list[int]) -> None:
    """One more row of ids, attention mask and labels."""
    columns["input_ids"].append(prompt + answer)
    columns["attention_mask"].append([1] * (len(prompt) + len(answer)))
    columns["labels"].append([IGNORED] * len(prompt) + answer)


def _joined(predictions: Any) -> np.ndarray:
    """The sums of all batches, which a `Trainer` with `eval_do_concat_batches=False` leaves apart."""
    if isinstance(predictions, list):
        return np.concatenate([first_output(batch) for batch in predictions])
    return first_output(predictions)
