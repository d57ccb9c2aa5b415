"""Language modeling: predict the next token of a text (causal), or masked tokens (masked)."""

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
    PretrainedConfig,
    PreTrainedModel,
)

from ..utils.arguments import require, require_one_of
from ..utils.remote_code import code_arguments
from .base import IGNORED, NUM_POSITIONS, ComputeMetrics, Task, first_output
from .columns import Batch, check_length, find_blank, read_texts
from .metrics import Perplexity


OBJECTIVES = ("causal", "masked")


@dataclass(frozen=True)
class LanguageModeling(Task):
    """
    Language modeling on raw text, causal or masked (FedNLP, section 3.1).

    - `"causal"`: encoded examples have `labels` equal to `input_ids`. The collator sets labels to −100 at padding
      positions only. End tokens therefore count in the loss even if the tokenizer uses the end token for padding.
    - `"masked"`: the collator masks `mlm_probability` of the tokens, newly drawn for each batch, and sets the labels,
      as in Devlin et al., "BERT" (2019), section 3.1. [`~LanguageModeling.for_evaluation`] masks tokens once for all
      evaluations, so that perplexities on the same examples are comparable.

    The metric is the perplexity of the predicted tokens. All tokens have the same weight.

    Args:
        objective (`str`, *optional*, defaults to `"causal"`): `"causal"` or `"masked"`.
        text_column (`str`, *optional*, defaults to `"text"`): The column with the texts.
        max_length (`int`, *optional*): Maximum number of tokens per example. Defaults to the maximum of the tokenizer.
            Cannot be combined with `block_size`.
        block_size (`int`, *optional*):
            If set, the task concatenates the texts of a batch, separated by the end token if the tokenizer has one,
            and splits the result into blocks of this number of tokens. The last block can be shorter. By default, each
            text stays a separate example.
        mlm_probability (`float`, *optional*, defaults to 0.15): Fraction of tokens to mask.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if a text is empty.

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

    # The metric for comparing runs.
    main_metric = "perplexity"
    metric_names: ClassVar[tuple[str, ...]] = ("perplexity",)
    lower_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_one_of("objective", self.objective, OBJECTIVES)
        check_length("max_length", self.max_length, minimum=2)
        check_length("block_size", self.block_size, minimum=2)
        if self.max_length is not None and self.block_size is not None:
            raise ValueError("`max_length` truncates texts and `block_size` joins texts. Set only one of them.")
        require("mlm_probability", self.mlm_probability, 0 < self.mlm_probability < 1, "between 0 and 1")

    @property
    def model_class(self) -> Any:
        """`AutoModelForCausalLM` or `AutoModelForMaskedLM`."""
        return AutoModelForCausalLM if self.objective == "causal" else AutoModelForMaskedLM

    @property
    def prediction_unit(self) -> str | None:  # type: ignore[override]  # a class attribute in the other tasks
        """`"token"` for causal models, `None` for masked models, because clients mask different tokens."""
        return "token" if self.objective == "causal" else None

    @property
    def one_feature_per_example(self) -> bool:
        """`False` with `block_size`, because a block can contain several texts."""
        return self.block_size is None

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.text_column,)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find examples without a text."""
        return find_blank(batch, self.columns)

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Encode token IDs, attention mask and, if causal, `labels`, per text or per block. See [`Task.encode`]."""
        texts = read_texts(batch, self.text_column, indices)
        if self.block_size is None:
            tokens = tokenizer(texts, truncation=True, max_length=self.max_length, return_attention_mask=True)
            encoded = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        else:
            # The tokenizer does not truncate here. `verbose=False` hides its length warning: the blocks are shorter.
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
        Encode token IDs and attention mask, with `labels` that number the positions that predict a next token.

        All tokens except the last one predict a next token. See [`Task.encode_public`].
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
        """Pad examples to `(batch, length)`. If masked, also mask tokens. See [`Task.data_collator`]."""
        if self.objective == "masked":
            return _MaskingCollator(tokenizer, mlm=True, mlm_probability=self.mlm_probability)
        # The collator for language models treats every pad token as padding, even if it is also the end token.
        return DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED)

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        Mask tokens and add `labels` if the objective is masked.

        At least one token of each example is masked. The data collator does not mask these examples again. See
        [`Task.for_evaluation`].
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
                position = int(draw.choice(words))
                labels[position], hidden[position] = ids[position], tokenizer.mask_token_id
            masked["input_ids"].append(hidden.tolist())
            masked["labels"].append(labels.tolist())
        kept = features.remove_columns("input_ids")
        return concatenate_datasets([kept, Dataset.from_dict(masked)], axis=1)

    def needs_causal_attention(self, config: PretrainedConfig) -> bool:
        """
        Whether the objective is causal and the model is an encoder, whose attention must become causal.

        Args:
            config (`PretrainedConfig`): The config of the model.
        """
        is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        return self.objective == "causal" and is_encoder

    def load_model(self, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """
        Load the pretrained model with its language modeling head. See [`Task.load_model`].

        If the objective is causal, encoders such as BERT get causal attention. Otherwise, they would attend to the
        token to predict.
        """
        if self.objective == "causal" and "is_decoder" not in kwargs:
            config = AutoConfig.from_pretrained(
                name_or_path, revision=kwargs.get("revision"), **code_arguments(kwargs)
            )
            if self.needs_causal_attention(config):
                kwargs["is_decoder"] = True
        return super().load_model(name_or_path, **kwargs)

    def preprocess_logits_for_metrics(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """
        Reduce logits to the values that perplexity needs, so that evaluation does not store logits per token.

        Args:
            logits (`torch.Tensor` of shape `(batch, length, vocabulary)`, or a tuple that begins with it):
                The logits of the model.
            labels (`torch.Tensor` of shape `(batch, length)`): Token IDs, with −100 for tokens that are not predicted.

        Returns:
            `torch.Tensor` of shape `(batch, 2)`, `float32`: the negative log-likelihood of each example, summed over
            its predicted tokens, and the number of predicted tokens.
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
        Build the function that computes perplexity from the output of `preprocess_logits_for_metrics`.

        The `Trainer` must also receive `preprocess_logits_for_metrics`. The arguments are not used.
        """
        metric = Perplexity()

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            sums = first_output(prediction.predictions)
            if sums.ndim != 2 or sums.shape[1] != 2:
                raise ValueError(
                    f"Predictions have the shape {sums.shape} instead of (examples, 2). Create the trainer with"
                    " `preprocess_logits_for_metrics=task.preprocess_logits_for_metrics`."
                )
            return metric.compute(nll=sums[:, 0], num_tokens=sums[:, 1].round().astype(int))

        return compute_metrics


class _MaskingCollator(DataCollatorForLanguageModeling):
    """Collator that masks tokens, except in examples with labels, which are already masked."""

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        if not all("labels" in example for example in examples):
            return super().torch_call(examples)
        return DataCollatorForTokenClassification(self.tokenizer, label_pad_token_id=IGNORED)(examples)


def _blocks(rows: list[list[int]], end: int | None, block_size: int) -> list[list[int]]:
    """Concatenate the token IDs of all texts and split them into blocks. A final block of one token is dropped."""
    if end is not None:
        rows = [ids if ids and ids[-1] == end else [*ids, end] for ids in rows]
    joined = list(chain.from_iterable(rows))
    blocks = [joined[begin : begin + block_size] for begin in range(0, len(joined), block_size)]
    return blocks if len(blocks) <= 1 or len(blocks[-1]) > 1 else blocks[:-1]
