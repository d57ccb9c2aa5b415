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
    EncoderDecoderModel,
    EvalPrediction,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from ..base import ComputeMetrics, Task, first_output
from ..columns import Batch, check_length, find_blank, read_column, row_name
from ..label_logits import LabelLogits
from ..seq2seq import Seq2Seq, decode_ids, generated_ids
from ..text_classification import TextClassification
from .scores import superglue_scores
from .templates import LABELS, check_task


# One head for all tasks. A label name that several tasks share, such as Entailment, is one label.
LABEL_NAMES: tuple[str, ...] = tuple(dict.fromkeys(name for names in LABELS.values() for name in names.values()))


class SuperGlueTask(Task):
    """Base class of the SuperGLUE tasks that read [`superglue_rows`] and compute the benchmark's metrics."""

    # The metric for comparing runs.
    main_metric = "superglue_score"
    # Public rows are stored without this column.
    label_column: ClassVar[str] = "target"
    needs_rows: ClassVar[bool] = True

    @property
    @abstractmethod
    def base_task(self) -> TextClassification | Seq2Seq:
        """The task that encodes the rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of [`superglue_rows`]."""
        return ("task", "source", "target", "question", "answer", "answers")

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find rows without a source or without a target."""
        return find_blank(batch, ("source", "target"))

    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """Return the tokenizer's columns and `labels`, one encoded example per row. See [`Task.encode`]."""
        for position, task in enumerate(read_column(batch, "task")):
            check_task(task, row_name(position, indices))
            if not with_labels:
                continue
            target, allowed = read_column(batch, "target")[position], LABELS[task].values()
            if target not in allowed:
                raise ValueError(
                    f"{row_name(position, indices)} has the label {target!r}; allowed for {task!r} are"
                    f" {', '.join(map(repr, allowed))}. Create the rows with `superglue_rows`."
                )
        return self.base_task.encode(batch, tokenizer, indices, with_labels)

    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> Any:
        """Return the collator of the base task. See [`Task.data_collator`]."""
        return self.base_task.data_collator(tokenizer, model)

    @abstractmethod
    def read_predictions(self, prediction: EvalPrediction, tokenizer: Any) -> tuple[list[str | None], list[float]]:
        """
        Return the predicted label name and the candidate score of each row.

        Args:
            prediction (`EvalPrediction`): The prediction from a `Trainer`.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer that encoded the rows.
        """

    @abstractmethod
    def read_targets(self, label_ids: np.ndarray, tokenizer: Any) -> list[str | None]:
        """
        Return the correct label name of each row from its encoded label.

        Args:
            label_ids (`np.ndarray`): `EvalPrediction.label_ids`.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer that encoded the rows.
        """

    def build_compute_metrics(
        self, tokenizer: Any = None, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the function that computes [`~hf_federated.tasks.superglue.superglue_scores`].

        The function requires `rows`, the evaluation dataset before encoding, in evaluation order. The model inputs do
        not contain the question of each row.
        """
        if rows is None:
            raise ValueError(
                "`rows` is missing, but SuperGLUE's metrics group rows by question. Pass the evaluation dataset before"
                " encoding, in evaluation order."
            )
        columns = {name: list(read_column(rows[:], name)) for name in self.columns}

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            targets = self.read_targets(prediction.label_ids, tokenizer)
            if targets != columns["target"]:
                raise ValueError(
                    f"The labels of the {len(targets)} predictions differ from the labels of the"
                    f" {len(columns['target'])} `rows`. Pass the evaluated rows, in evaluation order."
                )
            return superglue_scores(columns, *self.read_predictions(prediction, tokenizer))

        return compute_metrics


@dataclass(frozen=True)
class SuperGlueClassification(SuperGlueTask):
    """
    SuperGLUE for encoders, with one classification head for the labels of all tasks.

    The task reads the rows from [`superglue_rows`]. `labels` are positions in the 16 `LABEL_NAMES`. BoolQ's Yes and No
    are two of these labels. CB and RTE share the label Entailment. The prediction is the label with the highest logit
    among all 16 labels, so a label of another task counts as wrong. For ReCoRD, the answer to a query is the candidate
    with the largest difference between the logits of Correct and Wrong.

    Args:
        max_length (`int`, *optional*):
            Maximum number of tokens per example, including special tokens. Defaults to the maximum of the tokenizer.

    Raises:
        ValueError: If `max_length` is out of range. `encode` raises it if a row has no text, an unknown task, or a
            label that its task does not have. The metrics raise it if `rows` are not the evaluated rows.

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
    def base_task(self) -> TextClassification:
        """Text classification with the labels of all tasks."""
        return TextClassification(LABEL_NAMES, "source", "target", self.max_length)

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """`num_labels`, `id2label` and `label2id`."""
        return self.base_task.model_kwargs

    def label_logits(
        self, prediction: EvalPrediction, features: Dataset | None = None, rows: Dataset | None = None
    ) -> LabelLogits:
        """Return the logits of all 16 labels, of shape `(rows, labels)`. See [`Task.label_logits`]."""
        return self.base_task.label_logits(prediction, features, rows)

    def read_predictions(self, prediction: EvalPrediction, tokenizer: Any) -> tuple[list[str | None], list[float]]:
        """Read predictions from logits of shape `(rows, labels)`. See [`SuperGlueTask.read_predictions`]."""
        logits = first_output(prediction.predictions)
        if np.isnan(logits).any():
            raise ValueError("The logits contain NaN. Check the model and the training for numerical problems.")
        correct, wrong = LABEL_NAMES.index(LABELS["record"]["True"]), LABEL_NAMES.index(LABELS["record"]["False"])
        labels: list[str | None] = [LABEL_NAMES[number] for number in np.argmax(logits, axis=-1)]
        return labels, (logits[:, correct] - logits[:, wrong]).tolist()

    def read_targets(self, label_ids: np.ndarray, tokenizer: Any) -> list[str | None]:
        """Read targets from label IDs of shape `(rows,)`. See [`SuperGlueTask.read_targets`]."""
        return [LABEL_NAMES[number] for number in label_ids]


@dataclass(frozen=True)
class SuperGlueSeq2Seq(SuperGlueTask):
    """
    SuperGLUE for text-to-text models. The target is the label name, as in T5 (Raffel et al., 2020).

    The task reads the rows from [`superglue_rows`]. Evaluate with `Seq2SeqTrainer` (or `federate(Seq2SeqTrainer)`) and
    `predict_with_generate=True`. A generated text counts as a label if it equals the label name after encoding and
    decoding with the tokenizer. Any other text is wrong. For ReCoRD, the answer to a query is the first candidate with
    the prediction Correct. If there is no such candidate, the answer is empty.

    Args:
        max_source_length (`int`, *optional*, defaults to 512): Maximum number of tokens of a source, including special
            tokens.
        max_target_length (`int`, *optional*, defaults to 16): Maximum number of tokens of a target, including special
            tokens.

    Raises:
        ValueError: If a length is out of range. `encode` raises it if a row has no text, an unknown task, or a label
            that its task does not have. The metrics raise it if predictions are not token IDs, the tokenizer encodes
            two labels in the same way, or `rows` are not the evaluated rows.

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
    # The targets are labels, and public rows have no labels.
    prediction_unit = None
    trainer_class: ClassVar[type[Trainer]] = Seq2SeqTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = Seq2SeqTrainingArguments

    def __post_init__(self) -> None:
        check_length("max_source_length", self.max_source_length)
        check_length("max_target_length", self.max_target_length)

    @property
    def base_task(self) -> Seq2Seq:
        """Sequence-to-sequence generation of the target."""
        return Seq2Seq("source", "target", "", self.max_source_length, self.max_target_length)

    def load_encoder_decoder(self, encoder: str, decoder: str, tokenizer: Any, **kwargs: Any) -> EncoderDecoderModel:
        """
        Load a pretrained encoder and a pretrained decoder, as [`Seq2Seq.load_encoder_decoder`] does.

        Args:
            encoder (`str`): Name or path of the encoder, as in `from_pretrained`.
            decoder (`str`): Name or path of the decoder, as in `from_pretrained`.
            tokenizer (`PreTrainedTokenizerFast`): As in [`Seq2Seq.load_encoder_decoder`].
            kwargs (*optional*): As in [`Seq2Seq.load_encoder_decoder`].
        """
        return self.base_task.load_encoder_decoder(encoder, decoder, tokenizer, **kwargs)

    def read_predictions(self, prediction: EvalPrediction, tokenizer: Any) -> tuple[list[str | None], list[float]]:
        """Read predictions from token IDs of shape `(rows, length)`. See [`SuperGlueTask.read_predictions`]."""
        labels = self.read_targets(generated_ids(prediction.predictions), tokenizer)
        return labels, [0.0 if label == LABELS["record"]["True"] else -np.inf for label in labels]

    def read_targets(self, label_ids: np.ndarray, tokenizer: Any) -> list[str | None]:
        """Read label names from token IDs of shape `(rows, length)`, either of targets or of generated texts."""
        name_of = self._names_by_text(tokenizer)
        return [name_of.get(text) for text in decode_ids(tokenizer, label_ids)]

    def _names_by_text(self, tokenizer: Any) -> dict[str, str]:
        """Map the decoded text of each label to its name. Decoding can change case and spaces."""
        ids = tokenizer(text_target=list(LABEL_NAMES), truncation=True, max_length=self.max_target_length)["input_ids"]
        names: dict[str, str] = {}
        for name, row in zip(LABEL_NAMES, ids, strict=True):
            text = decode_ids(tokenizer, np.array([row]))[0]
            if text in names:
                raise ValueError(
                    f"The tokenizer encodes both {names[text]!r} and {name!r} as {text!r}. Use a tokenizer with a"
                    f" suitable vocabulary, or increase `max_target_length`, which is {self.max_target_length}."
                )
            names[text] = name
        return names
