"""Sweeps of a benchmark: the cross product of values of fields gives each run several trials."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.schema import documented


# The key of a run's changes that replaces `benchmark.sweep`.
SWEEP = "sweep"
# Characters that some operating system forbids in file names. `>` also separates the names of a claim.
FORBIDDEN_CHARACTERS = re.compile(r'[/\\<>:"|?*\x00-\x1f\x7f]')


@dataclass
class SelectSection:
    """
    The field `select` of the section `benchmark`.

    Args:
        metric (`str`, *optional*):
            The metric on validation examples. Defaults to `benchmark.metric`.
        seeds (`list[int]`, *optional*, defaults to `[0]`):
            The seeds of the trials. They do not depend on `--seeds`.
    """

    metric: str | None = documented("The metric on validation examples. Defaults to benchmark.metric.")
    seeds: list[int] = documented("The seeds of the trials.", lambda: [0])


@dataclass(frozen=True)
class Trial:
    """
    One setting of a run.

    Args:
        run (`str`): The name of the run in the recipe.
        setting (`dict[str, Any]`): The values of the swept fields by their dotted names. Empty without a sweep.
        changes (`dict[str, Any]`): The changes of the recipe, with the setting.
    """

    run: str
    setting: dict[str, Any]
    changes: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the run and its setting, such as `"FedOpt, learning_rate=0.01, server_lr=1"`."""
        last = [field.rpartition(".")[2] for field in self.setting]
        names = last if len(set(last)) == len(last) else list(self.setting)
        values = [f"{value:g}" if isinstance(value, float) else str(value) for value in self.setting.values()]
        return ", ".join([self.run, *(f"{name}={value}" for name, value in zip(names, values, strict=True))])


def trials_of(runs: Mapping[str, Any], sweep: Any) -> list[Trial]:
    """
    The trials of all runs. A run without a sweep has one trial.

    Args:
        runs (`Mapping[str, Any]`): The changes of the recipe by the name of the run. A run with a key `sweep` has its
            own sweep.
        sweep (`Mapping[str, list]`): The values by dotted names of fields, for the other runs.

    Raises:
        CommandError: If a sweep is invalid, a run changes a swept field, or two trials have the same name.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.sweep import trials_of

    >>> [trial.name for trial in trials_of({"FedAvg": {}}, {"training.learning_rate": [0.1, 0.01]})]
    ['FedAvg, learning_rate=0.1', 'FedAvg, learning_rate=0.01']

    ```
    """
    trials = []
    for run, given in runs.items():
        if not isinstance(given, dict | None):
            raise CommandError(f"benchmark.runs: {run!r} is {given!r}; it must be a mapping of changes of the recipe.")
        changes = dict(given or {})
        name = f"benchmark.runs: {run!r}: sweep" if SWEEP in changes else "benchmark.sweep"
        own = changes.pop(SWEEP, sweep) or {}
        check_sweep(name, own)
        for field in own.keys() & changes.keys():
            raise CommandError(f"{name}: {field} is also among the changes of the run {run!r}. Remove one of the two.")
        for values in itertools.product(*own.values()):
            setting = dict(zip(own, values, strict=True))
            trials.append(Trial(run, setting, {**changes, **setting}))
    names = [trial.name for trial in trials]
    for name in names:
        if names.count(name) > 1:
            raise CommandError(f"benchmark.runs and benchmark.sweep make two runs named {name!r}. Rename a run.")
    return trials


def check_sweep(name: str, sweep: Any) -> None:
    """
    Check that a sweep maps fields to lists of different plain values.

    Args:
        name (`str`): The name of the sweep in an error.
        sweep (`Any`): The sweep as read from YAML.

    Raises:
        CommandError: If it is not a sweep.
    """
    if not isinstance(sweep, dict):
        raise CommandError(f"{name} is {sweep!r}; it must be a mapping of fields to lists of values.")
    for field, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise CommandError(f"{name}: {field} is {values!r}; it must be a list of values.")
        for value in values:
            if not isinstance(value, (str, int, float)) or FORBIDDEN_CHARACTERS.search(str(value)):
                raise CommandError(
                    f"{name}: {field} has the value {value!r}; it must be a number, a boolean or a string that can be"
                    " a part of the name of a folder."
                )
            if values.count(value) > 1:
                raise CommandError(f"{name}: {field} has the value {value!r} twice. Remove the duplicate.")
