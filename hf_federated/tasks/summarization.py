"""Summaries from causal models: a text, what asks for its summary, and the summary, evaluated as it is generated."""

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
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from .base import Batch, ComputeMetrics, Task, check_length, first_output, is_blank, read_column, read_texts, row_name
from .causal import (
    IGNORED,
    CausalCollator,
    check_is_fast,
    end_token,
    padding_token,
    start_tokens,
    tokenize_answers,
    tokenize_prompts,
)
from .metrics import Rouge
from .seq2seq import is_empty_target, read_targets


@dataclass(frozen=True)
class Summarization(Task):
    """
    A target text that a causal model writes behind a source text: [`Seq2Seq`] without an encoder.

    FL-GLM (section 4.1.1) appends a mask token to the source and takes the summary for what fills it. A causal model
    has no such token; `suffix` stands in its place, by default the "TL;DR:" of Radford et al., "Language Models are
    Unsupervised Multitask Learners" (2019), section 3.6.

    [`~Task.prepare`] makes rows for training: source, `suffix`, target and end token, `labels` −100 but on the last
    two; of several targets of a row the first. [`~Summarization.for_evaluation`] leaves the prompt alone, from which
    `Seq2SeqTrainer` (or `federate(Seq2SeqTrainer)`) generates with `predict_with_generate=True`; such rows are padded
    on the left. How much it generates is the model's: [`~Task.load_model`] sets it, or pass
    `max_new_tokens` to `evaluate`. The metrics are ROUGE-1, ROUGE-2 and ROUGE-L against all targets of a row.

    `eval_loss` is then the loss of the prompt's last token, which the trainer computes as it needs labels, and no
    measure of a summary.

    Args:
        source_column (`str`, *optional*, defaults to `"source"`): The column with the source texts.
        target_column (`str`, *optional*, defaults to `"target"`):
            The column with the target texts, or with a list of them for each row.
        prefix (`str`, *optional*, defaults to `""`): Stands before every source.
        suffix (`str`, *optional*, defaults to `"\\nTL;DR:"`): Stands between a source and its target.
        max_source_length (`int`, *optional*, defaults to 512):
            Tokens that are kept of a source with prefix, suffix and start token; the source's last ones are cut.
        max_target_length (`int`, *optional*, defaults to 64): Tokens that are kept of a target with its end token.
        use_stemmer (`bool`, *optional*, defaults to `True`): Whether ROUGE compares the stems of English words.

    Raises:
        ValueError: If an argument is out of range; from `encode`, if a text is empty or a target missing, or the
            tokenizer has no end token; from the metrics, if predictions are not what was generated from the prompts.
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

    source_column: str = "source"
    target_column: str = "target"
    prefix: str = ""
    suffix: str = "\nTL;DR:"
    max_source_length: int = 512
    max_target_length: int = 64
    use_stemmer: bool = True

    model_class: ClassVar[Any] = AutoModelForCausalLM
    trainer_class: ClassVar[type[Trainer]] = Seq2SeqTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = Seq2SeqTrainingArguments
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_length("max_source_length", self.max_source_length)
        check_length("max_target_length", self.max_target_length, least=2)

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
        """
        Ids, attention mask, `labels` and, for [`~Summarization.for_evaluation`], `prompt_length`, one row for each.
        Without labels, a row is its prompt. See [`Task.encode`].
        """
        check_is_fast(tokenizer)
        sources = [source.strip() for source in read_texts(batch, self.source_column, indices)]
        answers = self._read_answers(batch, tokenizer, indices) if with_labels else [[] for _ in sources]
        start, begin = start_tokens(tokenizer), len(self.prefix)
        prompts = tokenize_prompts(
            [self.prefix + source + self.suffix for source in sources],
            [(begin, begin + len(source)) for source in sources],
            [self.max_source_length - len(start)] * len(sources),
            tokenizer,
            indices,
        )
        prompts = [start + ids for ids in prompts]
        encoded: dict[str, list[Any]] = {
            "input_ids": [ids + answer for ids, answer in zip(prompts, answers, strict=True)],
            "attention_mask": [[1] * (len(ids) + len(answer)) for ids, answer in zip(prompts, answers, strict=True)],
            "prompt_length": [len(ids) for ids in prompts],
        }
        if with_labels:
            encoded["labels"] = [[IGNORED] * len(ids) + answer for ids, answer in zip(prompts, answers, strict=True)]
        return encoded

    def _read_answers(self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None) -> list[list[int]]:
        """The tokens of each row's first target, and the end token."""
        end = end_token(tokenizer)
        targets = [golds[0] for golds in read_targets(batch, self.target_column, indices)]
        answers = tokenize_answers(targets, tokenizer)
        for position, ids in enumerate(answers):
            if not ids:
                raise ValueError(
                    f"{row_name(position, indices)} has the target {targets[position]!r}, of which the tokenizer"
                    " leaves nothing. Drop the row, or take a tokenizer that knows it."
                )
        return [ids[: self.max_target_length - 1] + [end] for ids in answers]

    def set_up(self, model: PreTrainedModel) -> PreTrainedModel:
        """The same model, which generates `max_target_length` tokens at most. See [`Task.set_up`]."""
        model.generation_config.max_new_tokens = self.max_target_length
        return model

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> CausalCollator:
        """Pads rows on the right to train, prompts on the left to generate. See [`Task.data_collator`]."""
        return CausalCollator(padding_token(tokenizer), continue_prompts=True)

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        The prompts of the rows. Of their labels only the last is not −100: there a prompt ends, and what is generated
        begins. See [`Task.for_evaluation`].
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
        ROUGE of generated token ids of shape `(rows, length)`, each row's prompt first, as `generate` returns them.

        Needs `rows`, the raw evaluation data set in its order: prompts do not hold the targets.
        """
        if rows is None:
            raise ValueError("Prompts do not hold the targets. Give `rows`, the raw evaluation data set in its order.")
        metric = Rouge(use_stemmer=self.use_stemmer)
        targets = read_targets(rows[:], self.target_column, None)

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            generated, labels = first_output(prediction.predictions), first_output(prediction.label_ids)
            if len(generated) != len(targets):
                raise ValueError(f"There are {len(generated)} predictions, but {len(targets)} `rows`.")
            # −100 on its left only, as a batch is padded; there may be other padding on its right.
            ends = (labels != IGNORED).argmax(axis=1)
            each = np.arange(len(ends))
            if generated.ndim != 2 or (generated[each, ends] != labels[each, ends]).any():
                raise ValueError(
                    f"Predictions of shape {generated.shape} do not begin with the prompts. Evaluate with"
                    " `Seq2SeqTrainer`, `predict_with_generate=True` and the rows that `for_evaluation` made."
                )
            written = [ids[end + 1 :] for ids, end in zip(generated, ends, strict=True)]
            written = [ids[ids != IGNORED] for ids in written]
            texts = tokenizer.batch_decode(written, skip_special_tokens=True)
            return metric.compute(predictions=[text.strip() for text in texts], references=targets)

        return compute_metrics
