"""SuperGLUE's eight tasks as one problem, for encoders with one shared head and for text-to-text models.

Source: FedDRS, section 5.1 ("a model performs multiple tasks simultaneously") and appendix A.2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EncoderDecoderModel,
    EvalPrediction,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from ..base import Batch, ComputeMetrics, Task, check_length, first_output, is_blank, read_column, row_name
from ..seq2seq import Seq2Seq, decode_ids
from ..text_classification import TextClassification
from .scores import superglue_scores
from .templates import LABELS


# One head for all: names that several tasks have (Entailment) are one label.
LABEL_NAMES: tuple[str, ...] = tuple(dict.fromkeys(name for names in LABELS.values() for name in names.values()))


class SuperGlueTask(Task):
    """What the two forms share: rows of [`superglue_rows`], and the metrics of the benchmark."""

    # Public rows lose it.
    label_column: ClassVar[str] = "target"
    needs_rows: ClassVar[bool] = True

    @property
    @abstractmethod
    def form(self) -> TextClassification | Seq2Seq:
        """What encodes a row."""

    @property
    def main_metric(self) -> str:
        """The metric that runs are compared by."""
        return "superglue_score"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of [`superglue_rows`]."""
        return ("task", "source", "target", "question", "answer", "answers")

    def find_empty(self, batch: Batch) -> list[bool]:
        """Rows without a source or a target."""
        rows = zip(read_column(batch, "source"), read_column(batch, "target"), strict=True)
        return [is_blank(source) or is_blank(target) for source, target in rows]

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """The tokenizer's columns and `labels`, one row for each. See [`Task.encode`]."""
        for position, task in enumerate(read_column(batch, "task")):
            if task not in LABELS:
                raise ValueError(
                    f"{row_name(position, indices)} has the task {task!r}; allowed are {', '.join(map(repr, LABELS))}."
                )
            if not with_labels:
                continue
            target, allowed = read_column(batch, "target")[position], LABELS[task].values()
            if target not in allowed:
                raise ValueError(
                    f"{row_name(position, indices)} has the label {target!r}; allowed for {task!r} are"
                    f" {', '.join(map(repr, allowed))}. `superglue_rows` names them so."
                )
        return self.form.encode(batch, tokenizer, indices, with_labels)

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> Any:
        """That of the form. See [`Task.data_collator`]."""
        return self.form.data_collator(tokenizer, model)

    @abstractmethod
    def read_predictions(self, prediction: EvalPrediction, tokenizer: Any) -> tuple[list[str | None], list[float]]:
        """
        The name of each row's label, and how sure it is that its candidate is the right one.

        Args:
            prediction (`EvalPrediction`): As a `Trainer` has it.
            tokenizer (`PreTrainedTokenizerFast`): What the rows were encoded with.
        """

    @abstractmethod
    def read_targets(self, label_ids: np.ndarray, tokenizer: Any) -> list[str | None]:
        """
        The name of each row's right label, from what the row was encoded to.

        Args:
            label_ids (`np.ndarray`): `EvalPrediction.label_ids`.
            tokenizer (`PreTrainedTokenizerFast`): What the rows were encoded with.
        """

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        What [`~hf_federated.tasks.superglue.superglue_scores`] computes.

        Needs `rows`, the evaluation data set before it was encoded, in its order: a model's inputs do not say which
        rows belong to one question.
        """
        if rows is None:
            raise ValueError(
                "SuperGLUE's metrics join the rows of a question. Give `rows`, the evaluation data set before it was"
                " encoded, in its order."
            )
        columns = {name: list(read_column(rows[:], name)) for name in self.columns}

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            targets = self.read_targets(prediction.label_ids, tokenizer)
            if targets != columns["target"]:
                raise ValueError(
                    f"The {len(targets)} predictions are not of the {len(columns['target'])} `rows`, whose labels are"
                    " others. Give the rows in the order in which they are evaluated."
                )
            return superglue_scores(columns, *self.read_predictions(prediction, tokenizer))

        return compute_metrics


@dataclass(frozen=True)
class SuperGlueClassification(SuperGlueTask):
    """
    SuperGLUE for encoders: all tasks under one head, with a label for each label name of all tasks.

    Reads what [`superglue_rows`] makes of raw rows. `labels` are numbers of `LABEL_NAMES`, sixteen; BoolQ's Yes and
    No are two of them, and the Entailment of CB and that of RTE one. The prediction is the best of all sixteen, so a
    model that takes a row for one of another task is wrong. ReCoRD's answer to a query is the candidate with the
    highest logit of Correct over that of Wrong.

    Args:
        max_length (`int`, *optional*):
            Tokens that are kept of a row, special ones counted. Defaults to what the tokenizer allows.

    Raises:
        ValueError: If `max_length` is out of range; from `encode`, if a row has no text, an unknown task, or a label
            that its task does not have; from the metrics, if `rows` are not those that are evaluated.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import SuperGlueClassification, superglue_rows

    >>> raw = Dataset.from_dict({"premise": ["It is cold."], "hypothesis": ["It is warm."], "label": ["neutral"]})
    >>> words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "warm": 2, "cold": 3}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    >>> task = SuperGlueClassification()
    >>> encoded = task.prepare(superglue_rows("cb", raw), tokenizer)
    >>> task.model_kwargs["id2label"][encoded[0]["labels"]]
    'Neutral'

    ```
    """

    max_length: int | None = None

    model_class: ClassVar[Any] = AutoModelForSequenceClassification

    def __post_init__(self) -> None:
        check_length("max_length", self.max_length)

    @property
    def form(self) -> TextClassification:
        """Text classification with the labels of all tasks."""
        return TextClassification(LABEL_NAMES, "source", "target", self.max_length)

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """`num_labels`, `id2label` and `label2id`."""
        return self.form.model_kwargs

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> DataCollatorWithPadding:
        """Pads inputs of shape `(batch, length)`. See [`Task.data_collator`]."""
        return self.form.data_collator(tokenizer, model)

    def read_predictions(self, prediction: EvalPrediction, tokenizer: Any) -> tuple[list[str | None], list[float]]:
        """From logits of shape `(rows, labels)`. See [`SuperGlueTask.read_predictions`]."""
        logits = first_output(prediction.predictions)
        if np.isnan(logits).any():
            raise ValueError("There are logits that are not numbers: the model's outputs are not finite.")
        correct, wrong = LABEL_NAMES.index(LABELS["record"]["True"]), LABEL_NAMES.index(LABELS["record"]["False"])
        labels: list[str | None] = [LABEL_NAMES[number] for number in np.argmax(logits, axis=-1)]
        return labels, (logits[:, correct] - logits[:, wrong]).tolist()

    def read_targets(self, label_ids: np.ndarray, tokenizer: Any) -> list[str | None]:
        """From numbers of shape `(rows,)`. See [`SuperGlueTask.read_targets`]."""
        return [LABEL_NAMES[number] for number in label_ids]


@dataclass(frozen=True)
class SuperGlueSeq2Seq(SuperGlueTask):
    """
    SuperGLUE for text-to-text models: the target is the label's name, as T5 does it (Raffel et al., 2020).

    Reads what [`superglue_rows`] makes of raw rows. Evaluate with `Seq2SeqTrainer` (or `federate(Seq2SeqTrainer)`) and
    `predict_with_generate=True`. What the model writes is a label if it reads as the tokenizer writes that label's
    name; anything else is wrong. ReCoRD's answer to a query is the first candidate that is called Correct, and none
    where there is no such candidate.

    Args:
        max_source_length (`int`, *optional*, defaults to 512): Tokens that are kept of a source, with special ones.
        max_target_length (`int`, *optional*, defaults to 16): Tokens that are kept of a target, with special ones.

    Raises:
        ValueError: If a length is out of range; from `encode`, if a row has no text, an unknown task, or a label that
            its task does not have; from the metrics, if predictions are no token ids, the tokenizer cannot tell two
            labels apart, or `rows` are not those that are evaluated.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.pre_tokenizers import Whitespace
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks import SuperGlueSeq2Seq, superglue_rows

    >>> raw = Dataset.from_dict({"premise": ["It is cold."], "hypothesis": ["It is warm."], "label": ["neutral"]})
    >>> words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "Neutral": 2}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    >>> SuperGlueSeq2Seq().prepare(superglue_rows("cb", raw), tokenizer)[0]["labels"]
    [2]

    ```
    """

    max_source_length: int = 512
    max_target_length: int = 16

    model_class: ClassVar[Any] = AutoModelForSeq2SeqLM
    # Its targets are labels, which public rows have not.
    prediction_unit = None
    trainer_class: ClassVar[type[Trainer]] = Seq2SeqTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = Seq2SeqTrainingArguments

    def __post_init__(self) -> None:
        check_length("max_source_length", self.max_source_length)
        check_length("max_target_length", self.max_target_length)

    @property
    def form(self) -> Seq2Seq:
        """A target for a source."""
        return Seq2Seq("source", "target", "", self.max_source_length, self.max_target_length)

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> DataCollatorForSeq2Seq:
        """Pads inputs and, with −100, labels. See [`Seq2Seq.data_collator`]."""
        return self.form.data_collator(tokenizer, model)

    def load_encoder_decoder(self, encoder: str, decoder: str, tokenizer: Any, **kwargs: Any) -> EncoderDecoderModel:
        """
        A pretrained encoder and a pretrained decoder, joined by new cross-attention, as [`Seq2Seq`] joins them.

        Args:
            encoder (`str`): As in `from_pretrained`.
            decoder (`str`): As in `from_pretrained`.
            tokenizer (`PreTrainedTokenizerFast`): As there.
            kwargs (*optional*): As there.
        """
        return self.form.load_encoder_decoder(encoder, decoder, tokenizer, **kwargs)

    def read_predictions(self, prediction: EvalPrediction, tokenizer: Any) -> tuple[list[str | None], list[float]]:
        """From token ids of shape `(rows, length)`. See [`SuperGlueTask.read_predictions`]."""
        generated = first_output(prediction.predictions)
        if generated.ndim != 2 or not np.issubdtype(generated.dtype, np.integer):
            raise ValueError(
                f"Predictions are {generated.dtype} of shape {generated.shape}, not token ids. Evaluate with"
                " `Seq2SeqTrainer` and `predict_with_generate=True`."
            )
        labels = self.read_targets(generated, tokenizer)
        return labels, [0.0 if label == LABELS["record"]["True"] else -np.inf for label in labels]

    def read_targets(self, label_ids: np.ndarray, tokenizer: Any) -> list[str | None]:
        """From token ids of shape `(rows, length)`, of the targets or of what was generated."""
        name_of = self._name_of(tokenizer)
        return [name_of.get(text) for text in decode_ids(tokenizer, label_ids)]

    def _name_of(self, tokenizer: Any) -> dict[str, str]:
        """The label's name for each text that the tokenizer makes of one: lower case, say, or with spaces in it."""
        ids = tokenizer(text_target=list(LABEL_NAMES), truncation=True, max_length=self.max_target_length)["input_ids"]
        names: dict[str, str] = {}
        for name, row in zip(LABEL_NAMES, ids, strict=True):
            text = decode_ids(tokenizer, np.array([row]))[0]
            if text in names:
                raise ValueError(
                    f"The tokenizer writes both {names[text]!r} and {name!r} as {text!r}. Take one that knows these"
                    f" words, or raise `max_target_length`, which is {self.max_target_length}."
                )
            names[text] = name
        return names
