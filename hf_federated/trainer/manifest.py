"""The manifest of a checkpoint: the size and the SHA-256 digest of every file.

`federated/manifest.json` is the last file that is written into a staged checkpoint. It is checked before any other
file of the checkpoint is read, so that a damaged file is reported by name and a damaged pickle is never loaded.

The manifest detects damage: a flipped bit, an incomplete copy, data that a power failure lost. It is not signed, so it
does not protect against a person who may write to the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils import logging

from ..utils.errors import CheckpointError
from ..utils.file_hash import sha256_of_file
from ..utils.untrusted_json import read_json


MANIFEST_FILE = "federated/manifest.json"
FORMAT = "hf_federated.manifest"
FORMAT_VERSION = 1
# Number of files that are hashed at the same time.
NUM_THREADS = 4

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Files that `Trainer` unpickles when it resumes or loads a model.
_PICKLES = re.compile(r"(optimizer|scheduler|scaler|pytorch_model[^/]*|adapter_model)\.(pt|bin)|rng_state(_\d+)?\.pth")

logger = logging.get_logger(__name__)


def write_manifest(checkpoint: Path, known_digests: Mapping[str, str] | None = None) -> None:
    """
    Write the manifest of a checkpoint. All other files must be complete.

    Args:
        checkpoint (`pathlib.Path`): A staged checkpoint.
        known_digests (`Mapping[str, str]`, *optional*): Digests that were computed when the files were written, by
            path relative to the checkpoint. These files are not read again.
    """
    paths, known = _list_files(checkpoint), known_digests or {}
    digests = {**known, **_hash_files({name: path for name, path in paths.items() if name not in known})}
    files = {name: {"size": path.stat().st_size, "sha256": digests[name]} for name, path in paths.items()}
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": _digest_of(files), "files": files}
    path = checkpoint / MANIFEST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_manifest(checkpoint: str | os.PathLike[str]) -> None:
    """
    Compare the files of a checkpoint with its manifest.

    Files that the manifest does not list are allowed, because callbacks may add files to a checkpoint. The exception
    are files that `Trainer` would unpickle. A checkpoint without a manifest was written by hf_federated 0.1.0; the
    function then logs a warning.

    Args:
        checkpoint (`str` or `os.PathLike`): The directory of the checkpoint.

    Raises:
        CheckpointError: If the manifest or a file is damaged, or a file is missing. The message names the file.
    """
    root = Path(checkpoint)
    path = root / MANIFEST_FILE
    if not path.is_file():
        if root.is_dir():
            logger.warning(
                f"{os.fspath(root)!r} has no {MANIFEST_FILE}, as the checkpoints of hf_federated 0.1.0. Damage of its "
                "files is not detected."
            )
        return
    listed = read_manifest(path)
    for name, entry in listed.items():
        if not (root / name).is_file():
            raise _damage(root / name, "is missing")
        if (size := (root / name).stat().st_size) != entry["size"]:
            raise _damage(root / name, f"has {size} bytes, but {entry['size']} bytes were saved")
    for name, digest in _hash_files({name: root / name for name in listed}).items():
        if digest != listed[name]["sha256"]:
            raise _damage(root / name, "has other bytes than were saved")
    for name in _list_files(root):
        if name not in listed and _PICKLES.fullmatch(name):
            raise CheckpointError(
                f"{os.fspath(root / name)!r} is not in {MANIFEST_FILE}, but Trainer would load it. Delete the file."
            )


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """
    Read the file that `write_manifest` wrote.

    Args:
        path (`pathlib.Path`): The manifest.

    Returns:
        `dict[str, dict[str, Any]]`: `size` and `sha256` of each file, by path relative to the checkpoint.

    Raises:
        CheckpointError: If the file is damaged or has a newer format. The message names the file.
    """
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"its format version is {content['format_version']!r}, and this version of hf_federated reads version "
                f"{FORMAT_VERSION}"
            )
        files = content["files"]
        if content["sha256"] != _digest_of(files):
            raise ValueError("its content differs from its digest")
        for name, entry in files.items():
            parts = PurePosixPath(name).parts
            is_valid = type(entry["size"]) is int and _SHA256.fullmatch(entry["sha256"]) is not None
            if not is_valid or not parts or name.startswith("/") or ".." in parts:
                raise ValueError(f"its entry {name!r} is not valid")
        return dict(files)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{os.fspath(path)!r} is not the manifest of a checkpoint: {reason}. Copy the checkpoint again, or resume "
            "from another checkpoint."
        ) from error


def _hash_files(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 digests of files, by the keys of `paths`."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # `hashlib` releases the lock of the interpreter
        return dict(zip(paths, pool.map(sha256_of_file, paths.values()), strict=True))


def _damage(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{os.fspath(path)!r} {reason}. The checkpoint is damaged or was copied incompletely. Copy it again, or "
        f"resume from another checkpoint. To resume from files that you changed on purpose, delete {MANIFEST_FILE}."
    )


def _list_files(checkpoint: Path) -> dict[str, Path]:
    """Map the relative paths of all files of a checkpoint except its manifest to their paths, in sorted order."""
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    return {name: files[name] for name in sorted(files) if name != MANIFEST_FILE}


def _digest_of(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
