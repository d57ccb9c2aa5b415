"""Compare the setup of all processes of a launch before training.

Every process runs the same script, but the setup can still differ: a dataset may be shuffled without a seed, or an
argument may depend on the machine. Each process describes its setup as lines of text, and the processes compare their
descriptions. A description omits settings that may differ between machines (devices, output directories, logging). It
also omits settings that could be secret, because the error message shows the values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import TrainingArguments

from .._compat import dataset_fingerprint
from ..data import FederatedDataset
from ..distributed.ranks import format_ranks, group_ranks_by_value


if TYPE_CHECKING:
    from .setup import FederationSetup


# Training arguments that do not change the result: devices, directories, logging and uploads.
MAY_DIFFER = re.compile(
    r"output_dir|logging_(dir|strategy|steps|first_step)|log_\w+|disable_tqdm|report_to|run_name|project|trackio_\w+"
    r"|push_to_hub\w*|hub_\w+|local_rank|use_cpu|ddp_(backend|timeout)|debug|skip_memory_metrics|do_(train|eval|predict)"
    r"|resume_from_checkpoint|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor|multiprocessing_\w+)"
)
# Names of settings that may be secret.
SECRET = re.compile(r"(^|_)(api_?key|auth|credentials?|keys?|passwords?|secrets?|token)($|_)", re.IGNORECASE)
# Number of differences in an error message.
MAX_DIFFERENCES = 10
# Number of characters of a value in an error message.
MAX_CHARACTERS = 80
# Number of examples that are read at a time.
READ_SIZE = 1000


class DisagreementError(ValueError):
    """The processes of a launch are set up differently. The message names each setting and its values."""


def describe_setup(
    setup: FederationSetup,
    args: TrainingArguments,
    datasets: Mapping[str, FederatedDataset],
    checkpoint: str | None = None,
) -> dict[str, str]:
    """
    Describe the setup of this process.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer. The description contains the names, shapes and
            dtypes of the tensors of the model, but no values.
        args (`TrainingArguments`): The user's training arguments.
        datasets (`Mapping[str, FederatedDataset]`): Datasets by their name in an error message.
        checkpoint (`str`, *optional*): Path of the checkpoint to resume from. The description contains its name.

    Returns:
        `dict[str, str]`: Settings as text, by their name in an error message.
    """
    arguments = {name: value for name, value in _fields(args).items() if not MAY_DIFFER.fullmatch(name)}
    lines = {f"FederatedConfig.{name}": text for name, text in _setting_texts(setup.config.to_dict())}
    lines |= {f"{type(args).__name__}.{name}": text for name, text in _setting_texts(arguments)}
    for kind, method in (("aggregation", setup.aggregation), ("distillation", setup.distillation)):
        lines[kind] = type(method).__name__
        if method is not None:
            lines |= {f"{kind}.{name}": text for name, text in _setting_texts(method.settings())}
    lines["postprocessors"] = repr([type(postprocessor).__name__ for postprocessor in setup.postprocessors])
    lines["checkpoint to resume from"] = repr(checkpoint and Path(checkpoint).name)
    model = setup.trainer.model
    values = [*model.named_parameters(), *model.named_buffers()]
    layout = _digest(f"{name} {value.dtype} {list(value.shape)} {value.requires_grad}" for name, value in values)
    lines["model"] = f"{type(model).__name__} of {len(values)} tensors ({layout})"
    for name, dataset in datasets.items():
        ids, num_examples = list(dataset), dataset.num_rows
        lines[f"ids of the {name}"] = f"{shortened(', '.join(ids))} ({len(ids)}, {_digest(ids)})"
        total = sum(number or 0 for number in num_examples.values())
        digest = _digest(str(num_examples[client_id]) for client_id in ids)
        lines[f"number of examples of the {name}"] = f"{total} ({digest})"
    return lines


def check_consistency(setup: FederationSetup, label: str, args: TrainingArguments, checkpoint: str | None) -> None:
    """
    Compare the setup and the examples of all processes of the launch. All processes must call this function.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        label (`str`): Name of this step, for errors.
        args (`TrainingArguments`): The user's training arguments.
        checkpoint (`str`, *optional*): The checkpoint to resume from.

    Raises:
        DisagreementError: In all processes, if the setup of two processes differs.
    """
    if not setup.is_spread:
        return
    datasets = {"clients": setup.clients}
    if setup.eval_clients is not None:
        datasets["evaluation clients"] = setup.eval_clients
    for argument in ("public_dataset", "server_dataset"):
        if (dataset := getattr(setup.participants, argument)) is not None:
            datasets[f"`{argument}`"] = FederatedDataset.from_dict({argument: dataset})
    by_line = {f"examples of the {name}": dataset for name, dataset in datasets.items()}
    fingerprints = {line: _fingerprint(dataset) for line, dataset in by_line.items()}
    description = describe_setup(setup, args, datasets, checkpoint)
    differences = _find_differences(setup.processes.gather(label, {**description, **fingerprints}))
    if differences and differences.keys() <= by_line.keys():
        # `datasets` draws a random fingerprint if it cannot hash a function. The examples then decide.
        contents = {line: _content_digest(by_line[line]) for line in differences}
        differences = _find_differences(setup.processes.gather(f"{label}, comparing examples", contents))
    if differences:
        lines = [f"  {name}: {values}" for name, values in differences.items()]
        if len(lines) > MAX_DIFFERENCES:
            lines[MAX_DIFFERENCES:] = [f"  and {len(lines) - MAX_DIFFERENCES} more"]
        raise DisagreementError(
            "The processes of this launch are set up differently:\n"
            + "\n".join(lines)
            + "\nPass the same arguments and the same data to all processes, shuffled and split with the same seeds."
        )


def _find_differences(descriptions: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Map each setting that differs between processes to its values and the processes with each value."""
    differences = {}
    for name in dict.fromkeys(name for description in descriptions for name in description):
        values = group_ranks_by_value([description.get(name, "absent") for description in descriptions])
        if len(values) > 1:
            differences[name] = "; ".join(f"{text} in {format_ranks(ranks)}" for text, ranks in values.items())
    return differences


# ---- Values as text


def _fields(values: Any) -> dict[str, Any]:
    return {item.name: getattr(values, item.name) for item in dataclasses.fields(values) if item.init}


def _setting_texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values as text. The names of nested settings are joined with a dot."""
    for name, value in values.items():
        if SECRET.search(name):
            continue
        if dataclasses.is_dataclass(value):
            value = _fields(value)
        if isinstance(value, Mapping):
            inner = {str(key): value[key] for key in sorted(value, key=str)}
            yield from ((f"{name}.{key}", text) for key, text in _setting_texts(inner))
        # A URL may contain a password.
        elif not (isinstance(value, str) and "://" in value):
            yield name, _value_text(value)


def _value_text(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, str):
        return shortened(repr(value))
    # The text of other objects may contain a memory address.
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


def shortened(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return a text, or its beginning and its digest if it is long."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}... ({_digest([text])})"


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:12]


# ---- Examples as text


def _fingerprint(clients: FederatedDataset) -> str:
    """Digest of the fingerprints that `datasets` keeps for the examples."""
    source, partition = clients.source, clients.partition
    if source is not None and partition is not None:
        return _digest([dataset_fingerprint(source), str(partition.offsets.tolist()), str(partition.indices.tolist())])
    return _digest(dataset_fingerprint(dataset) for dataset in clients.values() if isinstance(dataset, Dataset))


def _content_digest(clients: FederatedDataset) -> str:
    """Digest of the content of all examples, except for streams."""
    datasets = (dataset.with_format("arrow") for dataset in clients.values() if isinstance(dataset, Dataset))
    return _digest(repr(batch.to_pylist()) for dataset in datasets for batch in dataset.iter(READ_SIZE))
