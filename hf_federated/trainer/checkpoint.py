"""Checkpoints that are complete or absent.

A checkpoint is written under another name and gets its own by one rename. What a federation adds to the files of
`Trainer` lies in `federated/` inside it, all as packed trees (safetensors with a JSON header):

- `server.safetensors`: which federation it is, the algorithms' state, the ledger, the digests of the clients' files,
  and of an adapter the exchanged values themselves, because
  what PEFT saves of a prompt-learning method cannot be trained further;
- `clients/`: what clients keep, one file each.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..messages.serialization import pack, unpack


STAGING_DIR = ".incomplete"
FEDERATED_DIR = "federated"
SERVER_FILE = "server.safetensors"
CLIENTS_DIR = "clients"

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def write_server_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write what the server keeps into a checkpoint that is being made."""
    directory = checkpoint / FEDERATED_DIR
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SERVER_FILE).write_bytes(pack(state))


def read_server_state(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """
    What `write_server_state` wrote.

    Raises:
        ValueError: If the directory is not a checkpoint of a federation, or the file is damaged. The message says what
            is missing.
    """
    path = Path(checkpoint) / FEDERATED_DIR / SERVER_FILE
    if not path.is_file():
        raise ValueError(
            f"{os.fspath(checkpoint)!r} is no checkpoint of a federation: {FEDERATED_DIR}/{SERVER_FILE} is missing. "
            "It may stem from a plain Trainer or have been saved with `save_only_model=True`."
        )
    try:
        return unpack(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from error


def check_weights(checkpoint: str | os.PathLike[str]) -> None:
    """
    Open the files of the model's weights, without reading them.

    Raises:
        ValueError: If one was damaged or cut short. The message names it.
    """
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{os.fspath(path)!r} was damaged or copied in part ({error}). Copy the checkpoint again, or resume "
                "from another one."
            ) from error


def clients_directory(checkpoint: str | os.PathLike[str]) -> Path:
    """Where a checkpoint holds what clients keep."""
    return Path(checkpoint) / FEDERATED_DIR / CLIENTS_DIR


def clear_staging(output_dir: str | os.PathLike[str]) -> None:
    """Delete what an earlier, killed run left half written or half deleted."""
    shutil.rmtree(Path(output_dir) / STAGING_DIR, ignore_errors=True)


@contextmanager
def staged_directory(output_dir: str | os.PathLike[str], create: bool = True) -> Iterator[Path]:
    """
    An empty directory below `output_dir` to write a checkpoint into; it is removed at the end, and what an earlier,
    killed run left of its own is removed at the start.

    Args:
        output_dir (`str` or `os.PathLike`): Where the checkpoint will lie.
        create (`bool`, *optional*, defaults to `True`): `False` only names it: another process makes and removes it.
    """
    # It carries the name of the output directory, from which trainers derive a model's name.
    parent = Path(output_dir) / STAGING_DIR
    if not create:
        yield parent / Path(output_dir).absolute().name
        return
    shutil.rmtree(parent, ignore_errors=True)
    staging = parent / Path(output_dir).absolute().name
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Give a finished checkpoint its name. One that was there before, from an earlier run, is replaced."""
    if final.exists():
        discard(final)
    os.rename(staged, final)


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint so that no part of it is ever seen under its name."""
    trash = checkpoint.parent / STAGING_DIR / f"old-{checkpoint.name}"
    trash.parent.mkdir(exist_ok=True)
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(checkpoint, trash)
    shutil.rmtree(trash, ignore_errors=True)
    with suppress(OSError):  # Not empty while another checkpoint is being written.
        trash.parent.rmdir()


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint that `list_checkpoints` found."""
    return int(checkpoint.name.rpartition("-")[2])


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a directory, oldest step first."""
    found = [(int(match[1]), path) for path in Path(output_dir).glob("*") if (match := _CHECKPOINT.match(path.name))]
    return [path for _, path in sorted(found)]


def checkpoint_to_resume(
    output_dir: str | os.PathLike[str], resume_from_checkpoint: str | os.PathLike[str] | bool | None
) -> str | None:
    """
    The checkpoint that `Trainer.train` is asked to go on from.

    Args:
        output_dir (`str` or `os.PathLike`): Where `True` looks for the last one.
        resume_from_checkpoint (`str`, `os.PathLike` or `bool`, *optional*): As in `Trainer.train`.

    Raises:
        ValueError: If there is none in the output directory.
    """
    if resume_from_checkpoint is True:
        checkpoints = list_checkpoints(output_dir)
        if not checkpoints:
            raise ValueError(f"No checkpoint found in the output directory {os.fspath(output_dir)!r}.")
        resume_from_checkpoint = checkpoints[-1]
    return os.fspath(resume_from_checkpoint) if resume_from_checkpoint else None


def name_checkpoint(output_dir: str | os.PathLike[str], state: TrainerState) -> Path:
    """
    Where the checkpoint of this step will lie, which `state` then knows if it is the best: as it is written aside, the
    parent would record another path.
    """
    final = Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = os.fspath(final)
    return final


def staged_arguments(args: TrainingArguments, staging: Path) -> TrainingArguments:
    """The arguments under which a trainer writes its checkpoint aside, and pushes nothing yet."""
    staged = copy.copy(args)
    staged.output_dir = os.fspath(staging)
    staged.push_to_hub = False
    return staged


def rotate(output_dir: str | os.PathLike[str], save_total_limit: int | None, best: str | None, step: int) -> None:
    """
    Delete the oldest checkpoints beyond a limit, but never the best one or the last.

    Those of later steps than the run has come to were left behind by another run: they are older than all of this one.
    `Trainer` finds the same by the time of files.

    Args:
        output_dir (`str` or `os.PathLike`): Where the checkpoints lie.
        save_total_limit (`int`, *optional*): How many to keep; `None` or less than 1 keeps all.
        best (`str`, *optional*): The best checkpoint's path.
        step (`int`): To which the run has come.
    """
    if save_total_limit is None or save_total_limit < 1:
        return
    # Sorted already by step, and a sort keeps the order of what is alike.
    checkpoints = sorted(list_checkpoints(output_dir), key=lambda path: step_of(path) <= step)
    kept = {checkpoints[-1].resolve()} if checkpoints else set()
    if best is not None:
        kept.add(Path(best).resolve())
    surplus = len(checkpoints) - max(save_total_limit, len(kept))
    for checkpoint in [path for path in checkpoints if path.resolve() not in kept][: max(surplus, 0)]:
        discard(checkpoint)
