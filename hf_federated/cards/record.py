"""What the records of all kinds of runs hold: names, model, data, arguments, results, versions; how they are saved.

A record is taken from a trainer once. A card is a function of the record alone, so that a saved record renders to the
same text on any machine. It holds no rows of any data set and no paths.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .facts import DataFacts, ModelFacts
from .logged import LoggedRun, final_results, of_final_weights, plain


# Arguments that change what is learned; everything else of TrainingArguments changes where and how fast.
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
    """What every card reads of a trainer."""

    model: Any
    clients: Any
    eval_dataset: Any


@dataclass(frozen=True)
class CardArguments:
    """
    What a caller says of a model: the arguments of `Trainer.create_model_card`, in their order.

    Args:
        language (`str` or `list[str]`, *optional*): Language of the model.
        license (`str`, *optional*): License of the model.
        tags (`str` or `list[str]`, *optional*): Tags beside those of every such run.
        model_name (`str`, *optional*): Title of the card. Defaults to the name of the output directory.
        finetuned_from (`str`, *optional*): Hub id of the base model. Defaults to what the model knows; a local
            directory is not named.
        tasks (`str` or `list[str]`, *optional*): Pipeline tags. Defaults to that of the model's class.
        dataset_tags (`str` or `list[str]`, *optional*): Hub ids of the data. Defaults to what the data set knows.
        dataset (`str` or `list[str]`, *optional*): Names of the data as people say them.
        dataset_args (`str` or `list[str]`, *optional*): Arguments with which the data was loaded.
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


@dataclass(frozen=True)
class CardRecord:
    """
    What the record of every run has.

    Args:
        title (`str`): Name of the model.
        metadata (`dict[str, Any]`): What the caller says for the card's header: `language`, `license`, `tags`,
            `tasks`, `dataset_tags`, `dataset`, `dataset_args`.
        model (`ModelFacts`): The model.
        train_data (`DataFacts`): The clients' data.
        eval_data (`DataFacts`, *optional*): The data of the global evaluation.
        arguments (`dict[str, Any]`): Training arguments that change what is learned.
        results (`dict[str, Any]`): The metrics of the weights that the run ended with, and their step.
        versions (`dict[str, str]`): Package to version.
    """

    title: str
    metadata: dict[str, Any]
    model: ModelFacts
    train_data: DataFacts
    eval_data: DataFacts | None
    arguments: dict[str, Any]
    results: dict[str, Any]
    versions: dict[str, str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls: type[Record], path: str | os.PathLike[str]) -> Record:
        """Reads what [`~RunRecord.save`] wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls: type[Record], values: dict[str, Any]) -> Record:
        """The record of the values that were saved."""
        data = {name: DataFacts(**value) for name, value in values.items() if name.endswith("_data") and value}
        return cls(**{**values, **data, "model": ModelFacts(**values["model"])})


def common_fields(trainer: CardRun, eval_data: Any, step_name: str, said: CardArguments) -> dict[str, Any]:
    """
    The fields of [`CardRecord`].

    Args:
        trainer (`CardRun`): The run.
        eval_data (`Any`, *optional*): What it evaluates on.
        step_name (`str`): What the record calls a step of the trainer.
        said ([`CardArguments`]): What the caller says.
    """
    dataset_name = next(iter(_as_list(said.dataset_tags)), None)
    lists = ("tags", "tasks", "dataset_tags", "dataset", "dataset_args")
    return {
        "title": said.model_name or Path(trainer.run_args.output_dir).name or type(trainer.model).__name__,
        "metadata": {
            "language": said.language,
            "license": said.license,
            **{name: _as_list(getattr(said, name)) for name in lists},
        },
        "model": ModelFacts.of(trainer.model, said.finetuned_from),
        "train_data": DataFacts.of(trainer.clients, dataset_name),
        "eval_data": None if eval_data is None else DataFacts.of(eval_data, dataset_name),
        "arguments": {name: plain(getattr(trainer.run_args, name)) for name in ARGUMENTS},
        "results": final_results(trainer, of_final_weights(trainer), step_name),
        "versions": _versions(),
    }


def _as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "not installed"
    return versions
