"""Language modelling: the next token of a text (causal), or tokens that were hidden in it (masked)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
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
    first_output,
    is_blank,
    read_column,
    read_texts,
)
from .metrics import Perplexity


OBJECTIVES = ("causal", "masked")


@dataclass(frozen=True)
class LanguageModeling(Task):
    """
    Predicts tokens of raw text: from those before them, or from those around them (FedNLP, section 3.1).

    - `"causal"`: encoded rows have `labels` equal to `input_ids`, and padding is −100 by its place. A pad token that
      is the end token too therefore costs no end token its place in the loss.
    - `"masked"`: the collator hides `mlm_probability` of the tokens in each batch anew and sets the labels, as in
      Devlin et al., "BERT" (2019), section 3.1. [`~LanguageModeling.for_evaluation`] hides them once for all
      evaluations, so that perplexities of the same rows can be compared.

    The metric is the perplexity of predicted tokens, each of the same weight.

    Args:
        objective (`str`, *optional*, defaults to `"causal"`): `"causal"` or `"masked"`.
        text_column (`str`, *optional*, defaults to `"text"`): The column with the texts.
        max_length (`int`, *optional*): Tokens that are kept of a row. Defaults to what the tokenizer allows. Not used
            with `block_size`.
        block_size (`int`, *optional*):
            Joins the texts of a batch, with the end token between them if the tokenizer has one, and cuts them into
            blocks of this length; the last one may be shorter. By default a row is a row.
        mlm_probability (`float`, *optional*, defaults to 0.15): Share of tokens that are hidden.

    Raises:
        ValueError: If an argument is out of range; from `encode`, if a text is empty.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import LanguageModeling

    >>> words = Tokenizer(WordLevel({"<end>": 0, "<unk>": 1, "to": 2, "be": 3, "or": 4, "not": 5}, unk_token="<unk>"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
    >>> LanguageModeling(block_size=4).encode({"text": ["to be", "or not to be"]}, tokenizer)["input_ids"]
    [[2, 3, 0, 4], [5, 2, 3, 0]]

    ```
    """

    objective: str = "causal"
    text_column: str = "text"
    max_length: int | None = None
    block_size: int | None = None
    mlm_probability: float = 0.15

    lower_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"`objective` is {self.objective!r}; allowed are {', '.join(map(repr, OBJECTIVES))}.")
        check_length("max_length", self.max_length, least=2)
        check_length("block_size", self.block_size, least=2)
        if self.max_length is not None and self.block_size is not None:
            raise ValueError("`max_length` cuts rows and `block_size` joins them; give one of the two.")
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"`mlm_probability` is {self.mlm_probability}; it must lie between 0 and 1.")

    @property
    def model_class(self) -> Any:
        """`AutoModelForCausalLM` or `AutoModelForMaskedLM`."""
        return AutoModelForCausalLM if self.objective == "causal" else AutoModelForMaskedLM

    @property
    def prediction_unit(self) -> str | None:  # type: ignore[override]  # a constant of the other tasks
        """`"token"` if causal. What is hidden is drawn anew in each batch: no two clients would predict the same."""
        return "token" if self.objective == "causal" else None

    @property
    def main_metric(self) -> str:
        """The metric that runs are compared by."""
        return "perplexity"

    @property
    def one_feature_a_row(self) -> bool:
        """Whether a row stays a row: not with `block_size`, when a block may hold several."""
        return self.block_size is None

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.text_column,)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Rows without a text."""
        return [is_blank(text) for text in read_column(batch, self.text_column)]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Ids, attention mask and, if causal, `labels`: one row for each, or blocks. See [`Task.encode`]."""
        texts = read_texts(batch, self.text_column, indices)
        if self.block_size is None:
            tokens = tokenizer(texts, truncation=True, max_length=self.max_length, return_attention_mask=True)
            encoded = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        else:
            # Not cut, so nothing to warn of: blocks are shorter than what the model takes.
            rows = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
            blocks = _blocks(rows, tokenizer.eos_token_id, self.block_size)
            encoded = {"input_ids": blocks, "attention_mask": [[1] * len(block) for block in blocks]}
        if with_labels and self.objective == "causal":
            encoded["labels"] = [list(ids) for ids in encoded["input_ids"]]
        return encoded

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        Ids, attention mask, and `labels` that number the places at which a next token is predicted: all but the last.
        See [`Task.encode_public`].
        """
        if self.objective != "causal":
            return super().encode_public(batch, tokenizer, indices)
        encoded = self.encode(batch, tokenizer, indices, with_labels=False)
        counts = [max(len(ids) - 1, 0) for ids in encoded["input_ids"]]
        marks = [
            [*range(count), *[IGNORED] * (len(ids) - count)]
            for ids, count in zip(encoded["input_ids"], counts, strict=True)
        ]
        return {**encoded, "labels": marks, NUM_POSITIONS: counts}

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> Any:
        """Pads rows; hides tokens if they are to be. Shapes: `(batch, length)`. See [`Task.data_collator`]."""
        if self.objective == "masked":
            return _MaskingCollator(tokenizer, mlm=True, mlm_probability=self.mlm_probability)
        # The one for language models takes every pad token for padding, also where it is the end token.
        return DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED)

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        If masked, the rows with tokens hidden and `labels`, at least one in each row; the collator leaves these alone.

        See [`Task.for_evaluation`].
        """
        if self.objective == "causal":
            return features
        mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=self.mlm_probability, seed=seed)
        draw = np.random.default_rng(seed)
        masked: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        for ids in features["input_ids"]:
            row = mask([{"input_ids": ids}])
            hidden, labels = row["input_ids"][0], row["labels"][0]
            words = np.flatnonzero(
                np.logical_not(tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True))
            )
            if (labels == IGNORED).all() and len(words):
                place = int(draw.choice(words))
                labels[place], hidden[place] = ids[place], tokenizer.mask_token_id
            masked["input_ids"].append(hidden.tolist())
            masked["labels"].append(labels.tolist())
        kept = features.remove_columns("input_ids")
        return concatenate_datasets([kept, Dataset.from_dict(masked)], axis=1)

    def load_model(self, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """
        The pretrained model with its language modelling head. See [`Task.load_model`].

        An encoder such as BERT is made to look back only if the objective is causal: it would see the token that it
        has to predict.
        """
        if self.objective == "causal" and "is_decoder" not in kwargs:
            config = AutoConfig.from_pretrained(name_or_path, revision=kwargs.get("revision"))
            if type(config) in MODEL_FOR_MASKED_LM_MAPPING and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                kwargs["is_decoder"] = True
        return super().load_model(name_or_path, **kwargs)

    def preprocess_logits_for_metrics(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """
        What perplexity needs of logits, so that an evaluation keeps no vocabulary for each token.

        Args:
            logits (`torch.Tensor` of shape `(batch, length, vocabulary)`, or a tuple that begins with it):
                The model's.
            labels (`torch.Tensor` of shape `(batch, length)`): Token ids, −100 for what is not predicted.

        Returns:
            `torch.Tensor` of shape `(batch, 2)`, `float32`: the negative log-likelihood of each row, summed over its
            predicted tokens, and how many they are.
        """
        scores: Any = first_output(logits)
        if self.objective == "causal":
            scores, labels = scores[:, :-1], labels[:, 1:]
        nll = torch.nn.functional.cross_entropy(
            scores.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        return torch.stack([nll.sum(dim=1), (labels != IGNORED).sum(dim=1).float()], dim=1)

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Perplexity from what `preprocess_logits_for_metrics` gives, which the `Trainer` has to be given too.

        Needs none of its arguments.
        """
        metric = Perplexity()

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            sums = first_output(prediction.predictions)
            if sums.ndim != 2 or sums.shape[1] != 2:
                raise ValueError(
                    f"Predictions have the shape {sums.shape} instead of (rows, 2). Give the trainer"
                    " `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`."
                )
            return metric.compute(nll=sums[:, 0], num_tokens=sums[:, 1].round().astype(int))

        return compute_metrics


class _MaskingCollator(DataCollatorForLanguageModeling):
    """Hides tokens, but for rows that have labels: theirs are hidden already."""

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        if not all("labels" in example for example in examples):
            return super().torch_call(examples)
        return DataCollatorForTokenClassification(self.tokenizer, label_pad_token_id=IGNORED)(examples)


def _blocks(rows: list[list[int]], end: int | None, block_size: int) -> list[list[int]]:
    """The ids of all rows, one after the other, in blocks. A single token at the end predicts nothing, and is left."""
    if end is not None:
        rows = [ids if ids and ids[-1] == end else [*ids, end] for ids in rows]
    joined = list(chain.from_iterable(rows))
    blocks = [joined[begin : begin + block_size] for begin in range(0, len(joined), block_size)]
    return blocks if len(blocks) <= 1 or len(blocks[-1]) > 1 else blocks[:-1]
