"""`RunFolder`: the output folder of `hf-federated train`, and what it needs to resume or replace a run.

`_run.json` contains the recipe of the run, the results of its finished baselines, and the names of the files that the
run wrote at its end. A resumed run compares its recipe with this recipe. A run that replaces another run deletes only
these files, the checkpoints, and the working files of the trainer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_federated.experiments.baselines import BaselineResult
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.text import plural
from hf_federated.reporting.run_log import CLIENTS_NAME, LOG_NAME
from hf_federated.reporting.run_page import PAGE_NAME
from hf_federated.trainer.checkpoint import FEDERATED_DIR, clear_staging, discard, list_checkpoints
from hf_federated.trainer.checks.resume import CHANGEABLE_FIELDS
from hf_federated.trainer.client_checkpoint import TEACHERS_DIR
from hf_federated.trainer.launch_consistency import MAY_DIFFER
from hf_federated.trainer.manifest import check_manifest
from hf_federated.trainer.workers import CLIENT_STORE_DIR
from hf_federated.utils.run_files import RECIPE_NAME as RUN_NAME
from hf_federated.utils.run_files import RESULTS_NAME
from hf_federated.utils.storage import write_private

from ..utils.untrusted_json import read_json


BASELINES_DIR = "baselines"
# What a run writes while it lasts.
LOG_FILES = (LOG_NAME, CLIENTS_NAME, PAGE_NAME)
# Sections and fields of a recipe that do not change the trained model.
WITHOUT_EFFECT = ("audit", "benchmark", "card", "compare", "network", "plots")
# Names of the files that a run writes at its end: model, tokenizer and configurations, results, card and plots.
WRITTEN_FILES = ("*.safetensors", "*.json", "*.bin", "*.txt", "*.model", "*.jinja", "*.png", "*.svg", "README.md")
# Number of differing fields in an error message.
MAX_DIFFERENCES = 5


class RunFolder:
    """
    The output folder of a run of a recipe.

    Args:
        path (`str` or `os.PathLike`): The folder. It can be missing.
        values (`Mapping[str, Any]`): The recipe, as returned by
            [`~hf_federated.experiments.recipe.yaml_file.read_values`].
        resume (`bool`, *optional*, defaults to `False`): Whether the run keeps its finished baselines and continues
            from the last checkpoint, or from the first round if there is no checkpoint.
        overwrite (`bool`, *optional*, defaults to `False`): Whether the run replaces another run.

    Raises:
        CommandError: If the folder contains a run and neither `resume` nor `overwrite` is set, or the run cannot be
            resumed. The error states what to do.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from hf_federated.experiments.run_folder import RunFolder

    >>> path = Path(tempfile.mkdtemp())
    >>> RunFolder(path, {"federation": {"num_rounds": 5}}).begin()
    >>> RunFolder(path, {}, overwrite=True).begin()
    >>> sorted(item.name for item in path.iterdir())
    ['_run.json']
    ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Mapping[str, Any],
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.resumes = resume
        self._values = _plain(values)
        self._has_begun = False
        self._previous = self._read()
        if resume:
            self._check_resumed()
        elif overwrite:
            self._check_overwritten()
        elif reason := self._describe_run():
            resume_option = "--resume to continue the run, " if self._can_resume() else ""
            raise CommandError(
                f"{self.path} already contains a run ({reason}). Pass {resume_option}--overwrite to delete the run "
                "and start anew, or --output-dir to use another folder."
            )
        # Baselines do not depend on the federation's checkpoint. Their results are kept when a run is resumed.
        kept = self._previous if resume else {}
        self._baselines: dict[str, Any] = kept.get("baselines", {})
        self._files: list[str] = kept.get("files", [])

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint with the largest step, if there is one."""
        checkpoints = list_checkpoints(self.path)
        return checkpoints[-1] if checkpoints else None

    def begin(self) -> str | None:
        """
        Delete the run that this run replaces, if there is one, and write `_run.json`.

        Returns:
            `str`, *optional*: The checkpoint from which the run resumes.

        Raises:
            CheckpointError: If a file of this checkpoint is damaged.
        """
        checkpoint = self.last_checkpoint if self.resumes else None
        if checkpoint is not None:
            check_manifest(checkpoint)
        with command_errors(str(self.path)):
            if not self.resumes:
                self._delete_previous()
            self.path.mkdir(parents=True, exist_ok=True)
            self._has_begun = True
            self._write()
        return None if checkpoint is None else str(checkpoint)

    def find_baseline(self, name: str) -> BaselineResult | None:
        """Return the result of a baseline that the interrupted run finished."""
        saved = self._baselines.get(name)
        with command_errors(str(self.path / RUN_NAME)):
            return None if saved is None else BaselineResult(**saved)

    def add_baseline(self, result: BaselineResult) -> None:
        """Save the result of a finished baseline."""
        self._baselines[result.name] = dataclasses.asdict(result)
        self._write()

    @contextmanager
    def record_files(self) -> Iterator[None]:
        """Record the files that the trainer writes in the block as files of the run."""
        before = self._snapshot()
        try:
            yield
        finally:
            written = {name for name, stamp in self._snapshot().items() if before.get(name) != stamp}
            self._files = sorted(written.union(self._files))
            self._write()

    def interruption(self, command: str) -> str:
        """
        Describe in one line how to continue after an interruption.

        Args:
            command (`str`): The command of the run, without `--resume` and `--overwrite`.
        """
        if not self._has_begun and not self.resumes:
            return "interrupted before the training started."
        checkpoint = self.last_checkpoint
        if checkpoint is None and self._baselines:
            finished = ", ".join(self._baselines)
            return (
                f"interrupted before the first checkpoint. Continue after the finished baselines ({finished}) with: "
                f"{command} --resume"
            )
        if checkpoint is None:
            return f"interrupted before the first checkpoint. Start anew with: {command} --overwrite"
        return f"interrupted. The last checkpoint is {checkpoint}. Continue with: {command} --resume"

    # ---- The run that the folder contains

    def _describe_run(self) -> str:
        """Describe the run in the folder, or return an empty text if there is none."""
        checkpoints = list_checkpoints(self.path)
        if (self.path / RESULTS_NAME).is_file():
            return f"{RESULTS_NAME} and {plural(len(checkpoints), 'checkpoint')}"
        if checkpoints:
            return f"its last checkpoint is {checkpoints[-1].name}"
        # A run that failed before its first result can be repeated.
        return "without a checkpoint" if self._previous.get("baselines") or self._previous.get("files") else ""

    def _can_resume(self) -> bool:
        """Whether the folder contains a checkpoint, or finished baselines of an interrupted run."""
        if self.last_checkpoint is not None:
            return True
        return bool(self._previous.get("baselines")) and not (self.path / RESULTS_NAME).is_file()

    def _check_resumed(self) -> None:
        if not self._can_resume():
            found = "contains no checkpoint" if self.path.is_dir() else "does not exist"
            advice = "Pass --overwrite instead" if self._describe_run() else "Leave --resume out"
            raise CommandError(
                f"--resume: the folder {self.path} {found}. {advice} to start a new run, or pass the "
                "--output-dir of the run. Checkpoints are saved unless training.save_strategy is 'no'."
            )
        if not self._previous:
            return  # An older version saved the run. The trainer compares the federation with the checkpoint.
        differences = find_differences(self._previous["recipe"], self._values)
        if differences:
            more = len(differences) - MAX_DIFFERENCES
            shown = "; ".join(differences[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            raise CommandError(
                f"--resume: the recipe differs from the recipe of the run in {self.path}: {shown}. Use the recipe of "
                "the run, or start a new run with --overwrite or another --output-dir."
            )

    def _check_overwritten(self) -> None:
        foreign = [path.name for path in list_checkpoints(self.path) if not (path / FEDERATED_DIR).is_dir()]
        if not self._previous and foreign:
            raise CommandError(
                f"--overwrite: {self.path} contains {foreign[-1]}, which no run of a recipe has saved. Pass another "
                "--output-dir, or delete the checkpoint."
            )

    def _delete_previous(self) -> None:
        for checkpoint in list_checkpoints(self.path):
            discard(checkpoint)
        clear_staging(self.path)
        if not self._previous:
            return  # Without a record, the other files in the folder may belong to the user.
        for name in (CLIENT_STORE_DIR, TEACHERS_DIR):
            for folder in [self.path / name, *self.path.glob(f"{name}-[0-9]*")]:
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)
        tracked = self.path.glob("runs/**/events.out.tfevents.*")
        own = [self.path / name for name in (RUN_NAME, *LOG_FILES, *self._previous.get("files", []))]
        for path in [*own, *tracked]:
            # `_run.json` could have been edited.
            if path.is_file() and path.resolve().is_relative_to(self.path.resolve()):
                path.unlink()
        _remove_empty_folders(self.path)

    # ---- _run.json

    def _read(self) -> dict[str, Any]:
        path = self.path / RUN_NAME
        if not path.is_file():
            return {}
        try:
            with command_errors(str(path)):
                saved = read_json(path)
        except CommandError as error:
            raise CommandError(f"{error}. Choose another --output-dir, or delete the file.") from error
        if not isinstance(saved, dict) or not isinstance(saved.get("recipe"), dict):
            raise CommandError(f"{path} is not the record of a run. Choose another --output-dir, or delete the file.")
        return saved

    def _write(self) -> None:
        content = {"recipe": self._values, "baselines": self._baselines, "files": self._files}
        write_private(self.path / RUN_NAME, (json.dumps(content, indent=2, default=float) + "\n").encode())

    def _snapshot(self) -> dict[str, tuple[int, int]]:
        """The modification time and the size of the files that a run may write at its end, by name."""
        paths = [path for pattern in WRITTEN_FILES for path in self.path.glob(pattern) if path.is_file()]
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def find_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """
    Compare two recipes. Fields that do not change the trained model may differ.

    Args:
        saved (`Mapping[str, Any]`): The recipe of the run in the folder.
        current (`Mapping[str, Any]`): The recipe of the resumed run.

    Returns:
        `list[str]`: One text for each differing field, with both values.
    """
    before, after = dict(_flatten(_plain(saved))), dict(_flatten(_plain(current)))
    return [
        f"{name} is {_shown(after, name)} and was {_shown(before, name)}"
        for name in dict.fromkeys([*before, *after])
        if not _may_differ(name) and _shown(before, name) != _shown(after, name)
    ]


def _may_differ(name: str) -> bool:
    section, _, field = name.partition(".")
    if section == "training":
        return MAY_DIFFER.fullmatch(field) is not None or field.startswith("save_")
    return section in WITHOUT_EFFECT or (section == "federation" and field in CHANGEABLE_FIELDS)


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not set"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values, without null and without empty mappings, except for `public` and `split`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None and (value != {} or name in ("public", "split")):
            yield f"{prefix}{name}", value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a recipe to the values that JSON returns. `default` converts dates, which YAML has."""
    with command_errors("keys of the recipe must be strings"):
        return json.loads(json.dumps(values, default=str))


def _remove_empty_folders(path: Path) -> None:
    """Remove the empty subfolders that a run leaves."""
    for name in (BASELINES_DIR, "runs"):
        for folder, _, _ in os.walk(path / name, topdown=False):
            if not os.listdir(folder):
                os.rmdir(folder)
