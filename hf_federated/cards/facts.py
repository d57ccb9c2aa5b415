"""Recorded names, revisions and counts of a model and of datasets. Nothing is guessed.

Local directories are never named, because a path describes a machine and not the model.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import peft
from datasets import Dataset
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from transformers.modelcard import TASK_MAPPING
from transformers.pipelines import SUPPORTED_TASKS

from .._compat import commit_hash, dataset_fingerprint
from ..data import FederatedDataset
from ..data.torch_datasets import is_torch_dataset
from ..split import SplitModel
from ..utils.printable import printable


# A dataset that was loaded from the Hub lists its files as hf://datasets/<repository>@<commit>/<path>.
HUB_FILE = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<revision>[0-9a-f]{40})/")

# Largest number of named labels, and longest name of a label.
MAX_LABELS = 100
MAX_LABEL = 80


@dataclass(frozen=True)
class ModelFacts:
    """
    Recorded facts about the trained model.

    Args:
        class_name (`str`):
            Class of the model, or of the base model if the model is an adapter.
        is_transformers_class (`bool`):
            Whether the class is part of `transformers`.
        library_name (`str`):
            `"transformers"`, or `"peft"` for an adapter.
        base_model (`str`, *optional*):
            Hub id of the initial weights.
        base_revision (`str`, *optional*):
            Commit of the base model.
        start (`str`):
            Source of the initial weights: `"hub"`, `"local"` (a directory) or `"unnamed"`.
        adapter (`str`, *optional*):
            PEFT type of the adapter.
        task (`str`, *optional*):
            Pipeline tag of the class.
        num_parameters (`int`):
            Number of parameters of the full model.
        peft_version (`str`, *optional*):
            Version of PEFT that saved the adapter.
        tags (`list[str]`):
            Tags that a trainer or a user added to the model with `add_model_tags`.
        labels (`list[str]`):
            Names of the labels of a classifier, at most `MAX_LABELS`. Empty if the labels have no names.
        num_labels (`int`, *optional*):
            Number of labels of a classifier.
        pipeline (`str`, *optional*):
            Task of `transformers.pipeline` that runs the model, if its tokenizer or processor is saved with it.
    """

    class_name: str
    is_transformers_class: bool
    library_name: str
    base_model: str | None
    base_revision: str | None
    start: str
    adapter: str | None
    task: str | None
    num_parameters: int
    peft_version: str | None = None
    tags: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    num_labels: int | None = None
    pipeline: str | None = None

    @classmethod
    def from_model(cls, model: Any, finetuned_from: str | None = None, processing_class: Any = None) -> ModelFacts:
        """
        Read the facts from a model.

        Args:
            model (`PreTrainedModel`, `PeftModel` or [`SplitModel`]):
                The trained model.
            finetuned_from (`str`, *optional*):
                Hub id of the base model. Overrides the id in the model's configuration. A local directory is ignored.
            processing_class (`Any`, *optional*):
                The tokenizer or processor that is saved with the model.
        """
        base, peft_config = model, None
        if isinstance(model, PeftModel):
            base, peft_config = model.get_base_model(), model.peft_config[model.active_adapters[0]]
        elif isinstance(model, SplitModel):
            # Each part has the class of the full model.
            base, peft_config = model.client_head.model, model.adapter_config
        adapter = None if peft_config is None else peft_config.peft_type.value
        name = (peft_config and peft_config.base_model_name_or_path) or base.config.name_or_path
        class_name = type(base).__name__
        base_model = next((each for each in (finetuned_from, name) if each and is_hub_id(each)), None)
        task = next((task for task, mapping in TASK_MAPPING.items() if class_name in mapping.values()), None)
        has_pipeline = task in SUPPORTED_TASKS and processing_class is not None
        is_classifier = task is not None and task.endswith("-classification")
        return cls(
            class_name=class_name,
            is_transformers_class=type(base).__module__.startswith("transformers."),
            library_name="peft" if adapter else "transformers",
            base_model=base_model,
            # `transformers` stores the commit of a Hub model in this private attribute; there is no public one
            base_revision=commit_hash(base.config) if base_model == name else None,
            start="hub" if base_model else "local" if name else "unnamed",
            adapter=adapter,
            task=task,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            peft_version=peft.__version__ if adapter else None,
            tags=list(getattr(base, "model_tags", None) or []),
            labels=_label_names(base.config) if is_classifier else [],
            num_labels=base.config.num_labels if is_classifier else None,
            pipeline=task if has_pipeline else None,
        )


def _label_names(config: Any) -> list[str]:
    """Return the names of the labels in the order of their ids, or nothing if transformers generated them."""
    names = [printable(config.id2label[number], MAX_LABEL) for number in sorted(config.id2label)[:MAX_LABELS]]
    return [] if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


@dataclass(frozen=True)
class DataFacts:
    """
    Recorded facts about a dataset.

    Args:
        name (`str`, *optional*):
            Hub id that the dataset records or that the caller passes.
        revision (`str`, *optional*):
            Commit of the Hub repository.
        config (`str`, *optional*):
            Name of the configuration.
        split (`str`, *optional*):
            Name of the split.
        fingerprint (`str`, *optional*):
            Fingerprint that `datasets` computed after all transforms.
        num_rows (`int`, *optional*):
            Number of examples. `None` for streams.
        num_clients (`int`, *optional*):
            Number of clients. `None` for data that is not federated.
        rows_per_client (`list[float]`, *optional*):
            Minimum, median and maximum number of examples per client.
        partitioning (`dict[str, Any]`, *optional*):
            Name and arguments of the partitioner.
        num_dropped (`int`, *optional*):
            Number of examples that the trainer dropped, for example examples that are too long for `max_length`.
    """

    name: str | None = None
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    fingerprint: str | None = None
    num_rows: int | None = None
    num_clients: int | None = None
    rows_per_client: list[float] | None = None
    partitioning: dict[str, Any] | None = None
    num_dropped: int | None = None

    @classmethod
    def from_data(cls, data: Any, name: str | None = None) -> DataFacts:
        """
        Read the facts from a dataset.

        Args:
            data (`FederatedDataset`, `datasets.Dataset` or a mapping of names to either):
                The dataset.
            name (`str`, *optional*):
                Hub id. Overrides the id that the dataset records.
        """
        if isinstance(data, FederatedDataset):
            return cls._from_clients(data, name)
        if isinstance(data, Dataset):
            return cls(**_recorded_source(data, name), fingerprint=dataset_fingerprint(data), num_rows=len(data))
        if isinstance(data, Mapping):
            parts = [cls.from_data(part, name) for part in data.values()]
            counts = [part.num_rows for part in parts if part.num_rows is not None]
            return cls(name=name, num_rows=sum(counts) if len(counts) == len(parts) else None)
        return cls(name=name)

    @classmethod
    def _from_clients(cls, clients: FederatedDataset, name: str | None) -> DataFacts:
        counts = [count for count in clients.num_rows.values() if count is not None]
        known = len(counts) == len(clients)
        recorded: dict[str, Any] = {"name": name}
        if not clients.is_remote:  # Otherwise only the clients have the examples.
            dataset = clients.source if clients.source is not None else clients[clients.client_ids[0]]
            if not is_torch_dataset(dataset):
                recorded = _recorded_source(dataset, name)
        return cls(
            **recorded,
            fingerprint=dataset_fingerprint(clients.source) if clients.source is not None else None,
            num_rows=sum(counts) if known else None,
            num_clients=len(clients),
            rows_per_client=[min(counts), statistics.median(counts), max(counts)] if known else None,
            partitioning=clients.partitioning,
        )


def _recorded_source(data: Any, name: str | None) -> dict[str, Any]:
    """Return the name, revision, configuration and split that the dataset records."""
    files = data.info.download_checksums or {}
    matches = {(match["name"], match["revision"]) for match in map(HUB_FILE.match, files) if match}
    hub_name, revision = matches.pop() if len(matches) == 1 else (None, None)
    return {
        "name": name or hub_name,
        "revision": revision if name in (None, hub_name) else None,
        "config": data.info.config_name if hub_name else None,
        "split": None if data.split is None else str(data.split),
    }


def is_hub_id(name: str) -> bool:
    """Whether a name can be the id of a repository on the Hub and is not a local directory."""
    if os.path.isdir(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
