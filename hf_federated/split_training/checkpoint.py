"""What a checkpoint of a split training run holds: each party's own part, and what a resumed run needs.

Beside the files of `Trainer`, whose weights are the model as it is evaluated, `federated/` holds

- `split.safetensors`: which run it is, who holds head and tail, rows since the last average, the ledger;
- `parties/<name>/`, one a party: its part under the whole model's names and numbers ([`save_parts`]), and
  `training.safetensors`, its optimizer's state and, of an adapter, what it trains as it is trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import PretrainedConfig

from ..messages.ledger import Ledger
from ..messages.serialization import pack, unpack
from ..split.parts import Part
from ..split.saving import load_saved_parts, save_parts
from ..trainer.checkpoint import FEDERATED_DIR, check_weights, list_checkpoints, step_of
from ..utils.client_names import escape_client_id
from .federation import SplitFederation
from .parties import Party
from .remote import RemoteFederation


RUN_FILE = "split.safetensors"
TRAINING_FILE = "training.safetensors"
PARTIES_DIR = "parties"


def save_parties(
    federation: SplitFederation | RemoteFederation, checkpoint: Path, run_and_step: Mapping[str, Any]
) -> None:
    """
    Write every party's part and state into a checkpoint that is being made.

    Args:
        federation ([`SplitFederation`] or [`RemoteFederation`]): Its parties.
        checkpoint (`Path`): The directory.
        run_and_step (`Mapping[str, Any]`): Of which run and step it is: `digest.run_and_step`.
    """
    directory = checkpoint / FEDERATED_DIR
    directory.mkdir(parents=True, exist_ok=True)
    run = {**federation.state(), "ledger": federation.ledger.to_dict()}
    (directory / RUN_FILE).write_bytes(pack(run))
    model = federation.model
    for party in federation.parties.values():
        save_party(party, model.config, party_directory(checkpoint, party.name), model.adapter_config, run_and_step)


def check_checkpoint(checkpoint: str | os.PathLike[str]) -> None:
    """
    Raises:
        ValueError: If it is no checkpoint of a split training run. The message says what is missing.
    """
    if not (Path(checkpoint) / FEDERATED_DIR / RUN_FILE).is_file():
        raise ValueError(
            f"{os.fspath(checkpoint)!r} is no checkpoint of a split training run: {FEDERATED_DIR}/{RUN_FILE} is "
            "missing. It may stem from another trainer or have been saved with `save_only_model=True`."
        )
    check_weights(checkpoint)


def resumable_checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, str]:
    """The checkpoints in a directory that hold parties, by step: not those of `save_only_model=True`."""
    found = [path for path in list_checkpoints(output_dir) if (path / FEDERATED_DIR / RUN_FILE).is_file()]
    return {step_of(path): os.fspath(path) for path in found}


def load_parties(federation: SplitFederation | RemoteFederation, checkpoint: str | os.PathLike[str]) -> Ledger:
    """
    Take back what `save_parties` wrote.

    Returns:
        `Ledger`: The run's until then.

    Raises:
        ValueError: If it is no checkpoint of a split training run, of another one, or damaged.
    """
    run = _read(Path(checkpoint) / FEDERATED_DIR / RUN_FILE)
    ledger = Ledger.from_dict(run.pop("ledger"))
    federation.load_state(run)
    adapter = federation.model.adapter_config is not None
    for party in federation.parties.values():
        load_party(party, party_directory(checkpoint, party.name), adapter)
    return ledger


def party_directory(checkpoint: str | os.PathLike[str], name: str) -> Path:
    """Where a party's files lie in a checkpoint."""
    return Path(checkpoint) / FEDERATED_DIR / PARTIES_DIR / escape_client_id(name)


def save_party(
    party: Party,
    config: PretrainedConfig,
    directory: Path,
    adapter: PeftConfig | None,
    run_and_step: Mapping[str, Any],
    state: dict[str, Any] | None = None,
) -> None:
    """
    Write one party's part and state.

    Args:
        party ([`Party`]): The party.
        config (`PretrainedConfig`): The whole model's.
        directory (`Path`): Where to. It is created.
        adapter (`PeftConfig`, *optional*): What its adapters were made from.
        run_and_step (`Mapping[str, Any]`): Of which run and step they are: `digest.run_and_step`.
        state (`dict[str, Any]`, *optional*): What else it keeps.
    """
    save_parts(parts_of(party), config, directory, adapter, run=run_and_step)
    optimizer = None if party.optimizer is None else party.optimizer.state_dict()
    training: dict[str, Any] = {"optimizer": optimizer, "run": state}
    # What is saved of an adapter may be made from what is trained, and cannot be turned back.
    training["trained"] = party.state() if adapter is not None else None
    (directory / TRAINING_FILE).write_bytes(pack(training))


def load_party(party: Party, directory: Path, adapter: bool) -> dict[str, Any]:
    """
    Take one party's part and state.

    Returns:
        `dict[str, Any]`: What else it kept.

    Raises:
        ValueError: If a file is missing or damaged, or of another party.
    """
    training = _read(directory / TRAINING_FILE)
    if adapter:
        party.load(training["trained"])
    else:
        load_saved_parts(parts_of(party), directory)
    if (party.optimizer is None) != (training["optimizer"] is None):
        raise ValueError(f"{directory} is of a party that trained otherwise: other parameters are frozen there.")
    if party.optimizer is not None:
        party.optimizer.load_state_dict(training["optimizer"])
    return training["run"] or {}


def parts_of(party: Party) -> list[Part]:
    """A client's head and tail, or a server's body."""
    return [own for own in (party.module, *party.module.children()) if isinstance(own, Part)]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: this is no whole checkpoint of a split training run.")
    try:
        return dict(unpack(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
