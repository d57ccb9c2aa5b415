"""What the processes of a launch must have in common, compared before anything is trained.

Every process runs the same script, and nothing makes sure that it does the same: a data set may have been shuffled
without a seed, an argument may depend on the machine. Each process describes what it is about to do as lines of text,
and one gather compares them. What may differ between machines is not described (devices, output directories, logging),
and neither is what could be a secret, since the values stand in the error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import TrainingArguments

from ..aggregation import Aggregation
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation
from ..distributed.process_group import ProcessGroup, format_ranks, group_ranks_by_value


# Training arguments that say where a process runs, and what it prints and uploads, but not what it computes.
MAY_DIFFER = re.compile(
    r"output_dir|logging_(dir|strategy|steps|first_step)|log_\w+|disable_tqdm|report_to|run_name|project|trackio_\w+"
    r"|push_to_hub\w*|hub_\w+|local_rank|use_cpu|ddp_(backend|timeout)|debug|skip_memory_metrics|do_(train|eval|predict)"
    r"|resume_from_checkpoint|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor|multiprocessing_\w+)"
)
SECRET = re.compile(r"(^|_)(api_?key|auth|credentials?|keys?|passwords?|secrets?|token)($|_)", re.IGNORECASE)
NUM_SHOWN = 10
NUM_CHARACTERS = 80
ROWS_AT_A_TIME = 1000


class DisagreementError(ValueError):
    """The processes of the launch are about to do different things. The message names what, and each one's value."""


def describe(
    args: TrainingArguments,
    config: FederatedConfig,
    aggregation: Aggregation,
    distillation: Distillation | None,
    model: nn.Module,
    clients: Mapping[str, FederatedDataset],
    postprocessors: Sequence[Any],
    checkpoint: str | None = None,
) -> dict[str, str]:
    """
    What a process is about to do.

    Args:
        args (`TrainingArguments`): The user's.
        config ([`FederatedConfig`]): With everything filled in.
        aggregation ([`Aggregation`]): The averaging algorithm.
        distillation ([`Distillation`], *optional*): The distillation algorithm.
        model (`torch.nn.Module`): Its names, shapes and dtypes are described, not its values.
        clients (`Mapping[str, FederatedDataset]`): By what they are called in an error.
        postprocessors (`Sequence[Postprocessor]`): Between a client's training and the aggregate.
        checkpoint (`str`, *optional*): The name of the checkpoint that the run goes on from.

    Returns:
        `dict[str, str]`: By name, as it stands in an error.
    """
    arguments = {name: value for name, value in _fields(args).items() if not MAY_DIFFER.fullmatch(name)}
    lines = {f"FederatedConfig.{name}": text for name, text in _texts(config.to_dict())}
    lines |= {f"{type(args).__name__}.{name}": text for name, text in _texts(arguments)}
    lines["aggregation"] = type(aggregation).__name__
    lines |= {f"aggregation.{name}": text for name, text in _texts(aggregation.settings())}
    lines["distillation"] = type(distillation).__name__
    if distillation is not None:
        lines |= {f"distillation.{name}": text for name, text in _texts(distillation.settings())}
    lines["postprocessors"] = repr([type(postprocessor).__name__ for postprocessor in postprocessors])
    lines["checkpoint to resume from"] = repr(checkpoint)
    values = [*model.named_parameters(), *model.named_buffers()]
    layout = _digest(f"{name} {value.dtype} {list(value.shape)} {value.requires_grad}" for name, value in values)
    lines["model"] = f"{type(model).__name__} of {len(values)} tensors ({layout})"
    for what, of_clients in clients.items():
        ids, rows = list(of_clients), of_clients.num_rows
        lines[f"ids of the {what}"] = f"{_shortened(', '.join(ids))} ({len(ids)}, {_digest(ids)})"
        known = sum(count or 0 for count in rows.values())
        lines[f"number of rows of the {what}"] = f"{known} ({_digest(str(rows[client_id]) for client_id in ids)})"
    return lines


def check_agreement(
    processes: ProcessGroup, label: str, description: Mapping[str, str], clients: Mapping[str, FederatedDataset]
) -> None:
    """
    Compare what the processes are about to do. All must call it.

    Args:
        processes ([`ProcessGroup`]): Of the launch.
        label (`str`): Where in the program this process is.
        description (`Mapping[str, str]`): What [`describe`] made of this process.
        clients (`Mapping[str, FederatedDataset]`): By what they are called in an error. Their rows are compared too.

    Raises:
        DisagreementError: In all processes, if two differ.
    """
    if processes.world_size == 1:
        return
    rows = {f"rows of the {what}": of_clients for what, of_clients in clients.items()}
    prints = {name: _fingerprint(of_clients) for name, of_clients in rows.items()}
    different = _differences(processes.gather(label, {**description, **prints}))
    if different and different.keys() <= rows.keys():
        # `datasets` makes up a fingerprint where it cannot hash a function. Then the rows themselves decide.
        contents = {name: _contents(rows[name]) for name in different}
        different = _differences(processes.gather(f"{label}, comparing rows", contents))
    if different:
        lines = [f"  {name}: {values}" for name, values in different.items()]
        if len(lines) > NUM_SHOWN:
            lines[NUM_SHOWN:] = [f"  and {len(lines) - NUM_SHOWN} more"]
        raise DisagreementError(
            "The processes of this launch are set up differently:\n"
            + "\n".join(lines)
            + "\nGive all of them the same arguments and the same data, shuffled and cut with the same seeds."
        )


def _differences(told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is not the same in all processes, with who has which value."""
    different = {}
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        values = group_ranks_by_value([theirs.get(name, "absent") for theirs in told])
        if len(values) > 1:
            different[name] = "; ".join(f"{text} in {format_ranks(ranks)}" for text, ranks in values.items())
    return different


# ---- Values as text


def _fields(values: Any) -> dict[str, Any]:
    return {item.name: getattr(values, item.name) for item in dataclasses.fields(values) if item.init}


def _texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values as text, those of dictionaries inside with a point between the names."""
    for name, value in values.items():
        if SECRET.search(name):
            continue
        if dataclasses.is_dataclass(value):
            value = _fields(value)
        if isinstance(value, Mapping):
            inner = {str(key): value[key] for key in sorted(value, key=str)}
            yield from ((f"{name}.{key}", text) for key, text in _texts(inner))
        # The address of a server may hold a password.
        elif not (isinstance(value, str) and "://" in value):
            yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str):
        return _shortened(repr(value))
    # The text of other objects may hold an address in memory.
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


def _shortened(text: str) -> str:
    return text if len(text) <= NUM_CHARACTERS else f"{text[:NUM_CHARACTERS]}... ({_digest([text])})"


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:12]


# ---- Rows as text


def _fingerprint(clients: FederatedDataset) -> str:
    """Of all rows, from the fingerprints that `datasets` keeps."""
    source, partition = clients.source, clients.partition
    if source is not None and partition is not None:
        return _digest([source._fingerprint, str(partition.offsets.tolist()), str(partition.indices.tolist())])
    opened = (clients[client_id] for client_id in clients)
    return _digest(dataset._fingerprint for dataset in opened if isinstance(dataset, Dataset))


def _contents(clients: FederatedDataset) -> str:
    """Of all rows, read one after the other. Streams are not read."""

    def texts() -> Iterator[str]:
        for client_id in clients:
            dataset = clients[client_id]
            if isinstance(dataset, Dataset):
                for batch in dataset.with_format("arrow").iter(ROWS_AT_A_TIME):
                    yield repr(batch.to_pylist())

    return _digest(texts())
