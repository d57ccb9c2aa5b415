"""What is known of a model and of data: names, revisions and counts, and nothing that has to be guessed.

A local directory is never named: its path says something about a machine, not about the model.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from transformers.modelcard import TASK_MAPPING

from ..data import FederatedDataset
from ..split import SplitModel


# A data set read from the Hub lists its files as hf://datasets/<repository>@<commit>/<path>.
HUB_FILE = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<revision>[0-9a-f]{40})/")


@dataclass(frozen=True)
class ModelFacts:
    """
    What is known of the trained model.

    Args:
        class_name (`str`): Class of the model; of the base model, if it carries an adapter.
        is_transformers_class (`bool`): Whether `transformers` has that class.
        library_name (`str`): `"transformers"`, or `"peft"` for an adapter.
        base_model (`str`, *optional*): Hub id that training started from.
        base_revision (`str`, *optional*): Commit of the base model.
        start (`str`): Where the starting weights came from: `"hub"`, `"local"` (a directory) or `"unnamed"`.
        adapter (`str`, *optional*): PEFT's name of the kind of adapter.
        task (`str`, *optional*): Pipeline tag of the class.
        num_parameters (`int`): Parameters of the whole model.
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

    @classmethod
    def of(cls, model: Any, finetuned_from: str | None = None) -> ModelFacts:
        """
        Args:
            model (`PreTrainedModel`, `PeftModel` or [`SplitModel`]): The trained model.
            finetuned_from (`str`, *optional*): Hub id of the base model, where the model itself does not know it.
        """
        base, peft_config = model, None
        if isinstance(model, PeftModel):
            base, peft_config = model.get_base_model(), model.peft_config[model.active_adapters[0]]
        elif isinstance(model, SplitModel):
            # Each part is a model of the whole one's class.
            base, peft_config = model.client_head.model, model.adapter_config
        adapter = None if peft_config is None else peft_config.peft_type.value
        name = (peft_config and peft_config.base_model_name_or_path) or base.config.name_or_path
        class_name = type(base).__name__
        base_model = finetuned_from or (name if name and _is_hub_id(name) else None)
        return cls(
            class_name=class_name,
            is_transformers_class=type(base).__module__.startswith("transformers."),
            library_name="peft" if adapter else "transformers",
            base_model=base_model,
            # transformers leaves the commit here when it loads from the Hub; there is no public name for it
            base_revision=vars(base.config).get("_commit_hash") if base_model == name else None,
            start="hub" if base_model else "local" if name else "unnamed",
            adapter=adapter,
            task=next((task for task, mapping in TASK_MAPPING.items() if class_name in mapping.values()), None),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        )


@dataclass(frozen=True)
class DataFacts:
    """
    What is known of a data set.

    Args:
        name (`str`, *optional*): Hub id, where the data set knows it or the caller says so.
        revision (`str`, *optional*): Commit of the Hub repository.
        config (`str`, *optional*): Name of its configuration.
        split (`str`, *optional*): Name of its split.
        fingerprint (`str`, *optional*): Fingerprint that `datasets` gave the rows after all that was done to them.
        num_rows (`int`, *optional*): Number of rows; `None` for streams.
        num_clients (`int`, *optional*): Number of clients; `None` for data that is not federated.
        rows_per_client (`list[float]`, *optional*): Least, median and most rows of a client.
        partitioning (`dict[str, Any]`, *optional*): How the rows were given to clients.
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

    @classmethod
    def of(cls, data: Any, name: str | None = None) -> DataFacts:
        """
        Args:
            data (`FederatedDataset`, `datasets.Dataset` or a mapping of names to either): The rows.
            name (`str`, *optional*): Hub id, where the data set itself does not know it.
        """
        if isinstance(data, FederatedDataset):
            return cls._of_clients(data, name)
        if isinstance(data, Dataset):
            return cls(**_origin(data, name), fingerprint=data._fingerprint, num_rows=len(data))
        if isinstance(data, Mapping):
            parts = [cls.of(part, name) for part in data.values()]
            counts = [part.num_rows for part in parts if part.num_rows is not None]
            return cls(name=name, num_rows=sum(counts) if len(counts) == len(parts) else None)
        return cls(name=name)

    @classmethod
    def _of_clients(cls, clients: FederatedDataset, name: str | None) -> DataFacts:
        counts = [count for count in clients.num_rows.values() if count is not None]
        known = len(counts) == len(clients)
        example = clients.source if clients.source is not None else clients[clients.client_ids[0]]
        return cls(
            **_origin(example, name),
            fingerprint=clients.source._fingerprint if clients.source is not None else None,
            num_rows=sum(counts) if known else None,
            num_clients=len(clients),
            rows_per_client=[min(counts), statistics.median(counts), max(counts)] if known else None,
            partitioning=clients.partitioning,
        )


def _origin(data: Any, name: str | None) -> dict[str, Any]:
    """Name, revision, configuration and split, as far as the data set was read from the Hub or carries them."""
    files = data.info.download_checksums or {}
    matches = {(match["name"], match["revision"]) for match in map(HUB_FILE.match, files) if match}
    hub_name, revision = matches.pop() if len(matches) == 1 else (None, None)
    split = None if data.split is None else str(data.split)
    if name is not None and name != hub_name:
        revision = None
    return {
        "name": name or hub_name,
        "revision": revision,
        "config": data.info.config_name if hub_name else None,
        "split": split,
    }


def _is_hub_id(name: str) -> bool:
    if os.path.isdir(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
