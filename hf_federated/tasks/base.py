"""What the tasks share: the model with its labels, a data set encoded, and errors that name the row.

A task reads raw columns and knows nothing of a tokenizer until it is given one, so clients whose tokenizers differ
share one task. What it returns is for `transformers.Trainer` as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainingArguments

from ..data import FederatedDataset
from .mapping import fingerprint, map_rows, with_arrays


IGNORED = -100  # what a loss skips
# How many predictions a public row has for everybody, beside its encoding.
NUM_POSITIONS = "num_positions"

Batch = Mapping[str, Sequence[Any]]
ComputeMetrics = Callable[[EvalPrediction], dict[str, float]]


class Task(ABC):
    """
    A task formulation: how raw rows become model inputs, and predictions metrics.

    Those of the package: [`TextClassification`], [`SequenceTagging`], [`QuestionAnswering`], [`Seq2Seq`],
    [`LanguageModeling`] and [`Summarization`]; of SuperGLUE [`SuperGlueClassification`], [`SuperGlueSeq2Seq`] and
    [`SuperGlueCloze`]. Every one of them has:

    - `model_class`: the `AutoModelFor…` that it trains, and `model_kwargs` for its `from_pretrained`;
    - `columns`: the raw columns that it reads, and `one_feature_a_row`: whether their number stays;
    - `encode(batch, tokenizer)`: for `datasets.Dataset.map(batched=True)`;
    - `prepare(dataset, tokenizer)`: a `Dataset` or a [`FederatedDataset`] encoded;
    - `data_collator(tokenizer)`: of `transformers`;
    - `build_compute_metrics(tokenizer, features, rows)`: for `Trainer(compute_metrics=...)`, and `needs_rows`: whether
      it cannot do without `rows`;
    - `preprocess_logits_for_metrics`: for `Trainer`'s argument of that name; `None` where logits stay as they are;
    - `prediction_unit`: what a model's prediction is about, and `encode_public` and `prepare_public`: public rows
      encoded for distillation, with the places of what is predicted;
    - `trainer_class` and `arguments_class`: the trainer that computes the metrics, and its arguments;
    - `main_metric`: the metric that runs are compared by, and `lower_is_better`.
    """

    model_class: ClassVar[Any]
    trainer_class: ClassVar[type[Trainer]] = Trainer
    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    lower_is_better: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = False
    # What one softmax of the model is about: a `"row"`, a `"word"` of it, or a `"token"` of the model's vocabulary;
    # `None` if its predictions are none of these, and cannot be distilled.
    prediction_unit: str | None = "row"
    # Whether a model is given the labels of public rows, which are then text that everybody has.
    labels_are_inputs: ClassVar[bool] = False
    preprocess_logits_for_metrics: Any = None

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads, those with labels too."""

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric that runs are compared by."""

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """Arguments of the model's config that the task decides: its labels."""
        return {}

    @property
    def one_feature_a_row(self) -> bool:
        """Whether each raw row becomes one encoded row, whatever rows stand beside it."""
        return True

    @abstractmethod
    def find_empty(self, batch: Batch) -> list[bool]:
        """
        Which rows [`~Task.encode`] refuses because something in them is missing or nothing but space.

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
        Turns raw rows into model inputs.

        Args:
            batch (`Mapping[str, Sequence]`): Raw columns, as `datasets.Dataset.map(batched=True)` gives them.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            indices (`Sequence[int]`, *optional*): The rows' numbers, which errors name. Positions in the batch if not
                given.
            with_labels (`bool`, *optional*, defaults to `True`): Whether labels are read. Rows without any can be
                predicted.
        """

    @abstractmethod
    def data_collator(self, tokenizer: Any, model: PreTrainedModel | None = None) -> Any:
        """
        The collator of `transformers` that pads encoded rows to the longest of a batch.

        Args:
            tokenizer (`PreTrainedTokenizerFast`): What the rows were encoded with.
            model (`PreTrainedModel`, *optional*): The model, which [`Seq2Seq`] asks for its decoder's inputs.
        """

    @abstractmethod
    def build_compute_metrics(
        self, tokenizer: Any, features: Dataset | None = None, rows: Dataset | None = None
    ) -> ComputeMetrics:
        """
        The `compute_metrics` of a `Trainer`.

        Args:
            tokenizer (`PreTrainedTokenizerFast`): What the rows were encoded with.
            features (`Dataset`, *optional*): The encoded evaluation data set; [`QuestionAnswering`] and
                [`SuperGlueCloze`] need it.
            rows (`Dataset`, *optional*): The raw evaluation data set; tasks with `needs_rows` need it.
        """

    def prepare(self, dataset: Any, tokenizer: Any, with_labels: bool = True, **kwargs: Any) -> Any:
        """
        A data set encoded, without its raw columns.

        Args:
            dataset (`datasets.Dataset` or [`FederatedDataset`]): Raw rows, of which each client keeps its own.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            with_labels (`bool`, *optional*, defaults to `True`): Whether labels are read.
            kwargs (*optional*): Passed on to `map`.

        Returns:
            The same kind of data set, of encoded rows.

        Raises:
            ValueError: If a row cannot be used, or nothing is left of a client's. The message has the row's number; it
                names the client where clients are encoded one after the other. `kwargs` may not name one cache file
                for them all.
        """

        def encode(batch: Batch, indices: list[int]) -> dict[str, list[Any]]:
            return self.encode(batch, tokenizer, indices, with_labels)

        settings = fingerprint(tokenizer, self, with_labels, kwargs)
        encode_as_arrays = with_arrays(encode, tokenizer.model_input_names)
        if isinstance(dataset, Dataset):
            return map_rows(dataset, encode_as_arrays, settings, **kwargs)
        if not isinstance(dataset, FederatedDataset):  # an `IterableDataset`, whose rows go to a collator as they are
            return map_rows(dataset, encode, settings, **kwargs)
        if self.one_feature_a_row and dataset.source is not None:
            # A source that was cut is encoded once, not client by client.
            return map_rows(dataset, encode_as_arrays, settings, **kwargs)
        if shared := {"cache_file_name", "new_fingerprint"} & kwargs.keys():  # clients would get each other's rows
            raise ValueError(f"{sorted(shared)} is for one data set, and each client has its own here. Leave it out.")
        prepared = {}
        for client_id, rows in dataset.items():
            encode_client = encode_as_arrays if isinstance(rows, Dataset) else encode
            try:
                prepared[client_id] = map_rows(rows, encode_client, settings, **kwargs)
            except ValueError as error:
                raise ValueError(f"Client {client_id!r}: {error}") from error
            if isinstance(rows, Dataset) and len(prepared[client_id]) == 0:
                raise ValueError(
                    f"Client {client_id!r} has {len(rows)} rows of which the tokenizer keeps nothing. Leave it out"
                    " with select_clients, or take a tokenizer that knows its texts."
                )
        clients = FederatedDataset.from_dict(prepared)
        clients.partitioning, clients.origin = dataset.partitioning, dataset.origin
        return clients

    def encode_public(
        self, batch: Batch, tokenizer: Any, indices: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """
        Turns raw public rows into model inputs whose places of prediction are known.

        Where `prediction_unit` is `"row"` that is [`~Task.encode`] without labels. Otherwise there are two columns
        more: `labels`, −100 but at the places of the model's predictions, and `num_positions`, how many of these the
        row has for whoever encodes it, whether this tokenizer keeps them or not.

        Args:
            batch (`Mapping[str, Sequence]`): Raw columns.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            indices (`Sequence[int]`, *optional*): The rows' numbers, which errors name.

        Raises:
            NotImplementedError: If the task has units that it does not mark.
        """
        if self.prediction_unit == "row":
            return self.encode(batch, tokenizer, indices, with_labels=False)
        raise NotImplementedError(f"{type(self).__name__} does not say where in a row its model predicts.")

    def prepare_public(self, dataset: Dataset, tokenizer: Any) -> Dataset:
        """
        A public data set encoded for distillation, without its raw columns.

        Args:
            dataset (`datasets.Dataset`): Raw rows.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        """
        if self.prediction_unit == "row":
            return self.prepare(dataset, tokenizer, with_labels=False)

        def encode(batch: Batch, indices: list[int]) -> dict[str, list[Any]]:
            return self.encode_public(batch, tokenizer, indices)

        encode_as_arrays = with_arrays(encode, tokenizer.model_input_names)
        return map_rows(dataset, encode_as_arrays, fingerprint(tokenizer, self, "public"))

    def for_evaluation(self, features: Dataset, tokenizer: Any, seed: int = 0) -> Dataset:
        """
        Encoded rows as they are evaluated, which is the same in every evaluation: with tokens masked (language
        modelling), for each candidate (cloze questions), as prompts (summaries); of other tasks as they are.

        Args:
            features (`datasets.Dataset`): What [`~Task.prepare`] returned.
            tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
            seed (`int`, *optional*, defaults to `0`): Seed of what a task draws; only masked language modelling does.
        """
        return features

    def load_model(self, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """
        The pretrained model with the head and the labels of the task.

        Args:
            name_or_path (`str`): As in `from_pretrained`.
            kwargs (*optional*): Further arguments of `from_pretrained`.
        """
        return self.set_up(self.model_class.from_pretrained(name_or_path, **self.model_kwargs, **kwargs))

    def set_up(self, model: PreTrainedModel) -> PreTrainedModel:
        """
        The same model, with what the task decides of it beside weights and config. [`~Task.load_model`] has done it.

        Args:
            model (`PreTrainedModel`): One that was loaded otherwise, such as a client's part of a split model.
        """
        return model


def label_maps(names: Sequence[str]) -> dict[str, Any]:
    """
    The labels as a model's config holds them.

    Args:
        names (`Sequence[str]`): Names by number.
    """
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def check_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """
    Names of labels as a tuple.

    Args:
        argument (`str`): What the caller names them.
        names (`Sequence[str]`): Names by number.

    Raises:
        ValueError: If there are none, or two are equal.
        TypeError: If they are a single string, or not strings.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`{argument}` is {names!r}; give a list of strings, the labels' names by number.")
    if len(names) == 0 or len(set(names)) < len(names):
        raise ValueError(f"`{argument}` is {list(names)!r}; give at least one name, and each once.")
    return tuple(names)


def check_length(argument: str, length: int | None, least: int = 1) -> None:
    """
    Checks a number of tokens.

    Args:
        argument (`str`): What the caller names it.
        length (`int`, *optional*): The number; `None` leaves it open.
        least (`int`, *optional*, defaults to `1`): The smallest that is allowed.

    Raises:
        ValueError: If it is smaller.
    """
    if length is not None and length < least:
        raise ValueError(f"`{argument}` is {length}; it must be at least {least}.")


def row_name(position: int, indices: Sequence[int] | None) -> str:
    """
    How errors name a row.

    Args:
        position (`int`): Its position in the batch.
        indices (`Sequence[int]`, *optional*): The numbers of the batch's rows.
    """
    return f"Row {position} of the batch" if indices is None else f"Row {indices[position]}"


def read_column(batch: Batch, column: str) -> Sequence[Any]:
    """
    A column of a batch.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): Its name.

    Raises:
        ValueError: If there is none of that name. The message lists those there are.
    """
    if column not in batch:
        raise ValueError(
            f"There is no column {column!r}; the columns are {', '.join(map(repr, batch))}. Name the column in the"
            " task, or encode with `with_labels=False` if it holds labels that the rows lack."
        )
    return batch[column]


def is_blank(text: Any) -> bool:
    """Whether a value is no text, or one of nothing but space."""
    return not isinstance(text, str) or not text.strip()


def read_texts(batch: Batch, column: str, indices: Sequence[int] | None) -> list[str]:
    """
    A column of texts, none of them empty.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): The name of the column.
        indices (`Sequence[int]`, *optional*): The rows' numbers.

    Raises:
        ValueError: If a text is missing, empty, or nothing but space. The message names the row.
    """
    texts = list(read_column(batch, column))
    for position, text in enumerate(texts):
        if is_blank(text):
            found = "an empty text" if isinstance(text, str) else f"{text!r} instead of a text"
            raise ValueError(f"{row_name(position, indices)} has {found} in the column {column!r}. Drop such rows.")
    return texts


def first_output(predictions: Any) -> np.ndarray:
    """
    The logits of what a `Trainer` predicted, for models that return more than logits.

    Args:
        predictions (`np.ndarray` or `tuple`): `EvalPrediction.predictions`.
    """
    return predictions[0] if isinstance(predictions, tuple) else predictions
