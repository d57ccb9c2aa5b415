"""Summarization with causal models, evaluated on generated summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    PreTrainedModel,
)

from .base import ComputeMetrics, first_output
from .causal import (
    IGNORED,
    CausalCollator,
    end_token,
    join_answers,
    padding_token,
    takes_attention_mask,
    tokenize_answers,
    tokenize_prompts,
)
from .columns import Batch, check_length, read_texts, row_name
from .generation import GenerationTask, check_num_rows, read_targets
from .metrics import Rouge


@dataclass(frozen=True)
class Summarization(GenerationTask):
    """
    Summarization with a causal model: [`Seq2Seq`] without an encoder.

    The model generates the target after the source. FL-GLM (section 4.1.1) appends a mask token to the source, and the
    model replaces the mask token with the summary. Causal models have no mask token, so this task appends `suffix`
    instead. The default suffix is the "TL;DR:" of Radford et al., "Language Models are Unsupervised Multitask
    Learners" (2019), section 3.6.

    [`~Task.prepare`] creates training examples from source, `suffix`, target and end token. The `labels` are −100
    except for target and end token. If an example has several targets, training uses the first target.

    [`~Summarization.for_evaluation`] keeps only the prompts. `Seq2SeqTrainer` (or `federate(Seq2SeqTrainer)`) with
    `predict_with_generate=True` generates from these prompts, which are padded on the left. [`~Task.load_model`] sets
    the maximum number of generated tokens in the model's generation config. To change it, pass `max_new_tokens` to
    `evaluate`. The training argument `generation_num_beams` sets the number of beams (default: greedy search). The
    metrics are ROUGE-1, ROUGE-2 and ROUGE-L against all targets of an example.

    In this setup, `eval_loss` is the loss on the last token of the prompt. The trainer computes a loss because it
    needs labels. The value does not measure the quality of the summaries.

    Args:
        source_column (`str`, *optional*, defaults to `"source"`): The column with the source texts.
        target_column (`str`, *optional*, defaults to `"target"`):
            The column with the target texts, or with a list of target texts per example.
        prefix (`str`, *optional*, defaults to `""`): Text before every source.
        suffix (`str`, *optional*, defaults to `"\\nTL;DR:"`): Text between a source and its target.
        max_source_length (`int`, *optional*, defaults to 512):
            Maximum number of tokens of a source, including prefix, suffix and special tokens. Truncation removes the
            last tokens of the source text.
        max_target_length (`int`, *optional*, defaults to 64): Maximum number of tokens of a target, including the end
            token.
        use_stemmer (`bool`, *optional*, defaults to `True`): Whether ROUGE compares the stems of English words.

    Raises:
        ValueError: If an argument is out of range. `encode` raises it if a text is empty, a target is missing or the
            tokenizer has no end token. The metrics raise it if predictions do not begin with the prompts.
        ImportError: From `build_compute_metrics`, if rouge-score (extra `metrics`) is not installed.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import Summarization

    >>> words = Tokenizer(WordLevel({"<end>": 0, "<unk>": 1, "snow": 2, "in": 3, "rome": 4}, unk_token="<unk>"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
    >>> task = Summarization(suffix=" in")
    >>> encoded = task.encode({"source": ["rome snow"], "target": ["snow"]}, tokenizer)
    >>> encoded["input_ids"], encoded["labels"]
    ([[4, 2, 3, 2, 0]], [[-100, -100, -100, 2, 0]])

    ```
    """

    suffix: str = "\nTL;DR:"
    max_source_length: int = 512
    max_target_length: int = 64
    use_stemmer: bool = True

    model_class: ClassVar[Any] = AutoModelForCausalLM
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("max_source_length", self.max_source_length)
        check_length("max_target_length", self.max_target_length, minimum=2)

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """
        Encode token IDs, attention mask, `labels` and `prompt_length`, one encoded example per raw example.

        [`~Summarization.for_evaluation`] uses `prompt_length`. Without labels, the encoded example is only the prompt.
        See [`Task.encode`].
        """
        sources = [source.strip() for source in read_texts(batch, self.source_column, indices)]
        answers = self._read_answers(batch, tokenizer, indices) if with_labels else None
        begin = len(self.prefix)
        prompts = tokenize_prompts(
            [self.prefix + source + self.suffix for source in sources],
            [(begin, begin + len(source)) for source in sources],
            [self.max_source_length] * len(sources),
            tokenizer,
            indices,
        )
        return {**join_answers(prompts, answers), "prompt_length": [len(ids) for ids in prompts]}

    def _read_answers(self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None) -> list[list[int]]:
        """Return the tokens of each example's first target, followed by the end token."""
        end = end_token(tokenizer)
        targets = [golds[0] for golds in read_targets(batch, self.target_column, indices)]
        answers = tokenize_answers(targets, tokenizer)
        for position, ids in enumerate(answers):
            if not ids:
                raise ValueError(
                    f"{row_name(position, indices)} has the target {targets[position]!r}, but the tokenizer returns no"
                    " tokens for it. Drop the row, or use a tokenizer with a suitable vocabulary."
                )
        return [ids[: self.max_target_length - 1] + [end] for ids in answers]

    def set_up(self, model: PreTrainedModel) -> PreTrainedModel:
        """Limit generation to `max_target_length` tokens and return the same model. See [`Task.set_up`]."""
        model.generation_config.max_new_tokens = self.max_target_length
        return model

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> CausalCollator:
        """Pad on the right for training, and on the left for generation from prompts. See [`Task.data_collator`]."""
        return CausalCollator(padding_token(tokenizer), True, takes_attention_mask(model))

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        Keep only the prompts. The last label of a prompt is its last token, all other labels are −100.

        The last label marks the end of the prompt, where the generated text begins. See [`Task.for_evaluation`].
        """

        def leave_prompts(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
            rows = [ids[:length] for ids, length in zip(batch["input_ids"], batch["prompt_length"], strict=True)]
            labels = [[IGNORED] * (len(ids) - 1) + ids[-1:] for ids in rows]
            return {"input_ids": rows, "attention_mask": [[1] * len(ids) for ids in rows], "labels": labels}

        return features.map(leave_prompts, batched=True, remove_columns=features.column_names)

    def build_compute_metrics(
        self, tokenizer: Any, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes ROUGE from generated token IDs of shape `(examples, length)`.

        Each sequence begins with its prompt, as `generate` returns it. The function requires `rows`, the raw
        evaluation dataset in evaluation order, because prompts do not contain the targets.
        """
        if rows is None:
            raise ValueError(
                "`rows` is missing, but prompts do not contain the targets. Pass the raw evaluation dataset as `rows`."
            )
        metric = Rouge(use_stemmer=self.use_stemmer)
        targets = read_targets(rows[:], self.target_column, None)

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            generated, labels = first_output(prediction.predictions), first_output(prediction.label_ids)
            check_num_rows(len(generated), len(targets))
            # Batches are padded with −100 on the left only. Other padding on the right is possible.
            ends = (labels != IGNORED).argmax(axis=1)
            each = np.arange(len(ends))
            if generated.ndim != 2 or (generated[each, ends] != labels[each, ends]).any():
                raise ValueError(
                    f"Predictions of shape {generated.shape} do not begin with the prompts. Evaluate with"
                    " `Seq2SeqTrainer`, `predict_with_generate=True` and the dataset from `for_evaluation`."
                )
            written = [ids[end + 1 :] for ids, end in zip(generated, ends, strict=True)]
            # A model can have more token embeddings than the tokenizer has tokens. Fast tokenizers skip the other IDs.
            written = [ids[(ids != IGNORED) & (ids < len(tokenizer))] for ids in written]
            texts = tokenizer.batch_decode(written, skip_special_tokens=True)
            return metric.compute(predictions=[text.strip() for text in texts], references=targets)

        return compute_metrics
