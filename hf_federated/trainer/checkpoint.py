"""Checkpoints that are either complete or absent.

A checkpoint is written to a staging directory and then renamed, so an interrupted run leaves no partial checkpoint.
A federation adds a directory `federated/` to the files of `Trainer`. The directory contains safetensors files whose
header stores the structure of the saved values as JSON:

- `server.safetensors`: the identity of the federation, the state of its algorithms, the ledger and the digests of the
  clients' files. For a PEFT model, the file also contains the exchanged parameters, because training cannot continue
  from the files that PEFT saves for a prompt-learning method.
- `clients/`: the client states, one file for each client.
- `server-1.safetensors`, `clients-1/`, …: with FSDP2, the shards of the other processes. Such a checkpoint resumes on
  the same number of processes. The model itself is saved whole.
- `manifest.json`: the sizes and digests of all other files of the checkpoint (`manifest.py`).
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..messages.serialization import MAX_FILE_TENSORS, pack, unpack
from ..utils.errors import CheckpointError
from ..utils.storage import size_of_folder, storage_errors, write_private


STAGING_DIR = ".incomplete"
FEDERATED_DIR = "federated"
SERVER_FILE = "server.safetensors"
CLIENTS_DIR = "clients"
# The values that every server state contains.
REQUIRED_STATE = ("identity", "aggregation", "ledger", "clients")

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


@dataclass(frozen=True)
class ShardFiles:
    """
    The files of a checkpoint that one process reads and writes.

    Args:
        rank (`int`, *optional*, defaults to `0`): Number of the shard of this process.
        num_shards (`int`, *optional*, defaults to `1`): Number of shards. It is 1 without FSDP2.
    """

    rank: int = 0
    num_shards: int = 1

    def name(self, name: str) -> str:
        """Return the name of the file or folder of this process, from the name of the first process."""
        stem, dot, suffix = name.partition(".")
        return f"{stem}-{self.rank}{dot}{suffix}" if self.rank else name


WHOLE = ShardFiles()


def write_server_state(checkpoint: Path, state: dict[str, Any], files: ShardFiles = WHOLE) -> None:
    """Write the server's state into a staged checkpoint."""
    directory = checkpoint / FEDERATED_DIR
    directory.mkdir(parents=True, exist_ok=True)
    write_private(directory / files.name(SERVER_FILE), pack(state))


def read_server_state(checkpoint: str | os.PathLike[str], files: ShardFiles = WHOLE) -> dict[str, Any]:
    """
    Read the state that `write_server_state` wrote.

    Raises:
        CheckpointError: If the directory is not a checkpoint of a federation, if the file is damaged, or if another
            number of processes saved shards. The message names the missing or damaged file.
    """
    path = Path(checkpoint) / FEDERATED_DIR / files.name(SERVER_FILE)
    num_shards = len(list(path.parent.glob(f"{SERVER_FILE.partition('.')[0]}*")))
    if num_shards not in (0, files.num_shards):
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} has the states of {num_shards} processes, but this launch needs those of "
            f"{files.num_shards}. With FSDP, each process saves its shards. Resume with the number of processes and "
            "the FSDP setting of the launch that saved the checkpoint."
        )
    if not path.is_file():
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} is not a checkpoint of a federation: {FEDERATED_DIR}/{path.name} is "
            "missing. The checkpoint may have been saved by a plain Trainer or with `save_only_model=True`. Pass a "
            "checkpoint of a federation."
        )
    try:
        state = unpack(path.read_bytes(), MAX_FILE_TENSORS)
        missing = [name for name in REQUIRED_STATE if not isinstance(state, dict) or name not in state]
        if missing:
            raise ValueError(f"The file is damaged or of another kind: it has no {', '.join(missing)}.")
        return state
    except ValueError as error:
        raise CheckpointError(f"{os.fspath(path)!r}: {error}") from error


def check_weights(checkpoint: str | os.PathLike[str]) -> None:
    """
    Open the weight files of a checkpoint without reading the weights.

    Raises:
        CheckpointError: If a file is damaged or incomplete. The message names the file.
    """
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(
                f"{os.fspath(path)!r} is damaged or incomplete ({error}). Copy the checkpoint again, or resume from "
                "another checkpoint."
            ) from error


def num_finished_rounds(checkpoint: str | os.PathLike[str]) -> int:
    """Number of rounds of the run before it wrote a checkpoint."""
    return TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step


def clients_directory(checkpoint: str | os.PathLike[str], files: ShardFiles = WHOLE) -> Path:
    """Directory of the client states in a checkpoint."""
    return Path(checkpoint) / FEDERATED_DIR / files.name(CLIENTS_DIR)


def clear_staging(output_dir: str | os.PathLike[str]) -> None:
    """Delete the partially written and partially deleted checkpoints that a killed run left."""
    shutil.rmtree(Path(output_dir) / STAGING_DIR, ignore_errors=True)


@contextmanager
def staged_directory(output_dir: str | os.PathLike[str], create: bool = True, num_bytes: int = 0) -> Iterator[Path]:
    """
    Create an empty staging directory below `output_dir` and remove it at the end.

    The staging directory of an earlier, killed run is removed first.

    Args:
        output_dir (`str` or `os.PathLike`): The directory that will contain the checkpoint.
        create (`bool`, *optional*, defaults to `True`): Whether this process creates and removes the directory. With
            `False`, another process creates and removes the directory, and this process only gets the path.
        num_bytes (`int`, *optional*, defaults to `0`): Smallest size of a checkpoint, for the error of a full disk.

    Yields:
        `pathlib.Path`: The staging directory.

    Raises:
        StorageError: If the disk is full or the directory cannot be written to. The last checkpoint is unchanged.
    """
    # The staging directory has the name of the output directory, because trainers derive the model name from it.
    staging = Path(output_dir) / STAGING_DIR / Path(output_dir).absolute().name
    if not create:
        yield staging
        return
    clear_staging(output_dir)

    def needed() -> int:
        last = list_checkpoints(output_dir)[-1:]
        return max(num_bytes, *map(size_of_folder, last), 0)

    with storage_errors(output_dir, needed):
        try:
            staging.mkdir(parents=True)
            yield staging
        finally:
            clear_staging(output_dir)


def publish(staged: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name, and replace a checkpoint that an earlier run left there."""
    if final.exists():
        discard(final)
    os.rename(staged, final)


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so a partially deleted checkpoint never has its name."""
    trash = checkpoint.parent / STAGING_DIR / f"old-{checkpoint.name}"
    trash.parent.mkdir(exist_ok=True)
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(checkpoint, trash)
    shutil.rmtree(trash, ignore_errors=True)
    with suppress(OSError):  # Fails while another checkpoint is being written.
        trash.parent.rmdir()


def size_of_trained(model: nn.Module) -> int:
    """Number of bytes of the trained parameters of a model, which each of its checkpoints contains."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """List the checkpoints of a directory in ascending order of steps."""
    return sorted((path for path in Path(output_dir).glob("*") if _CHECKPOINT.match(path.name)), key=step_of)


def checkpoint_to_resume(
    output_dir: str | os.PathLike[str], resume_from_checkpoint: str | os.PathLike[str] | bool | None
) -> str | None:
    """
    Find the checkpoint to resume from.

    Args:
        output_dir (`str` or `os.PathLike`): The directory whose last checkpoint is used for `True`.
        resume_from_checkpoint (`str`, `os.PathLike` or `bool`, *optional*): As in `Trainer.train`.

    Returns:
        `str`, *optional*: Path of the checkpoint. `None` to start a new run.

    Raises:
        ValueError: If the output directory contains no checkpoint.
    """
    if resume_from_checkpoint is True:
        checkpoints = list_checkpoints(output_dir)
        if not checkpoints:
            raise ValueError(
                f"No checkpoint found in the output directory {os.fspath(output_dir)!r}. Pass the path of a "
                "checkpoint."
            )
        resume_from_checkpoint = checkpoints[-1]
    return os.fspath(resume_from_checkpoint) if resume_from_checkpoint else None


def name_checkpoint(output_dir: str | os.PathLike[str], state: TrainerState) -> Path:
    """
    Return the final path of the checkpoint of the current step, and record it in `state` if it is the best one.

    The parent trainer writes to the staging directory and would record that path.
    """
    final = Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = os.fspath(final)
    return final


def staged_arguments(args: TrainingArguments, staging: Path) -> TrainingArguments:
    """Copy the arguments with the staging directory as output directory and without pushing to the Hub."""
    staged = copy.copy(args)
    staged.output_dir = os.fspath(staging)
    staged.push_to_hub = False
    return staged


def rotate(output_dir: str | os.PathLike[str], save_total_limit: int | None, best: str | None, step: int) -> None:
    """
    Delete the oldest checkpoints beyond a limit, but never the best or the last checkpoint.

    A checkpoint of a later step than the current step was left by an earlier run and counts as older than all
    checkpoints of this run. `Trainer` derives the same order from the modification times of the files.

    Args:
        output_dir (`str` or `os.PathLike`): The directory of the checkpoints.
        save_total_limit (`int`, *optional*): Number of checkpoints to keep. `None` or less than 1 keeps all.
        best (`str`, *optional*): Path of the best checkpoint.
        step (`int`): Current step of the run.
    """
    if save_total_limit is None or save_total_limit < 1:
        return
    # The sort is stable, so each of the two groups stays ordered by step.
    checkpoints = sorted(list_checkpoints(output_dir), key=lambda path: step_of(path) <= step)
    kept = {Path(path).resolve() for path in (*checkpoints[-1:], best) if path is not None}
    surplus = len(checkpoints) - max(save_total_limit, len(kept))
    for checkpoint in [path for path in checkpoints if path.resolve() not in kept][: max(surplus, 0)]:
        discard(checkpoint)
