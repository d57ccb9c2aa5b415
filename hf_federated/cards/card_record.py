"""Base class of the records that model cards are rendered from.

A record is read from a trainer once. A card is a function of the record alone, so a saved record renders to the same
text on any machine. A record contains no dataset examples and no paths.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..utils.untrusted_json import read_json
from .comparison_text import comparison_facts
from .facts import DataFacts, ModelFacts, is_hub_id
from .log_history import LoggedRun, final_results, final_weight_logs, to_json_value


# Training arguments that influence the trained weights. The other arguments influence only where and how fast the run
# is executed.
ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "bf16",
    "fp16",
    "seed",
    "data_seed",
)

PACKAGES = ("hf-federated", "transformers", "torch", "accelerate", "datasets", "peft")

Record = TypeVar("Record", bound="CardRecord")


class CardRun(LoggedRun, Protocol):
    """Trainer attributes that all cards read."""

    model: Any
    clients: Any
    eval_dataset: Any
    processing_class: Any
    card_comparison: Mapping[str, Any] | None


@dataclass(frozen=True)
class CardArguments:
    """
    Arguments of `Trainer.create_model_card`, in the same order, and `dataset_name` of the trainers of TRL.

    Args:
        language (`str` or `list[str]`, *optional*):
            Language of the model.
        license (`str`, *optional*):
            License of the model.
        tags (`str` or `list[str]`, *optional*):
            Tags in addition to those of all runs of the same kind.
        model_name (`str`, *optional*):
            Title of the card. Defaults to the name of the output directory.
        finetuned_from (`str`, *optional*):
            Hub id of the base model. Defaults to the id in the model's configuration. Local directories are not named.
        tasks (`str` or `list[str]`, *optional*):
            Pipeline tags. Defaults to the tag of the model's class.
        dataset_tags (`str` or `list[str]`, *optional*):
            Hub ids of the datasets. Defaults to the ids that the datasets record.
        dataset (`str` or `list[str]`, *optional*):
            Display names of the datasets.
        dataset_args (`str` or `list[str]`, *optional*):
            Arguments that were used to load the datasets.
        dataset_name (`str`, *optional*):
            Hub id of the dataset, if `dataset_tags` is not set. Local directories are not named.
    """

    language: str | list[str] | None = None
    license: str | None = None
    tags: str | list[str] | None = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: str | list[str] | None = None
    dataset_tags: str | list[str] | None = None
    dataset: str | list[str] | None = None
    dataset_args: str | list[str] | None = None
    dataset_name: str | None = None

    @property
    def hub_datasets(self) -> list[str]:
        """The Hub ids of the datasets."""
        if self.dataset_tags is not None or self.dataset_name is None:
            return _as_list(self.dataset_tags)
        return [self.dataset_name] if is_hub_id(self.dataset_name) else []


@dataclass(frozen=True)
class CardRecord:
    """
    Fields that the records of all runs have in common.

    Args:
        title (`str`):
            Name of the model.
        metadata (`dict[str, Any]`):
            Values that the caller passed for the header of the card: `language`, `license`, `tags`, `tasks`,
            `dataset_tags`, `dataset`, `dataset_args`.
        model (`ModelFacts`):
            The model.
        train_data (`DataFacts`):
            The clients' data.
        eval_data (`DataFacts`, *optional*):
            The data of the global evaluation.
        arguments (`dict[str, Any]`):
            Training arguments that influence the trained weights.
        results (`dict[str, Any]`):
            The metrics of the final weights of the run, and their step.
        versions (`dict[str, str]`):
            Version of each package.
        comparison (`dict[str, Any]`, *optional*):
            The results of the baselines, see [`~hf_federated.cards.comparison_text.comparison_facts`].
    """

    title: str
    metadata: dict[str, Any]
    model: ModelFacts
    train_data: DataFacts
    eval_data: DataFacts | None
    arguments: dict[str, Any]
    results: dict[str, Any]
    versions: dict[str, str]
    comparison: dict[str, Any] | None = field(default=None, kw_only=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the record as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls: type[Record], path: str | os.PathLike[str]) -> Record:
        """
        Load a record that [`~CardRecord.save`] wrote.

        Raises:
            ValueError: If the file does not contain a record. The message names the file.
        """
        with record_errors(path):
            return cls.from_dict(read_json(path))

    @classmethod
    def from_dict(cls: type[Record], values: dict[str, Any]) -> Record:
        """Create a record from saved values."""
        data = {name: DataFacts(**value) for name, value in values.items() if name.endswith("_data") and value}
        return cls(**{**values, **data, "model": ModelFacts(**values["model"])})


@contextmanager
def record_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the errors for a damaged record into a `ValueError` that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, KeyError, IndexError, RecursionError, TypeError, ValueError) as error:
        reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{os.fspath(path)!r} is not the record of a run: {reason}. Pass a file that `CardRecord.save` wrote."
        ) from error


def common_fields(trainer: CardRun, eval_data: Any, step_name: str, card_arguments: CardArguments) -> dict[str, Any]:
    """
    Return the fields of [`CardRecord`].

    Args:
        trainer (`CardRun`):
            The run.
        eval_data (`Any`, *optional*):
            The evaluation data.
        step_name (`str`):
            Key of the trainer's step in the record, such as `"round"`.
        card_arguments ([`CardArguments`]):
            The arguments of the caller.
    """
    dataset_name = next(iter(card_arguments.hub_datasets), None)
    lists = ("tags", "tasks", "dataset", "dataset_args")
    return {
        "title": card_arguments.model_name or Path(trainer.run_args.output_dir).name or type(trainer.model).__name__,
        "metadata": {
            "language": card_arguments.language,
            "license": card_arguments.license,
            "dataset_tags": card_arguments.hub_datasets,
            **{name: _as_list(getattr(card_arguments, name)) for name in lists},
        },
        "model": ModelFacts.from_model(trainer.model, card_arguments.finetuned_from, trainer.processing_class),
        "train_data": DataFacts.from_data(trainer.clients, dataset_name),
        "eval_data": None if eval_data is None else DataFacts.from_data(eval_data, dataset_name),
        "arguments": {name: to_json_value(getattr(trainer.run_args, name)) for name in ARGUMENTS},
        "results": final_results(trainer, final_weight_logs(trainer), step_name),
        "versions": _versions(),
        "comparison": comparison_facts(trainer.card_comparison),
    }


def _as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            versions[package] = "not installed"
    return versions
