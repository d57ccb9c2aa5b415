"""Seq2seq generation: a text from a text, such as the headlines of Gigaword."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EncoderDecoderModel,
    EvalPrediction,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
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
    row_name,
)
from .metrics import Rouge


@dataclass(frozen=True)
class Seq2Seq(Task):
    """
    A target text for a source text (Gigaword in FedNLP, section 3.1).

    Encoded rows have the tokenizer's columns for the source, always with an attention mask, and `labels` of shape
    `(target length,)`. The collator pads labels with −100, which the loss skips. Of several targets of a row the first
    is trained on.

    The metrics are ROUGE-1, ROUGE-2 and ROUGE-L of generated texts, so evaluate with `Seq2SeqTrainer` (or
    `federate(Seq2SeqTrainer)`) and `predict_with_generate=True`. `Trainer` trains the task, but generates nothing.

    Args:
        source_column (`str`, *optional*, defaults to `"source"`): The column with the source texts.
        target_column (`str`, *optional*, defaults to `"target"`):
            The column with the target texts, or with a list of them for each row.
        prefix (`str`, *optional*, defaults to `""`): Stands before every source, as T5 expects it ("summarize: ").
        max_source_length (`int`, *optional*, defaults to 512): Tokens that are kept of a source, with special ones.
        max_target_length (`int`, *optional*, defaults to 64): Tokens that are kept of a target, with special ones.
        use_stemmer (`bool`, *optional*, defaults to `True`): Whether ROUGE compares the stems of English words.

    Raises:
        ValueError: If an argument is out of range; from `encode`, if a text is empty or a target missing; from the
            metrics, if predictions are no token ids.
        ImportError: From `build_compute_metrics`, if rouge-score (extra `metrics`) is not installed.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import Seq2Seq

    >>> words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "snow": 2, "in": 3, "rome": 4}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    >>> encoded = Seq2Seq().encode({"source": ["snow in rome"], "target": ["rome snow"]}, tokenizer)
    >>> encoded["input_ids"], encoded["labels"]
    ([[2, 3, 4]], [[4, 2]])

    ```
    """

    source_column: str = "source"
    target_column: str = "target"
    prefix: str = ""
    max_source_length: int = 512
    max_target_length: int = 64
    use_stemmer: bool = True

    model_class: ClassVar[Any] = AutoModelForSeq2SeqLM
    trainer_class: ClassVar[type[Trainer]] = Seq2SeqTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = Seq2SeqTrainingArguments
    prediction_unit = "token"
    labels_are_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("max_source_length", self.max_source_length)
        check_length("max_target_length", self.max_target_length)

    @property
    def main_metric(self) -> str:
        """The metric that runs are compared by."""
        return "rougeL"

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.source_column, self.target_column)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Rows without a source or a target, or with an empty one among several."""
        rows = zip(read_column(batch, self.source_column), read_column(batch, self.target_column), strict=True)
        return [is_blank(source) or is_empty_target(target) for source, target in rows]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """The tokenizer's columns and `labels`, one row for each. See [`Task.encode`]."""
        sources = [self.prefix + source for source in read_texts(batch, self.source_column, indices)]
        # Targets before sources: a bad row is named before the longer half of the work.
        targets = [golds[0] for golds in read_targets(batch, self.target_column, indices)] if with_labels else None
        encoded = dict(
            tokenizer(sources, truncation=True, max_length=self.max_source_length, return_attention_mask=True).items()
        )
        if targets is not None:
            labels = tokenizer(text_target=targets, truncation=True, max_length=self.max_target_length)
            encoded["labels"] = labels["input_ids"]
        return encoded

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        Sources and, as `labels`, targets, whose tokens the decoder is given one after the other: a public row needs
        its target column too. See [`Task.encode_public`].
        """
        encoded = self.encode(batch, tokenizer, indices)
        return {**encoded, NUM_POSITIONS: [len(target) for target in encoded["labels"]]}

    def _read_targets(self, batch: Batch, indices: Sequence[int] | None) -> list[list[str]]:
        """The targets of each row, at least one and none of them empty."""
        rows = []
        for position, value in enumerate(read_column(batch, self.target_column)):
            targets = [value] if isinstance(value, str) else list(value or [])
            if is_empty_target(value):
                raise ValueError(
                    f"{row_name(position, indices)} has no target or an empty one in the column"
                    f" {self.target_column!r}. Drop such rows, or encode with `with_labels=False`."
                )
            rows.append(targets)
        return rows

    def load_encoder_decoder(self, encoder: str, decoder: str, tokenizer: Any, **kwargs: Any) -> EncoderDecoderModel:
        """
        A pretrained encoder and a pretrained decoder, joined by new cross-attention.

        Rothe et al., "Leveraging Pre-trained Checkpoints for Sequence Generation Tasks" (2020), start encoder-decoder
        models from two BERTs like this. Both have to read the ids of one tokenizer.

        Args:
            encoder (`str`): As in `from_pretrained`.
            decoder (`str`): As in `from_pretrained`. An encoder is taken too, and made to look back only.
            tokenizer (`PreTrainedTokenizerFast`): Its `bos` or `cls` token begins a target, its `eos` or `sep` token
                ends it.
            kwargs (*optional*): Further arguments of `EncoderDecoderModel.from_encoder_decoder_pretrained`.

        Raises:
            ValueError: If the tokenizer lacks one of these tokens or a pad token.
        """
        begin = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if None in (begin, end, tokenizer.pad_token_id):
            raise ValueError(
                f"{type(tokenizer).__name__} lacks a token that begins a target (bos or cls), ends it (eos or sep), or"
                " pads it. Set them on the tokenizer."
            )
        model = EncoderDecoderModel.from_encoder_decoder_pretrained(encoder, decoder, **kwargs)
        tokens = {"decoder_start_token_id": begin, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
        for name, token in tokens.items():
            setattr(model.config, name, token)
            setattr(model.generation_config, name, token)
        model.generation_config.max_new_tokens = self.max_target_length
        return model

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> DataCollatorForSeq2Seq:
        """
        Pads inputs and, with −100, labels. See [`Task.data_collator`].

        With `model`, it also shifts labels to `decoder_input_ids`, which only a loss with label smoothing needs.
        """
        return DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=IGNORED)

    def build_compute_metrics(
        self, tokenizer: Any, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        ROUGE of generated token ids of shape `(rows, length)`, −100 and special tokens left out.

        With `rows`, the raw evaluation data set in its order, against all whole targets of a row; otherwise against
        the labels, which `max_target_length` may have cut.
        """
        metric = Rouge(use_stemmer=self.use_stemmer)
        targets = None if rows is None else read_targets(rows[:], self.target_column, None)

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            generated = first_output(prediction.predictions)
            if generated.ndim != 2 or not np.issubdtype(generated.dtype, np.integer):
                raise ValueError(
                    f"Predictions are {generated.dtype} of shape {generated.shape}, not token ids. Evaluate with"
                    " `Seq2SeqTrainer` and `predict_with_generate=True`."
                )
            references = targets or [[text] for text in decode_ids(tokenizer, prediction.label_ids)]
            if len(references) != len(generated):
                raise ValueError(f"There are {len(generated)} predictions, but {len(references)} `rows`.")
            return metric.compute(predictions=decode_ids(tokenizer, generated), references=references)

        return compute_metrics


def read_targets(batch: Batch, column: str, indices: Sequence[int] | None) -> list[list[str]]:
    """
    The targets of each row, at least one and none of them empty.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): The column with a target, or a list of them, for each row.
        indices (`Sequence[int]`, *optional*): The rows' numbers.

    Raises:
        ValueError: If a row has none, or an empty one. The message names the row.
    """
    rows = []
    for position, value in enumerate(read_column(batch, column)):
        if is_empty_target(value):
            raise ValueError(
                f"{row_name(position, indices)} has no target or an empty one in the column {column!r}. Drop such"
                " rows, or encode with `with_labels=False`."
            )
        rows.append([value] if isinstance(value, str) else list(value))
    return rows


def is_empty_target(value: Any) -> bool:
    """Whether a target, or a list of them, is missing, or one is no text or nothing but space."""
    targets = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    return not targets or any(map(is_blank, targets))


def decode_ids(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """
    Texts of token ids, without special ones.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        ids (`np.ndarray` of shape `(rows, length)`): Token ids, −100 where there are none.
    """
    texts = tokenizer.batch_decode(np.where(ids == IGNORED, tokenizer.pad_token_id, ids), skip_special_tokens=True)
    return [text.strip() for text in texts]
