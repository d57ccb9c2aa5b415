"""Base class of the tasks in which a causal model scores each candidate for the answer to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedModel

from .base import Task, first_output
from .causal import IGNORED, CausalCollator, join_answers, padding_token, takes_attention_mask, tokenize_prompts


NO_ANSWER = -1  # number of the correct candidate if it is unknown


class CandidateTask(Task):
    """
    Base class of the tasks in which a causal model scores each candidate for the answer to a prompt.

    `encode` returns the columns `input_ids`, `attention_mask` and `labels` of the prompt with the correct answer, the
    `id` of the example, its `prompt_length` in tokens and its `candidates` as lists of token IDs. The column `answer`,
    the number of the correct candidate, is optional.
    [`~CandidateTask.for_evaluation`] converts each of these examples to one example per candidate. Evaluate with
    `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`, which reduces the logits of an example to the
    summed log-probability of its candidate.
    """

    model_class: ClassVar[Any] = AutoModelForCausalLM
    needs_rows: ClassVar[bool] = True
    prediction_unit: str | None = None

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> CausalCollator:
        """Pad examples on the right, to shape `(batch, length)`. See [`Task.data_collator`]."""
        return CausalCollator(padding_token(tokenizer), with_attention_mask=takes_attention_mask(model))

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        Create one example per candidate, with the candidate after the question and `labels` for the candidate.

        The columns `id` and `candidate` contain the row ID and the number of the candidate. The column `answer` is
        kept if it exists. Examples are sorted by length, so that batches have little padding. See
        [`Task.for_evaluation`].
        """

        def expand(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
            candidates = batch["candidates"]
            rows = [row for row, of_row in enumerate(candidates) for _ in of_row]
            prompts = [batch["input_ids"][row][: batch["prompt_length"][row]] for row in rows]
            return {
                **join_answers(prompts, list(chain.from_iterable(candidates))),
                **{name: [batch[name][row] for row in rows] for name in ("id", "answer") if name in batch},
                "candidate": [number for of_row in candidates for number in range(len(of_row))],
            }

        expanded = features.map(expand, batched=True, remove_columns=features.column_names)
        lengths = [len(ids) for ids in expanded["input_ids"]]
        return expanded.select(np.argsort(lengths, kind="stable"))

    def preprocess_logits_for_metrics(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """
        Reduce logits to candidate scores, so that evaluation does not store logits per token.

        Args:
            logits (`torch.Tensor` of shape `(batch, length, vocabulary)`, or a tuple that begins with it):
                The logits of the model.
            labels (`torch.Tensor` of shape `(batch, length)`): Token IDs, with −100 for tokens that are not predicted.

        Returns:
            `torch.Tensor` of shape `(batch,)`, `float32`: Σ log p over the predicted tokens of each example.
        """
        scores: Any = first_output(logits)
        row, position = torch.nonzero(labels[:, 1:] != IGNORED, as_tuple=True)
        # Only answer tokens need a softmax. They are at most about a tenth of the tokens. Shape (tokens, vocabulary).
        log_probabilities = torch.log_softmax(scores[row, position].float(), dim=-1)
        selected = log_probabilities.gather(1, labels[row, position + 1].unsqueeze(1)).squeeze(1)
        return torch.zeros(len(labels), device=selected.device).index_add(0, row, selected)


def encode_candidates(
    prompts: Sequence[str],
    truncatable_spans: Sequence[tuple[int, int]],
    candidates: list[list[list[int]]],
    labels: Sequence[int] | None,
    tokenizer: Any,
    max_length: int | None,
    indices: Sequence[int] | None,
) -> dict[str, list[Any]]:
    """
    Return the columns of [`CandidateTask`] without `id` and `answer`.

    Args:
        prompts, truncatable_spans, indices: As in [`~hf_federated.tasks.causal.tokenize_prompts`].
        candidates (`list[list[list[int]]]`): The token IDs of the candidates of each prompt.
        labels (`Sequence[int]`, *optional*): The number of the correct candidate of each prompt, or −1 if it is
            unknown. Without labels, the examples are only the prompts.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        max_length (`int`, *optional*): Maximum number of tokens of a prompt with its longest candidate. Defaults to
            the maximum of the tokenizer.
    """
    limit = tokenizer.model_max_length if max_length is None else max_length
    max_lengths = [limit - max(map(len, row)) for row in candidates]
    ids = tokenize_prompts(prompts, truncatable_spans, max_lengths, tokenizer, indices)
    answers = None
    if labels is not None:
        answers = [[] if label == NO_ANSWER else row[label] for row, label in zip(candidates, labels, strict=True)]
    return {**join_answers(ids, answers), "prompt_length": [len(row) for row in ids], "candidates": candidates}


def check_features(features: Dataset | None, rows: Dataset | None) -> tuple[Dataset, Dataset]:
    """
    Return the arguments of `build_compute_metrics` if both are given.

    Raises:
        ValueError: If one of them is missing, or if `features` has no candidates.
    """
    if features is None or rows is None or "candidate" not in features.column_names:
        raise ValueError(
            "`features` or `rows` is missing or has no candidates. Pass the dataset from `for_evaluation` as"
            " `features`, and the evaluation dataset before encoding as `rows`."
        )
    return features, rows


def candidate_sums(
    prediction: EvalPrediction, rows: np.ndarray, candidates: np.ndarray, num_candidates: Sequence[int]
) -> list[np.ndarray]:
    """
    Group the sums of all candidates by row.

    Args:
        prediction (`EvalPrediction`): The predictions: one sum per example of `for_evaluation`.
        rows (`np.ndarray` of shape `(examples,)`): The row of each example.
        candidates (`np.ndarray` of shape `(examples,)`): The number of each example's candidate.
        num_candidates (`Sequence[int]`): The number of candidates of each row.

    Returns:
        `list[np.ndarray]`: Σ log p over the tokens of each candidate, for each row. −∞ for a candidate without an
        example.

    Raises:
        ValueError: If the predictions are not one value per example, or if the sums of a row contain NaN or no finite
            value.
    """
    sums = _concatenate(prediction.predictions)
    if sums.shape != rows.shape:
        raise ValueError(
            f"Predictions have the shape {sums.shape} instead of ({len(rows)},), one value per candidate. Create the"
            " trainer with `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`, and evaluate the"
            " dataset from `for_evaluation`."
        )
    row_sums = [np.full(number, -np.inf) for number in num_candidates]
    for row, number, value in zip(rows, candidates, sums, strict=True):
        row_sums[row][number] = value
    for row, values in enumerate(row_sums):
        if np.isnan(values).any() or not np.isfinite(values.max()):
            raise ValueError(
                f"The candidate scores of row {row} contain NaN, or none is finite. Check the model for numerical"
                " problems."
            )
    return row_sums


def candidate_log_loss(row_sums: Sequence[np.ndarray], labels: Sequence[int]) -> float:
    """
    Cross-entropy of the correct candidates in nats: the mean of −log softmax over the candidates of a row.

    Args:
        row_sums (`Sequence[np.ndarray]`): Σ log p over the tokens of each candidate, for each row.
        labels (`Sequence[int]`): The number of the correct candidate of each row.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.tasks.candidates import candidate_log_loss

    >>> round(candidate_log_loss([np.log([0.1, 0.3]), np.log([0.2, 0.2])], [1, 0]), 3)  # (log 4/3 + log 2) / 2
    0.49

    ```
    """
    losses = []
    for sums, label in zip(row_sums, labels, strict=True):
        values = np.asarray(sums, dtype=np.float64)
        largest = values.max()
        losses.append(largest + np.log(np.exp(values - largest).sum()) - values[label])
    return float(np.mean(losses))


def _concatenate(predictions: Any) -> np.ndarray:
    """Concatenate the sums of all batches. `Trainer` returns a list with `eval_do_concat_batches=False`."""
    if isinstance(predictions, list):
        return np.concatenate([first_output(batch) for batch in predictions])
    return first_output(predictions)
