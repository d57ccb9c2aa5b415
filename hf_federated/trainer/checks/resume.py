"""Checks of a checkpoint against the federation that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from ...utils.errors import CheckpointError


if TYPE_CHECKING:
    from ..setup import FederationSetup


# Fields that define the length, the evaluation and the logging of a run, and where its clients run.
CHANGEABLE_FIELDS = (
    "num_rounds",
    "min_clients",
    "max_examples_per_client",
    "max_update_ratio",
    "evaluate_clients",
    "log_clients",
    "report_anomalies",
    "live_report",
    "parallelism",
    "local_loop",
    "client_store",
    "max_resident_clients",
)


def federation_identity(setup: FederationSetup, args: TrainingArguments) -> dict[str, Any]:
    """
    Collect all settings that change the numbers of a run, except for its length.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
    """
    participants = setup.participants
    identity = {name: value for name, value in setup.config.to_dict().items() if name not in CHANGEABLE_FIELDS}
    del identity["aggregation_kwargs"], identity["distillation_kwargs"]
    identity |= {"aggregation": repr(setup.aggregation), "distillation": repr(setup.distillation)}
    for name, content in participants.row_hashes.items():
        identity[f"rows of `{name}`"] = len(getattr(participants, name))
        identity[f"content of `{name}`"] = content
    if setup.distillation is not None:
        # The learning rates of a distillation decrease over the mini-batches of the whole run.
        identity["per_device_train_batch_size"] = args.per_device_train_batch_size
        for client_id, spec in participants.clients.items():
            if spec.args is not None:
                name = f"per_device_train_batch_size of client {client_id!r}"
                identity[name] = spec.args.per_device_train_batch_size
    return {**identity, "clients": dict(sorted(setup.clients.num_rows.items()))}


def check_resumed(saved: Mapping[str, Any], current: Mapping[str, Any], checkpoint: str, are_remote: bool) -> None:
    """
    Refuse to resume from the checkpoint of another federation.

    Args:
        saved (`Mapping[str, Any]`): The [`federation_identity`] of the checkpoint.
        current (`Mapping[str, Any]`): The [`federation_identity`] of the trainer.
        checkpoint (`str`): Path of the checkpoint.
        are_remote (`bool`): Whether the clients are on other machines. The number of
            examples of such a client is not known before it joins.

    Raises:
        CheckpointError: If the two differ. The message names the settings that differ and both values.
    """
    # A checkpoint of version 0.1.0 has neither of these fields.
    later: dict[str, Any] = {"collector": "synchronous", "collector_kwargs": {}}
    later |= {"secure_aggregation": None, "secure_aggregation_kwargs": {}}
    later |= {"exchange_codec": None, "exchange_codec_kwargs": {}}
    saved = {**later, **saved}
    # A dataset that only the checkpoint has is missing in `current`.
    names = [*current, *(name for name in saved if name not in current and name.startswith(("rows of", "content of")))]
    changes = [
        f"{name}: {current.get(name)!r} in this run, {saved.get(name)!r} in the checkpoint"
        for name in names
        if name != "clients" and current.get(name) != saved.get(name)
    ]
    run_clients, saved_clients = current["clients"], saved["clients"]
    only_in = {"this run": run_clients.keys() - saved_clients, "the checkpoint": saved_clients.keys() - run_clients}
    for place, ids in only_in.items():
        if ids:
            changes.append(f"{len(ids)} clients are only in {place}, for example {sorted(ids)[:3]}")
    changes += [
        f"examples of client {client_id!r}: {run_clients[client_id]} in this run, {saved_clients[client_id]} in the "
        "checkpoint"
        for client_id in run_clients
        if client_id in saved_clients
        and run_clients[client_id] != saved_clients[client_id]
        and not (are_remote and None in (run_clients[client_id], saved_clients[client_id]))
    ][:3]
    if changes:
        raise CheckpointError(
            f"The checkpoint {checkpoint!r} belongs to another federation. {'; '.join(changes)}. Resume with the "
            "settings of the checkpoint, or start a new run from its model. A resumed run may change these fields: "
            f"{', '.join(CHANGEABLE_FIELDS)}."
        )
