"""The planned runs of a recipe, with its output folder and the trials of its selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_federated.experiments.benchmark.grid import BenchmarkSection, PlannedRun, plan_runs, read_section
from hf_federated.experiments.benchmark.run_log import find_finished
from hf_federated.experiments.benchmark.selection import (
    check_selection,
    choose,
    selected_section,
    selection_report,
    trial_section,
    waiting_runs,
)
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.utils.file_hash import sha256_of_unchanged_file


# The folder of the trials of a selection, in the output folder of the recipe.
TRIALS_NAME = "trials"


@dataclass(frozen=True, kw_only=True)
class RecipeGrid:
    """
    The planned runs of one recipe and its output folder.

    Args:
        path (`str`): The recipe.
        folder (`pathlib.Path`): The output folder.
        section ([`BenchmarkSection`]): The section `benchmark`.
        runs (`list[PlannedRun]`): The planned runs. With `benchmark.select`, only those whose settings are chosen.
        plan (`Callable`): Plans the runs of a section.
        trials ([`RecipeGrid`], *optional*): With `benchmark.select`, the runs on validation examples.
        is_trial (`bool`, *optional*, defaults to `False`): Whether the runs are trials.
        selection (`Sequence[str]`, *optional*): The paragraphs of the report on the trials.
        script (`str`, *optional*): The path and the SHA-256 of the script that prepared the examples.
    """

    path: str
    folder: Path
    section: BenchmarkSection
    runs: list[PlannedRun]
    plan: Callable[[BenchmarkSection], list[PlannedRun]]
    trials: RecipeGrid | None = None
    is_trial: bool = False
    selection: Sequence[str] = ()
    script: str | None = None

    @property
    def name(self) -> str:
        """The file name of the recipe."""
        return Path(self.path).name

    @property
    def title(self) -> str:
        """The title of the benchmark."""
        return self.section.title or self.name

    def with_chosen(self, records: Sequence[Mapping[str, Any]]) -> RecipeGrid:
        """
        Plan the runs whose settings are chosen. A grid without a selection is returned unchanged.

        Args:
            records (`Sequence[Mapping]`): The records of trials, in the order of writing.
        """
        if self.trials is None:
            return self
        finished = list(find_finished(records, self.trials.runs).records.values())
        with prefix_errors(self.path):
            chosen = choose(self.section, finished)
            waiting = waiting_runs(self.section, chosen)
            runs = [run for run in self.plan(selected_section(self.section, chosen)) if run.name not in waiting]
            selection = selection_report(self.section, finished) if finished else []
        return dataclasses.replace(self, runs=runs, selection=selection)


def read_grid(
    path: str,
    values: Mapping[str, Any],
    seeds: Sequence[int] | None,
    folder: Path,
    partition_has_seed: bool | Callable[[dict[str, Any]], bool],
) -> RecipeGrid:
    """
    Plan the runs of a recipe, or the trials of its selection.

    Args:
        path (`str`): The recipe.
        values (`Mapping[str, Any]`): The recipe as read from YAML.
        seeds (`Sequence[int]`, *optional*): Seeds that replace `benchmark.seeds`. The seeds of trials stay.
        folder (`pathlib.Path`): The output folder.
        partition_has_seed (`bool` or `Callable`): As in [`~hf_federated.experiments.benchmark.grid.plan_runs`].

    Raises:
        CommandError: If the section `benchmark` is invalid, or the script in `prepared_by` does not exist.
    """
    with prefix_errors(path):
        section = read_section(values)
        if seeds:
            section = dataclasses.replace(section, seeds=list(seeds))
        plan = partial(plan_runs, values, partition_has_seed=partition_has_seed)
        script = _hash_script(Path(path).parent, section.prepared_by)
        if section.select is None:
            return RecipeGrid(path=path, folder=folder, section=section, runs=plan(section), plan=plan, script=script)
        tried = trial_section(section)
        for run in plan(selected_section(section, {})):
            check_selection(run)
        trials = RecipeGrid(
            path=path,
            folder=folder / TRIALS_NAME,
            section=tried,
            runs=plan(tried),
            plan=plan,
            is_trial=True,
            script=script,
        )
    return RecipeGrid(path=path, folder=folder, section=section, runs=[], plan=plan, trials=trials, script=script)


def _hash_script(folder: Path, name: str | None) -> str | None:
    if name is None:
        return None
    with command_errors("benchmark.prepared_by"):
        return f"{name} sha256:{sha256_of_unchanged_file(folder / name)}"


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Prefix the message of a [`CommandError`] with the recipe or run that caused it."""
    try:
        yield
    except CommandError as error:
        raise CommandError(f"{where}: {error}") from error
