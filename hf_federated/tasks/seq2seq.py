"""Sequence-to-sequence generation: generate a target text from a source text, such as the headlines of Gigaword."""

from __future__ import annotations

from collections.abc import Sequence
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
)

from .base import IGNORED, NUM_POSITIONS, ComputeMetrics, first_output
from .columns import Batch, check_length, read_texts
from .generation import GenerationTask, check_num_rows, read_targets
from .metrics import Rouge


@dataclass(frozen=True)
class Seq2Seq(GenerationTask):
    """
    Sequence-to-sequence generation of a target text from a source text (Gigaword in FedNLP, section 3.1).

    Encoded examples have the tokenizer's columns for the source, always with an attention mask, and `labels` of shape
    `(target length,)`. The collator pads labels with −100, which the loss skips. If an example has several targets,
    training uses the first target.

    The metrics are ROUGE-1, ROUGE-2 and ROUGE-L of generated texts. Evaluate with `Seq2SeqTrainer` (or
    `federate(Seq2SeqTrainer)`) and `predict_with_generate=True`. `Trainer` can train the task, but does not generate.

    Args:
        source_column (`str`, *optional*, defaults to `"source"`): The column with the source texts.
        target_column (`str`, *optional*, defaults to `"target"`):
            The column with the target texts, or with a list of target texts per example.
        prefix (`str`, *optional*, defaults to `""`): Text before every source, such as "summarize: " for T5.
        max_source_length (`int`, *optional*, defaults to 512): Maximum number of tokens of a source, including special
            tokens.
        max_target_length (`int`, *optional*, defaults to 64): Maximum number of tokens of a target, including special
            tokens.
        use_stemmer (`bool`, *optional*, defaults to `True`): Whether ROUGE compares the stems of English words.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if a text is empty or a target is missing. The
            metrics raise it if predictions are not token IDs.
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

    max_source_length: int = 512
    max_target_length: int = 64
    use_stemmer: bool = True

    model_class: ClassVar[Any] = AutoModelForSeq2SeqLM
    prediction_unit = "token"
    labels_are_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("max_source_length", self.max_source_length)
        check_length("max_target_length", self.max_target_length)

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Return the tokenizer's columns and `labels`, one encoded example per raw example. See [`Task.encode`]."""
        sources = [self.prefix + source for source in read_texts(batch, self.source_column, indices)]
        # Targets are read first, so that errors in them are raised before the longer tokenization of the sources.
        targets = [golds[0] for golds in read_targets(batch, self.target_column, indices)] if with_labels else None
        encoded = dict(
            tokenizer(sources, truncation=True, max_length=self.max_source_length, return_attention_mask=True)
        )
        if targets is not None:
            labels = tokenizer(text_target=targets, truncation=True, max_length=self.max_target_length)
            encoded["labels"] = labels["input_ids"]
        return encoded

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        Encode sources, with targets as `labels`. Public examples therefore need the target column.

        The decoder receives the target tokens one after the other. See [`Task.encode_public`].
        """
        encoded = self.encode(batch, tokenizer, indices)
        return {**encoded, NUM_POSITIONS: [len(target) for target in encoded["labels"]]}

    def load_encoder_decoder(self, encoder: str, decoder: str, tokenizer: Any, **kwargs: Any) -> EncoderDecoderModel:
        """
        Load a pretrained encoder and a pretrained decoder, and connect them with new cross-attention layers.

        Rothe et al., "Leveraging Pre-trained Checkpoints for Sequence Generation Tasks" (2020), initialize
        encoder-decoder models from two BERT checkpoints in this way. Both models must use the same tokenizer.

        Args:
            encoder (`str`): Name or path of the encoder, as in `from_pretrained`.
            decoder (`str`): Name or path of the decoder, as in `from_pretrained`. An encoder model also works and gets
                causal attention.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer. Its `bos` or `cls` token starts a target, its `eos`
                or `sep` token ends it.
            kwargs (*optional*): Further arguments of `EncoderDecoderModel.from_encoder_decoder_pretrained`.

        Raises:
            ValueError: If the tokenizer lacks a start token, an end token or a pad token.
        """
        begin = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if None in (begin, end, tokenizer.pad_token_id):
            raise ValueError(
                f"{type(tokenizer).__name__} lacks a token to start a target (bos or cls), a token to end a target"
                " (eos or sep), or a pad token. Set the missing tokens on the tokenizer."
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
        Pad inputs, and pad labels with −100. See [`Task.data_collator`].

        With `model`, the collator also shifts the labels to `decoder_input_ids`. Only a loss with label smoothing
        needs them.
        """
        return DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=IGNORED)

    def build_compute_metrics(
        self, tokenizer: Any, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes ROUGE from generated token IDs of shape `(examples, length)`.

        The function removes −100 and special tokens. With `rows`, the raw evaluation dataset in evaluation order, it
        compares with all targets of an example at full length. Otherwise, it compares with the labels, which
        `max_target_length` can truncate.
        """
        metric = Rouge(use_stemmer=self.use_stemmer)
        targets = None if rows is None else read_targets(rows[:], self.target_column, None)

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            generated = generated_ids(prediction.predictions)
            references = targets or [[text] for text in decode_ids(tokenizer, prediction.label_ids)]
            check_num_rows(len(generated), len(references))
            return metric.compute(predictions=decode_ids(tokenizer, generated), references=references)

        return compute_metrics


def generated_ids(predictions: Any) -> np.ndarray:
    """
    Return the token IDs that a model generated.

    Args:
        predictions (`np.ndarray` or `tuple`): `EvalPrediction.predictions`.

    Returns:
        `np.ndarray` of shape `(examples, length)`: Token IDs.

    Raises:
        ValueError: If the predictions are not token IDs.
    """
    generated = first_output(predictions)
    if generated.ndim != 2 or not np.issubdtype(generated.dtype, np.integer):
        raise ValueError(
            f"Predictions are {generated.dtype} of shape {generated.shape}, not token ids. Evaluate with"
            " `Seq2SeqTrainer` and `predict_with_generate=True`."
        )
    return generated


def decode_ids(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """
    Decode token IDs to texts without special tokens.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        ids (`np.ndarray` of shape `(examples, length)`): Token IDs, with −100 for padding.
    """
    texts = tokenizer.batch_decode(np.where(ids == IGNORED, tokenizer.pad_token_id, ids), skip_special_tokens=True)
    return [text.strip() for text in texts]
