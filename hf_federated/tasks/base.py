"""Base class of the tasks.

A task reads raw columns. Its methods receive the tokenizer as an argument, so clients with different tokenizers can
share one task object. The encoded datasets work with `transformers.Trainer` without further changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedModel, Trainer, TrainingArguments

from ..data import FederatedDataset
from ..utils.remote_code import load_causal_model
from .columns import Batch
from .label_logits import LabelLogits
from .mapping import fingerprint, map_rows


IGNORED = -100  # label value that losses skip
# Column with the number of predictions for a public example, including positions that the tokenizer drops.
NUM_POSITIONS = "num_positions"

ComputeMetrics = Callable[[EvalPrediction], dict[str, float]]


class Task(ABC):
    """
    Base class of the task formulations, which encode raw examples and compute metrics from predictions.

    The package provides [`TextClassification`], [`SequenceTagging`], [`QuestionAnswering`], [`Seq2Seq`],
    [`LanguageModeling`], [`Summarization`] and [`ClozeClassification`]. For SuperGLUE it provides
    [`SuperGlueClassification`], [`SuperGlueSeq2Seq`] and [`SuperGlueCloze`]. Each task has these members:

    - `model_class` and `model_kwargs`: the `AutoModelFor…` class to train, and arguments for its `from_pretrained`;
    - `columns`: the raw columns that the task reads;
    - `one_feature_per_example`: whether encoding keeps the number of examples;
    - `encode(batch, tokenizer)`: the function for `datasets.Dataset.map(batched=True)`;
    - `prepare(dataset, tokenizer)`: encodes a `Dataset` or a [`FederatedDataset`];
    - `data_collator(tokenizer)`: the data collator from `transformers`;
    - `build_compute_metrics(tokenizer, features, rows)`: the function for `Trainer(compute_metrics=...)`;
    - `needs_rows`: whether `build_compute_metrics` requires `rows`;
    - `label_logits(prediction, features, rows)`: the logits and the label of each example, if it has one label;
    - `preprocess_logits_for_metrics`: the function for the `Trainer` argument with the same name. It is `None` if the
      metrics use the logits unchanged;
    - `prediction_unit`: the unit that one prediction of the model describes;
    - `encode_public` and `prepare_public`: encode public examples for distillation and mark the predicted positions;
    - `trainer_class` and `arguments_class`: the trainer that computes the metrics, and the class of its arguments;
    - `main_metric` and `lower_is_better`: the metric for comparing runs, and its direction;
    - `metric_names`: the names of all metrics, if they do not depend on the examples.
    """

    model_class: ClassVar[Any]
    trainer_class: ClassVar[type[Trainer]] = Trainer
    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    lower_is_better: ClassVar[bool] = False
    # Names of all metrics of an evaluation, without `metric` of the arguments. Empty if they depend on the examples.
    metric_names: ClassVar[tuple[str, ...]] = ()
    needs_rows: ClassVar[bool] = False
    # Unit that one softmax of the model describes: an example (`"row"`), a `"word"` of the example, or a `"token"` of
    # the vocabulary. `None` for other predictions, which cannot be distilled.
    prediction_unit: str | None = "row"
    # Whether the model receives the labels of public examples as inputs. Such labels are public text.
    labels_are_inputs: ClassVar[bool] = False
    preprocess_logits_for_metrics: Any = None

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads, including label columns."""

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric for comparing runs."""

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """Model config arguments that the task sets, such as the labels."""
        return {}

    @property
    def one_feature_per_example(self) -> bool:
        """Whether each raw example becomes exactly one encoded example, independent of the rest of the batch."""
        return True

    @abstractmethod
    def find_empty(self, batch: Batch) -> list[bool]:
        """
        Find the examples that [`~Task.encode`] rejects because a value is missing or contains only whitespace.

        Args:
            batch (`Mapping[str, Sequence]`): Raw columns.

        Raises:
            ValueError: If a column does not exist.
        """

    @abstractmethod
    def encode(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None, with_labels: bool = True
    ) -> dict[str, list[Any]]:
        """
        Encode raw examples as model inputs.

        Args:
            batch (`Mapping[str, Sequence]`): Raw columns, as `datasets.Dataset.map(batched=True)` passes them.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            indices (`Sequence[int]`, *optional*): Row numbers for error messages. Defaults to the positions in the
                batch.
            with_labels (`bool`, *optional*, defaults to `True`): Whether to read labels. Set it to `False` to encode
                unlabeled examples for prediction.
        """

    @abstractmethod
    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> Any:
        """
        Return the `transformers` collator that pads encoded examples to the longest one in the batch.

        Args:
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer that encoded the examples.
            model (`PreTrainedModel`, *optional*): The model. [`Seq2Seq`] uses it to create decoder inputs.
                [`Summarization`] and tasks with candidates read from its config whether it takes an attention mask.
        """

    @abstractmethod
    def build_compute_metrics(
        self, tokenizer: Any, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        Build the `compute_metrics` function for a `Trainer`.

        Args:
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer that encoded the examples.
            features (`Dataset`, *optional*): The encoded evaluation dataset. [`QuestionAnswering`] and
                tasks with candidates require it.
            rows (`Dataset`, *optional*): The raw evaluation dataset. Tasks with `needs_rows` require it.
        """

    def label_logits(
        self, prediction: EvalPrediction, features: Dataset | None = None, rows: Dataset | None = None
    ) -> LabelLogits | None:
        """
        Return the logits and the label of each raw example, or `None` if an example has no single label.

        Args:
            prediction (`EvalPrediction`): The prediction that `compute_metrics` received.
            features (`Dataset`, *optional*): As in [`~Task.build_compute_metrics`].
            rows (`Dataset`, *optional*): As in [`~Task.build_compute_metrics`]. The results have the order of `rows`.

        Raises:
            ValueError: If the labels of the predictions are not the labels of `rows`.
        """
        return None

    def prepare(self, dataset: Any, tokenizer: Any, with_labels: bool = True, **kwargs: Any) -> Any:
        """
        Encode a dataset and remove its raw columns.

        Args:
            dataset (`datasets.Dataset` or [`FederatedDataset`]): Raw examples. In a [`FederatedDataset`], examples
                stay with their client.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            with_labels (`bool`, *optional*, defaults to `True`): Whether to read labels.
            kwargs (*optional*): Further arguments of `map`.

        Returns:
            A dataset of the same type with encoded examples.

        Raises:
            ValueError: If an example is invalid, or if encoding leaves no examples for a client. The message contains
                the row number, and also the client ID if clients are encoded one by one. Also raised if `kwargs`
                contains `cache_file_name` or `new_fingerprint` and clients are encoded one by one.
        """

        def encode(batch: Batch, indices: list[int]) -> dict[str, list[Any]]:
            return self.encode(batch, tokenizer, indices, with_labels)

        settings = fingerprint(tokenizer, self, with_labels, kwargs)
        is_federated = isinstance(dataset, FederatedDataset)
        # If the clients share a source dataset, it is encoded once instead of once per client.
        if not is_federated or (self.one_feature_per_example and dataset.source is not None):
            return map_rows(dataset, encode, tokenizer, settings, **kwargs)
        if shared := {"cache_file_name", "new_fingerprint"} & kwargs.keys():  # clients would read the same cache
            raise ValueError(
                f"`prepare` got {sorted(shared)}, but each client has a separate dataset here. Remove the argument."
            )
        prepared = {}
        for client_id, rows in dataset.items():
            try:
                prepared[client_id] = map_rows(rows, encode, tokenizer, settings, **kwargs)
            except ValueError as error:
                raise ValueError(f"Client {client_id!r}: {error}") from error
            if isinstance(rows, Dataset) and len(prepared[client_id]) == 0:
                raise ValueError(
                    f"Client {client_id!r} has {len(rows)} rows, but the tokenizer returns no tokens for them. Remove"
                    " the client with select_clients, or use a tokenizer with a suitable vocabulary."
                )
        clients = FederatedDataset.from_dict(prepared)
        clients.partitioning, clients.origin = dataset.partitioning, dataset.origin
        return clients

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        Encode raw public examples as model inputs and mark the positions of the predictions.

        If `prediction_unit` is `"row"`, this method calls [`~Task.encode`] without labels. Otherwise, the result has
        two additional columns:

        - `labels`: −100 except at the positions of the model's predictions;
        - `num_positions`: the number of predictions for the example, including positions that this tokenizer drops.

        Args:
            batch (`Mapping[str, Sequence]`): Raw columns.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            indices (`Sequence[int]`, *optional*): Row numbers for error messages.

        Raises:
            NotImplementedError: If the task does not mark the positions of its predictions.
        """
        if self.prediction_unit == "row":
            return self.encode(batch, tokenizer, indices, with_labels=False)
        raise NotImplementedError(f"{type(self).__name__} does not mark the positions of its model's predictions.")

    def prepare_public(self, dataset: Dataset, tokenizer: Any) -> Dataset:
        """
        Encode a public dataset for distillation and remove its raw columns.

        Args:
            dataset (`datasets.Dataset`): Raw examples.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        """
        if self.prediction_unit == "row":
            return self.prepare(dataset, tokenizer, with_labels=False)

        def encode(batch: Batch, indices: list[int]) -> dict[str, list[Any]]:
            return self.encode_public(batch, tokenizer, indices)

        return map_rows(dataset, encode, tokenizer, fingerprint(tokenizer, self, "public"))

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        Convert encoded examples to the inputs for evaluation, which are the same in every evaluation.

        Masked language modeling masks tokens. Tasks with candidates create one example per candidate. Summarization
        keeps only the prompts. Other tasks return the examples unchanged.

        Args:
            features (`datasets.Dataset`): The dataset from [`~Task.prepare`].
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            seed (`int`, *optional*, defaults to `0`): Random seed. Only masked language modeling uses it.
        """
        return features

    def load_model(self, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """
        Load the pretrained model with the head and the labels of the task.

        Args:
            name_or_path (`str`): As in `from_pretrained`.
            kwargs (*optional*): Further arguments of `from_pretrained`.
        """
        kwargs = {**self.model_kwargs, **kwargs}
        if self.model_class is AutoModelForCausalLM:
            return self.set_up(load_causal_model(name_or_path, **kwargs))
        return self.set_up(self.model_class.from_pretrained(name_or_path, **kwargs))

    def set_up(self, model: PreTrainedModel) -> PreTrainedModel:
        """
        Apply task settings that are not part of the weights or the config, and return the same model.

        [`~Task.load_model`] calls this method.

        Args:
            model (`PreTrainedModel`): A model loaded in another way, such as a client's part of a split model.
        """
        return model


def first_output(predictions: Any) -> np.ndarray:
    """
    Return the first element of a model output tuple, or the output itself.

    Args:
        predictions (`np.ndarray` or `tuple`): `EvalPrediction.predictions`. The first element contains the logits.
    """
    return predictions[0] if isinstance(predictions, tuple) else predictions
