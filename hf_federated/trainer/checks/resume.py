"""Checks of a checkpoint against the federation that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from ...aggregation import Aggregation
from ...clients.participants import Participants
from ...config import FederatedConfig
from ...data import FederatedDataset
from ...distillation import Distillation


# How long a run is, what is watched, and where it happens.
MAY_CHANGE = (
    "num_rounds",
    "min_clients",
    "evaluate_clients",
    "log_clients",
    "parallelism",
    "client_store",
    "max_resident_clients",
)


def federation_identity(
    federation: FederatedConfig,
    algorithm: Aggregation,
    distillation: Distillation | None,
    clients: FederatedDataset,
    participants: Participants,
    args: TrainingArguments,
) -> dict[str, Any]:
    """What makes a run this run and no other: whatever changes its numbers, except for its length."""
    identity = {name: value for name, value in federation.to_dict().items() if name not in MAY_CHANGE}
    del identity["aggregation_kwargs"], identity["distillation_kwargs"]
    identity |= {"aggregation": repr(algorithm), "distillation": repr(distillation)}
    for name, content in participants.row_hashes.items():
        identity[f"rows of `{name}`"] = len(getattr(participants, name))
        identity[f"content of `{name}`"] = content
    if distillation is not None:
        # Its learning rates fall over the mini-batches of the whole run.
        identity["per_device_train_batch_size"] = args.per_device_train_batch_size
        for client_id, spec in participants.clients.items():
            if spec.args is not None:
                name = f"per_device_train_batch_size of client {client_id!r}"
                identity[name] = spec.args.per_device_train_batch_size
    return {**identity, "clients": dict(sorted(clients.num_rows.items()))}


def check_resumed(saved: Mapping[str, Any], now: Mapping[str, Any], checkpoint: str) -> None:
    """
    Refuse to go on from the checkpoint of another federation.

    Args:
        saved (`Mapping[str, Any]`): The [`federation_identity`] of the checkpoint.
        now (`Mapping[str, Any]`): That of the trainer.
        checkpoint (`str`): Where the checkpoint lies.

    Raises:
        ValueError: If they differ. The message names what differs, with both values.
    """
    # Rows that a run had and this one has not are no setting of it.
    names = [*now, *(name for name in saved if name not in now and name.startswith(("rows of", "content of")))]
    changes = [
        f"{name}: here {now.get(name)!r}, there {saved.get(name)!r}"
        for name in names
        if name != "clients" and now.get(name) != saved.get(name)
    ]
    here, there = now["clients"], saved["clients"]
    for where, ids in (("here", here.keys() - there.keys()), ("there", there.keys() - here.keys())):
        if ids:
            changes.append(f"{len(ids)} clients are only {where}, for example {sorted(ids)[:3]}")
    changes += [
        f"rows of client {client_id!r}: here {here[client_id]}, there {there[client_id]}"
        for client_id in here
        if client_id in there and here[client_id] != there[client_id]
    ][:3]
    if changes:
        raise ValueError(
            f"{checkpoint!r} is of another federation (there) than this run (here). {'; '.join(changes)}. Resume with "
            "what the checkpoint has, or start a new run from its model. What a resume may change: "
            f"{', '.join(MAY_CHANGE)}."
        )
