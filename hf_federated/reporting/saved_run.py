"""`SavedRun`: the settings and results that a run has left in its output folder. It imports no trainer.

A run of a script leaves `_rounds.jsonl`, or at least a checkpoint. A run of a recipe also leaves its recipe and
`results.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils.run_files import CONFIG_NAME, LEDGER_NAME, RECIPE_NAME, RESULTS_NAME
from ..utils.untrusted_json import read_json
from .run_log import as_number
from .run_view import RunView, read_run, run_folder, trainer_state_of


# Settings that change what is written, and no result.
_WITHOUT_EFFECT = ("evaluate_clients", "live_report", "log_clients", "report_anomalies", "parallelism", "client_store")
# Sections of a recipe whose fields the log of a run has, or that change no result.
_OTHER_SECTIONS = ("federation", "training", "audit", "benchmark", "card", "compare", "network", "plots")


@dataclass(frozen=True)
class SavedRun:
    """
    The settings and results of a run.

    Args:
        name (`str`): Name of the run in a comparison.
        view ([`~hf_federated.reporting.run_view.RunView`]): The rounds of the run.
        settings (`dict[str, str]`): The settings that can change a result, by name.
        metrics (`dict[str, float]`): Metrics of the final model, without `eval_`.
        baselines (`dict[str, dict[str, float]]`): Metrics of the baselines of a recipe, by name.
        seconds (`float`, *optional*): Seconds of all rounds.
        num_bytes (`dict[int, tuple[int, int]]`): Bytes to and from the clients since the first round, by round.
    """

    name: str
    view: RunView
    settings: dict[str, str]
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float | None = None
    num_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> tuple[int, int] | None:
        """Bytes to and from the clients of the whole run."""
        return self.num_bytes[max(self.num_bytes)] if self.num_bytes else None

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the rounds at which a value was logged, with the value."""
        return self.view.curve(name)

    def curve_by_bytes(self, name: str) -> list[tuple[float, float]]:
        """Return the bytes in both directions at which a value was logged, with the value."""
        return [
            (float(sum(self.num_bytes[int(number)])), value)
            for number, value in self.curve(name)
            if int(number) in self.num_bytes
        ]


def read_saved_run(folder: str | os.PathLike[str], name: str | None = None) -> SavedRun:
    """
    Read the settings and results of a run.

    Args:
        folder (`str` or `os.PathLike`): Output folder of the run.
        name (`str`, *optional*): Name of the run. Defaults to the name of the folder.

    Raises:
        FileNotFoundError: If the folder contains no run.
        ValueError: If a file is damaged. The message names the file.

    Example:

    ```python
    >>> from hf_federated.reporting.saved_run import read_saved_run

    >>> read_saved_run("outputs/run").metrics  # doctest: +SKIP
    {'accuracy': 0.89, 'loss': 0.31}
    ```
    """
    path = run_folder(Path(folder))
    view = read_run(path)
    results = _mapping(path / RESULTS_NAME)
    found = results.get("federated")
    federated: dict[str, Any] = found if isinstance(found, dict) else {}
    seconds = [entry.seconds for entry in view.finished]
    known = [each for each in seconds if each is not None]
    logged = {
        metric.removeprefix("eval_"): value for metric in view.metrics if (value := view.last(metric)) is not None
    }
    return SavedRun(
        name=name or view.name,
        view=view,
        settings={key: value for key, value in _settings(path, view) if key not in _WITHOUT_EFFECT},
        metrics=logged | _numbers(federated.get("metrics")),
        baselines=_baselines(results.get("baselines")),
        seconds=sum(known) if known and len(known) == len(seconds) else as_number(federated.get("seconds")),
        num_bytes=_num_bytes(path, view),
    )


def _settings(folder: Path, view: RunView) -> Iterator[tuple[str, str]]:
    """Names and values of the settings, as texts."""
    state = trainer_state_of(folder)
    candidates = [folder] if state is None else [folder, state.parent]
    saved = next((each for each in candidates if (each / CONFIG_NAME).is_file()), folder)
    federation = view.start.federation or _mapping(saved / CONFIG_NAME)
    yield from _flat({"num_clients": view.start.num_clients, **federation, **view.start.arguments})
    recipe = _mapping(folder / RECIPE_NAME).get("recipe")
    sections = recipe if isinstance(recipe, dict) else {}
    yield from _flat({name: value for name, value in sections.items() if name not in _OTHER_SECTIONS})


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "none" if value is None else str(value)


def _num_bytes(folder: Path, view: RunView) -> dict[int, tuple[int, int]]:
    """Bytes since the first round, from the log, or else from the ledger that `save_model` writes."""
    found = {
        entry.number: (entry.bytes_down, entry.bytes_up)
        for entry in view.rounds
        if entry.bytes_down is not None and entry.bytes_up is not None
    }
    rounds = _mapping(folder / LEDGER_NAME).get("rounds")
    if len(found) >= len(view.rounds) or not isinstance(rounds, dict):
        return found
    down = up = 0
    for number in sorted(int(key) for key in rounds if key.isdigit()):
        accounts = rounds[str(number)]
        if not isinstance(accounts, dict) or not all(map(_is_account, accounts.values())):
            raise ValueError(f"{os.fspath(folder / LEDGER_NAME)!r} is not the ledger of a run.")
        down += sum(account[0] for account in accounts.values())
        up += sum(account[1] for account in accounts.values())
        found.setdefault(number + 1, (down, up))
    return found


def _is_account(account: Any) -> bool:
    return isinstance(account, list) and len(account) == 2 and all(type(number) is int for number in account)


def _mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dictionary if there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = read_json(path)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(path)!r} is damaged: it is not a dictionary.")
    return values


def _baselines(values: Any) -> dict[str, dict[str, float]]:
    named = values if isinstance(values, dict) else {}
    return {name: _numbers(result.get("metrics")) for name, result in named.items() if isinstance(result, dict)}


def _numbers(values: Any) -> dict[str, float]:
    named = values if isinstance(values, dict) else {}
    return {name: number for name, value in named.items() if (number := as_number(value)) is not None}
