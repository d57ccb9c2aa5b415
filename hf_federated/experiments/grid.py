"""The grid of a benchmark: named changes of one recipe, each under several seeds.

A recipe with a section `benchmark` is run once a name and seed. What a run is, down to the last value, is in its
[`PlannedRun`], whose digest tells a run that was made from one whose recipe has changed since.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.recipe_yaml import lay_over, merged


METHODS = ("federated", "centralized", "local")
# What a file name may not hold on one system or another; `>` also stands between the names of a claim.
FORBIDDEN = re.compile(r'[/\\<>:"|?*\x00-\x1f\x7f]')
# What the grid sets itself, and what would keep a part of the randomness the same under all seeds.
OWN_FIELDS = ("training.seed", "training.output_dir")
FIXED_SEEDS = ("training.data_seed", "federation.federation_seed")


@dataclass
class BenchmarkSection:
    """
    The section `benchmark` of a recipe: what is compared, under which seeds, and with which published numbers.

    Args:
        runs (`dict[str, dict]`):
            Name of a run to its changes of the recipe: nested mappings, or dotted keys
            (`federation.aggregation: fedopt`). The key `method` is `"federated"` (default), `"centralized"` or
            `"local"`.
        title (`str`, *optional*):
            Heading of the tables; the recipe's file name by default.
        seeds (`list[int]`, *optional*, defaults to `[0, 1, 2]`):
            Each is the seed of which rows are drawn, of the partition, of sampling and of training.
        metric (`str`, *optional*):
            The metric that is compared; the task's main metric by default.
        lower_is_better (`bool`, *optional*):
            Whether a smaller value of the metric is the better one; what the task says of its main metric by default.
        paper (`dict[str, float]`, *optional*):
            Name of a run to its published number.
        paper_setting (`str`, *optional*):
            One line: under which setting the numbers were published.
        claims (`list[str]`, *optional*):
            Orderings to check, `"A > B"` each: run A is better than run B.

    Raises:
        CommandError: If a field is of the wrong type, a name cannot be that of a folder, or a number or claim is
            about a run that does not exist.

    Example:

    ```python
    >>> from hf_federated.experiments.grid import BenchmarkSection

    >>> runs = {"FedAvg": {}, "central": {"method": "centralized"}}
    >>> section = BenchmarkSection(runs, claims=["central > FedAvg"])
    >>> section.orderings, section.seeds
    ([('central', 'FedAvg')], [0, 1, 2])

    ```
    """

    runs: dict[str, Any] = field(
        metadata={"help": "Name of a run to its changes of the recipe, and method: federated | centralized | local."}
    )
    title: str | None = field(default=None, metadata={"help": "Heading of the tables; default: the file's name."})
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2],
        metadata={"help": "Every run is made once with each, as the seed of rows, partition, sampling and training."},
    )
    metric: str | None = field(default=None, metadata={"help": "What is compared; default: the task's main metric."})
    lower_is_better: bool | None = field(
        default=None, metadata={"help": "Whether a smaller value of the metric is better; default: as the task says."}
    )
    paper: dict[str, float] = field(default_factory=dict, metadata={"help": "Published numbers by name of run."})
    paper_setting: str | None = field(
        default=None, metadata={"help": "One line: the setting of the published numbers."}
    )
    claims: list[str] = field(
        default_factory=list, metadata={"help": "Orderings to check over the seeds: 'A > B' means that A is better."}
    )

    def __post_init__(self) -> None:
        self._check_runs()
        self._check_seeds()
        for name in ("title", "metric", "paper_setting"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text.strip() or len(text.splitlines()) > 1):
                raise CommandError(f"benchmark.{name}: {text!r} is not one line of text.")
        if not isinstance(self.lower_is_better, (bool, type(None))):
            raise CommandError(f"benchmark.lower_is_better: {self.lower_is_better!r} is neither true nor false.")
        if not isinstance(self.paper, dict):
            raise CommandError(f"benchmark.paper: {self.paper!r} is not a mapping of names of runs to numbers.")
        for name, number in self.paper.items():
            self._check_run_exists("paper", name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise CommandError(f"benchmark.paper: the number of {name!r} is {number!r}; it must be finite.")
        if not isinstance(self.claims, list):
            raise CommandError(f"benchmark.claims: {self.claims!r} is not a list of orderings 'A > B'.")
        for better, worse in self.orderings:
            self._check_run_exists("claims", better)
            self._check_run_exists("claims", worse)

    @property
    def orderings(self) -> list[tuple[str, str]]:
        """The claims as pairs of names of runs: the better one, the worse one."""
        pairs = []
        for claim in self.claims:
            names = [name.strip() for name in claim.split(">")] if isinstance(claim, str) else []
            if len(names) != 2 or names[0] == names[1]:
                raise CommandError(f"benchmark.claims: {claim!r} is not of the form 'A > B' with two names of runs.")
            pairs.append((names[0], names[1]))
        return pairs

    def _check_run_exists(self, field_name: str, name: Any) -> None:
        if name not in self.runs:
            raise CommandError(f"benchmark.{field_name}: {name!r} is not a run. The runs are {', '.join(self.runs)}.")

    def _check_runs(self) -> None:
        if not isinstance(self.runs, dict) or not self.runs:
            raise CommandError(f"benchmark.runs: {self.runs!r} is not a mapping of names to changes of the recipe.")
        folded: dict[str, str] = {}
        for name, changes in self.runs.items():
            if not isinstance(name, str) or not name or name != name.strip() or name[0] == "." or name[-1] == ".":
                raise CommandError(
                    f"benchmark.runs: {name!r} cannot name a run; a name is text that begins and ends with neither a"
                    " space nor a dot (quote numbers)."
                )
            if FORBIDDEN.search(name):
                raise CommandError(
                    f'benchmark.runs: {name!r} cannot name a run, which is a folder too; leave out / \\ < > : " | ? *'
                    " and control characters."
                )
            other = folded.setdefault(name.casefold(), name)
            if other != name:
                raise CommandError(f"benchmark.runs: {other!r} and {name!r} are one folder on many systems.")
            _method_and_changes(name, changes)

    def _check_seeds(self) -> None:
        if not isinstance(self.seeds, list) or not self.seeds:
            raise CommandError(f"benchmark.seeds: {self.seeds!r} is not a list of whole numbers.")
        for seed in self.seeds:
            # NumPy's global generator, which Trainer seeds, takes no others.
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
                raise CommandError(
                    f"benchmark.seeds: {seed!r} is no seed; it must be a whole number from 0 to 2^32-1."
                )
            if self.seeds.count(seed) > 1:
                raise CommandError(f"benchmark.seeds: {seed} stands twice; every seed is run once.")


@dataclass(frozen=True)
class PlannedRun:
    """
    One run of a grid, with everything that decides its result.

    Args:
        name (`str`): Name of the run in the recipe.
        seed (`int`): Seed of the partition, of sampling and of training.
        method (`str`): `"federated"`, `"centralized"` or `"local"`.
        values (`dict`): The recipe as read from YAML, with the run's changes and the seed.
        digest (`str`): SHA-256 of method and values, in hexadecimal; `benchmark` and `training.output_dir` count not.
    """

    name: str
    seed: int
    method: str
    values: dict[str, Any]
    digest: str

    @property
    def key(self) -> tuple[str, int]:
        """Name and seed, which no two runs of a grid share."""
        return self.name, self.seed

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def read_section(values: Mapping[str, Any]) -> BenchmarkSection:
    """
    The section `benchmark` of a recipe.

    Args:
        values (`Mapping[str, Any]`): The recipe as read from YAML.

    Raises:
        CommandError: If the section is missing or wrong.
    """
    given = values.get("benchmark")
    if not isinstance(given, dict):
        raise CommandError("benchmark: the recipe has no such section; `hf-federated train` needs none.")
    known = [item.name for item in dataclasses.fields(BenchmarkSection)]
    for name in given:
        if name not in known:
            raise CommandError(f"benchmark.{name}: is not a field of the section. Allowed: {', '.join(known)}.")
    if "runs" not in given:
        raise CommandError("benchmark.runs: is missing; it maps names to changes of the recipe.")
    return BenchmarkSection(**given)


def plan(
    values: Mapping[str, Any],
    section: BenchmarkSection,
    partition_has_seed: bool | Callable[[dict[str, Any]], bool] = True,
) -> list[PlannedRun]:
    """
    The runs of a grid. All runs of the first seed come first, so that a half-finished grid has whole seeds.

    A run's changes are merged into the recipe: mappings are merged key by key, anything else is replaced. A dot at the
    top level of the changes parts section and field; below, a key is taken as it is.

    Args:
        values (`Mapping[str, Any]`):
            The recipe as read from YAML. It is left as it is.
        section ([`BenchmarkSection`]):
            Its section `benchmark`.
        partition_has_seed (`bool` or `Callable`, *optional*, defaults to `True`):
            Whether the partitioner of the recipe's `partition` takes a seed; a function is called with the `partition`
            of each run. If so, `partition.seed` is the run's seed, as `data.seed` always is, unless the run's changes
            say otherwise.

    Raises:
        CommandError: If a run changes what the grid sets, or a seed of the recipe would hold for all runs.

    Example:

    ```python
    >>> from hf_federated.experiments.grid import BenchmarkSection, plan

    >>> recipe = {"federation": {"num_rounds": 5}}
    >>> section = BenchmarkSection(runs={"FedAvg": {}, "FedOpt": {"federation.aggregation": "fedopt"}}, seeds=[0, 7])
    >>> runs = plan(recipe, section)
    >>> [str(run) for run in runs]
    ['FedAvg, seed 0', 'FedOpt, seed 0', 'FedAvg, seed 7', 'FedOpt, seed 7']
    >>> runs[3].values
    {'federation': {'num_rounds': 5, 'aggregation': 'fedopt'}, 'training': {'seed': 7}}

    ```
    """
    return [
        _planned(values, name, changes, seed, partition_has_seed)
        for seed in section.seeds
        for name, changes in section.runs.items()
    ]


def _planned(
    base: Mapping[str, Any],
    name: str,
    given: Mapping[str, Any] | None,
    seed: int,
    partition_has_seed: bool | Callable[[dict[str, Any]], bool],
) -> PlannedRun:
    method, changes = _method_and_changes(name, given)
    values = lay_over(base, changes)
    for path in FIXED_SEEDS:
        if _look_up(values, path) is not None:
            raise CommandError(f"benchmark.seeds: {path} would be the same under all seeds; remove it.")
    if not isinstance(values.get("training"), (dict, type(None))):
        raise CommandError(f"training is {values['training']!r}; it must be a mapping of fields to values.")
    values = merged(values, {"training": {"seed": seed}})
    partition, data = values.get("partition"), values.get("data")
    if isinstance(data, dict) and _look_up(changes, "data.seed") is None:
        data["seed"] = seed
    if isinstance(partition, dict) and _look_up(changes, "partition.seed") is None:
        if partition_has_seed(partition) if callable(partition_has_seed) else partition_has_seed:
            partition["seed"] = seed
    return PlannedRun(name, seed, method, values, _digest(method, values))


def _method_and_changes(name: str, given: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """A run's method, and its changes as nested mappings of their own."""
    where = f"benchmark.runs: {name!r}"
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise CommandError(f"{where} is {given!r}; it must be a mapping of changes of the recipe.")
    method = given.get("method", "federated")
    if method not in METHODS:
        raise CommandError(f"{where} has the method {method!r}; allowed are {', '.join(METHODS)}.")
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise CommandError(f"{where} changes {key!r}, which is neither a section nor of the form section.field.")
        if key != "method":
            for part in reversed(key.split(".")):
                value = {part: value}
            _check_disjoint(changes, value, where)
            changes = merged(changes, value)
    if "benchmark" in changes:
        raise CommandError(f"{where} changes the benchmark itself; it may change the other sections.")
    for path in OWN_FIELDS:
        if _look_up(changes, path) is not None:
            raise CommandError(f"{where} sets {path}, which is the benchmark's; seeds stand in benchmark.seeds.")
    return method, changes


def _check_disjoint(changes: Mapping[str, Any], more: Mapping[str, Any], where: str, path: str = "") -> None:
    """A field given nested and once more with dots would have two values."""
    for key in changes.keys() & more.keys():
        if not (isinstance(changes[key], dict) and isinstance(more[key], dict)):
            raise CommandError(f"{where} changes {path}{key} twice.")
        _check_disjoint(changes[key], more[key], where, f"{path}{key}.")


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or `None`."""
    found: Any = values
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _digest(method: str, values: Mapping[str, Any]) -> str:
    counted = {name: value for name, value in values.items() if name != "benchmark"}
    if isinstance(counted.get("training"), dict):
        counted["training"] = {name: value for name, value in counted["training"].items() if name != "output_dir"}
    content = {"method": method, "recipe": counted}
    with command_errors("keys of the recipe, which have to be text"):
        # YAML also has dates, which JSON has not.
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()
