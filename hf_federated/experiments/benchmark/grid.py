"""The grid of a benchmark: named variants of one recipe, each executed under several seeds.

`hf-federated benchmark` executes one run per name and seed of the section `benchmark`. A [`PlannedRun`] holds all
values that determine the result of a run, and digests of these values. The digests distinguish records of the current
recipe from records that were made before the recipe changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_federated.experiments.benchmark.claims import Claim, parse_claim
from hf_federated.experiments.benchmark.identity import full_digest, settings_digest
from hf_federated.experiments.benchmark.sweep import FORBIDDEN_CHARACTERS, SWEEP, SelectSection, check_sweep, trials_of
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.recipe.schema import check_section, dataclass_fields, documented
from hf_federated.experiments.recipe.yaml_file import apply_changes, merge_mappings


METHODS = ("federated", "centralized", "local")
# Fields that the grid sets itself, and fields that would fix a part of the randomness for all seeds.
RESERVED_FIELDS = ("training.seed", "training.output_dir")
FIXED_SEED_FIELDS = ("training.data_seed", "federation.federation_seed")


@dataclass
class BenchmarkSection:
    """
    The section `benchmark` of a recipe. [`read_section`] checks the types of its fields.

    Args:
        runs (`dict[str, dict]`):
            Maps the name of a run to its changes of the recipe: nested mappings, or dotted keys
            (`federation.aggregation: fedopt`). The key `method` is `"federated"` (default), `"centralized"` or
            `"local"`.
        title (`str`, *optional*):
            Heading of the tables. Defaults to the file name of the recipe.
        seeds (`list[int]`, *optional*, defaults to `[0, 1, 2]`):
            Every run is executed once per seed. The seed is used for sampling examples, partitioning, sampling clients
            and training.
        metric (`str`, *optional*):
            The metric to compare. Defaults to the main metric of the task.
        lower_is_better (`bool`, *optional*):
            Whether smaller values of the metric are better. By default, the task decides.
        further_metrics (`list[str]`, *optional*):
            Metrics for further columns of the table of results.
        paper (`dict[str, float]`, *optional*):
            Maps the name of a run to its published result.
        paper_setting (`str`, *optional*):
            One line that describes the setting of the published results.
        sweep (`dict[str, list]`, *optional*):
            Maps dotted names of fields to lists of values. Each run is executed with each combination. A run with a
            key `sweep` has its own combinations.
        select (`dict`, *optional*):
            With a sweep, execute each combination on validation examples under `select.seeds` (default `[0]`), and
            each run on the test examples with the combination that has the best `select.metric`.
        claims (`list[str]`, *optional*):
            Claims to check, such as `"A > B"`: run A is better than run B. The module
            [`~hf_federated.experiments.benchmark.claims`] lists all forms.
        former_claims (`list[str]`, *optional*):
            Claims that were changed or dropped after a run. The report keeps their rows, marked as former.
        margin (`float`, *optional*):
            The margin of claims of equality, `"A = B"`, that name neither a margin nor another metric.
        target (`float`, *optional*):
            A value of the metric. The report counts the rounds and the bytes until each run reaches it.
        prepared_by (`str`, *optional*):
            Script that prepared the examples, relative to the folder of the recipe. Each record contains its SHA-256.

    Raises:
        CommandError: If the name of a run is not a valid folder name, a published result names a run that does not
            exist, or a claim is invalid.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.grid import BenchmarkSection

    >>> runs = {"FedAvg": {}, "central": {"method": "centralized"}}
    >>> section = BenchmarkSection(runs, claims=["central > FedAvg"])
    >>> section.parsed_claims()[0].first, section.seeds
    ('central', [0, 1, 2])

    ```
    """

    runs: dict[str, Any] = field(
        metadata={
            "help": "Maps a run name to its changes of the recipe and its method (federated | centralized | local)."
        }
    )
    title: str | None = documented("Heading of the tables; default: the file name of the recipe.")
    seeds: list[int] = documented(
        "Every run is executed once per seed, which seeds data, partition, client sampling and training.",
        lambda: [0, 1, 2],
    )
    metric: str | None = documented("Metric to compare; default: the main metric of the task.")
    lower_is_better: bool | None = documented(
        "Whether smaller values of the metric are better; default: the task decides."
    )
    further_metrics: list[str] = documented("Metrics for further columns of the table of results.", list)
    paper: dict[str, float] = documented("Published results by the name of the run.", dict)
    paper_setting: str | None = documented("One line that describes the setting of the published results.")
    sweep: dict[str, Any] = documented("Values of fields, such as training.learning_rate: [0.1, 0.01].", dict)
    select: dict[str, Any] | None = documented(
        "Choose the best values of sweep for each run on validation examples: {metric: accuracy, seeds: [0]}."
    )
    claims: list[str] = documented(
        "Claims to check over the seeds, such as 'A > B' (run A is better) or 'A = B within 0.01'.", list
    )
    former_claims: list[str] = documented(
        "Claims that were changed or dropped after a run; the report keeps them.", list
    )
    margin: float | None = documented("Margin of claims of equality, 'A = B', that do not name one.")
    target: float | None = documented("Value of the metric, to which the report counts rounds and bytes.")
    prepared_by: str | None = documented(
        "Script that prepared the examples, relative to the recipe; each record contains its hash."
    )

    def __post_init__(self) -> None:
        self._check_runs()
        _check_seeds("benchmark.seeds", self.seeds)
        check_sweep("benchmark.sweep", self.sweep)
        if self.select is not None:
            _check_seeds("benchmark.select.seeds", self.selection.seeds)
        for name in ("title", "metric", "paper_setting", "prepared_by"):
            text = getattr(self, name)
            if text is not None and (not text.strip() or len(text.splitlines()) > 1):
                raise CommandError(f"benchmark.{name}: {text!r} is invalid; it must be one line of text.")
        for name, number in self.paper.items():
            self._check_run_exists("paper", name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise CommandError(f"benchmark.paper: {name!r} is {number!r}; it must be a finite number.")
        if self.margin is not None and (isinstance(self.margin, bool) or not 0 < self.margin < math.inf):
            raise CommandError(f"benchmark.margin is {self.margin!r}; it must be a positive number.")
        if self.target is not None and (isinstance(self.target, bool) or not math.isfinite(self.target)):
            raise CommandError(f"benchmark.target is {self.target!r}; it must be a finite number.")
        self.parsed_claims()

    def parsed_claims(self) -> list[Claim]:
        """The claims and the former claims, in the order of the recipe."""
        parsed: list[Claim] = []
        for name, texts in (("claims", self.claims), ("former_claims", self.former_claims)):
            for text in texts:
                with command_errors(f"benchmark.{name}"):
                    claim = parse_claim(text, self.runs, self.margin)
                if claim in parsed:
                    raise CommandError(f"benchmark.{name}: {text!r} is listed twice. Remove the duplicate.")
                parsed.append(claim)
        return parsed

    @property
    def selection(self) -> SelectSection:
        """The field `select` with its defaults."""
        fields = dataclass_fields(SelectSection)
        return SelectSection(**check_section("benchmark.select", self.select or {}, fields))

    def _check_run_exists(self, field_name: str, name: Any) -> None:
        if name not in self.runs:
            raise CommandError(f"benchmark.{field_name}: {name!r} is not a run. The runs are {', '.join(self.runs)}.")

    def _check_runs(self) -> None:
        if not self.runs:
            raise CommandError("benchmark.runs is empty. Add at least one run, a name with its changes.")
        folded: dict[str, str] = {}
        for name, changes in self.runs.items():
            if not isinstance(name, str) or not name or name != name.strip() or name[0] == "." or name[-1] == ".":
                raise CommandError(
                    f"benchmark.runs: {name!r} is not a valid name. A name must be a string without spaces or dots at"
                    " its start and end; put numbers in quotes."
                )
            if FORBIDDEN_CHARACTERS.search(name):
                raise CommandError(
                    f'benchmark.runs: {name!r} is not a valid folder name. Remove / \\ < > : " | ? * and control'
                    " characters."
                )
            other = folded.setdefault(name.casefold(), name)
            if other != name:
                raise CommandError(
                    f"benchmark.runs: {other!r} and {name!r} differ only in case, which many file systems ignore."
                    " Rename one of the runs."
                )
            own = dict(changes) if isinstance(changes, dict) else changes
            if isinstance(own, dict) and own.get(SWEEP) is not None:
                check_sweep(f"benchmark.runs: {name!r}: {SWEEP}", own.pop(SWEEP))
            _method_and_changes(name, own)


@dataclass(frozen=True)
class PlannedRun:
    """
    One run of a grid, with all values that determine its result.

    Args:
        name (`str`): Name of the run in the recipe.
        seed (`int`): Seed for partitioning, sampling and training.
        method (`str`): `"federated"`, `"centralized"` or `"local"`.
        values (`dict`): The recipe as read from YAML, with the run's changes and the seed.
        digest (`str`): SHA-256 of method and values, in hexadecimal, without `benchmark`, `training.output_dir` and
            the locations of data and models.
        full_digest (`str`): The same with the locations.
    """

    name: str
    seed: int
    method: str
    values: dict[str, Any]
    digest: str
    full_digest: str

    @property
    def key(self) -> tuple[str, int]:
        """Name and seed, which identify a run within its grid."""
        return self.name, self.seed

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def read_section(values: Mapping[str, Any]) -> BenchmarkSection:
    """
    Read the section `benchmark` of a recipe.

    Args:
        values (`Mapping[str, Any]`): The recipe as read from YAML.

    Raises:
        CommandError: If the section is missing, a field is unknown or of the wrong type, or a value is invalid.
    """
    given = values.get("benchmark")
    if not isinstance(given, dict):
        raise CommandError(
            "benchmark: the recipe has no such section. Add the section, or run the recipe with `hf-federated train`."
        )
    fields = check_section("benchmark", given, dataclass_fields(BenchmarkSection))
    has_sweep = "sweep" in fields or any(
        isinstance(changes, dict) and SWEEP in changes for changes in fields["runs"].values()
    )
    if has_sweep and fields.get("select") is None:
        # Without a selection, each trial is a run, which claims can name.
        trials = trials_of(fields["runs"], fields.pop("sweep", {}))
        fields["runs"] = {trial.name: trial.changes for trial in trials}
    return BenchmarkSection(**fields)


def plan_runs(
    values: Mapping[str, Any],
    section: BenchmarkSection,
    partition_has_seed: bool | Callable[[dict[str, Any]], bool] = True,
) -> list[PlannedRun]:
    """
    Plan the runs of a grid. All runs of a seed come before the runs of the next seed.

    The changes of a run are merged into the recipe: mappings are merged recursively, and other values are replaced. At
    the top level of the changes, a dot in a key separates section and field. In nested mappings, a dot is a part of
    the key.

    Args:
        values (`Mapping[str, Any]`):
            The recipe as read from YAML. It is not modified.
        section ([`BenchmarkSection`]):
            The section `benchmark` of the recipe.
        partition_has_seed (`bool` or `Callable`, *optional*, defaults to `True`):
            Whether the partitioner of the recipe takes a seed. A function is called with the section `partition` of
            each run. If the partitioner takes a seed, `partition.seed` is set to the seed of the run. `data.seed` is
            always set to the seed of the run. A run can override both fields in its changes.

    Returns:
        `list[PlannedRun]`: The runs in the order of execution.

    Raises:
        CommandError: If a run changes a field that the grid sets, or the recipe fixes a seed for all runs.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.grid import BenchmarkSection, plan_runs

    >>> recipe = {"federation": {"num_rounds": 5}}
    >>> section = BenchmarkSection(runs={"FedAvg": {}, "FedOpt": {"federation.aggregation": "fedopt"}}, seeds=[0, 7])
    >>> runs = plan_runs(recipe, section)
    >>> [str(run) for run in runs]
    ['FedAvg, seed 0', 'FedOpt, seed 0', 'FedAvg, seed 7', 'FedOpt, seed 7']
    >>> runs[3].values
    {'federation': {'num_rounds': 5, 'aggregation': 'fedopt'}, 'training': {'seed': 7}}

    ```
    """
    return [
        _plan_run(values, name, changes, seed, partition_has_seed)
        for seed in section.seeds
        for name, changes in section.runs.items()
    ]


def _plan_run(
    base: Mapping[str, Any],
    name: str,
    given: Mapping[str, Any] | None,
    seed: int,
    partition_has_seed: bool | Callable[[dict[str, Any]], bool],
) -> PlannedRun:
    method, changes = _method_and_changes(name, given)
    values = apply_changes(base, changes)
    for path in FIXED_SEED_FIELDS:
        if _look_up(values, path) is not None:
            raise CommandError(f"benchmark.seeds: {path} is set, so it would be the same under all seeds. Remove it.")
    if not isinstance(values.get("training"), (dict, type(None))):
        raise CommandError(f"training is {values['training']!r}; it must be a mapping of fields to values.")
    values = merge_mappings(values, {"training": {"seed": seed}})
    partition, data = values.get("partition"), values.get("data")
    if isinstance(data, dict) and _look_up(changes, "data.seed") is None:
        data["seed"] = seed
    if isinstance(partition, dict) and _look_up(changes, "partition.seed") is None:
        if partition_has_seed(partition) if callable(partition_has_seed) else partition_has_seed:
            partition["seed"] = seed
    return PlannedRun(name, seed, method, values, settings_digest(method, values), full_digest(method, values))


def _method_and_changes(name: str, given: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Return the method of a run and a copy of its changes as nested mappings."""
    prefix = f"benchmark.runs: {name!r}"
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise CommandError(f"{prefix} is {given!r}; it must be a mapping of changes of the recipe.")
    method = given.get("method", "federated")
    if method not in METHODS:
        raise CommandError(f"{prefix} has the method {method!r}; it must be one of {', '.join(METHODS)}.")
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise CommandError(f"{prefix} changes {key!r}; a key must be a section or of the form section.field.")
        if key != "method":
            for part in reversed(key.split(".")):
                value = {part: value}
            _check_disjoint(changes, value, prefix)
            changes = merge_mappings(changes, value)
    if "benchmark" in changes:
        raise CommandError(f"{prefix} changes the section benchmark. A run can change only the other sections.")
    for path in RESERVED_FIELDS:
        if _look_up(changes, path) is not None:
            raise CommandError(
                f"{prefix} sets {path}, which the benchmark sets. Remove it; seeds are in benchmark.seeds."
            )
    return method, changes


def _check_seeds(name: str, seeds: list[int]) -> None:
    if not seeds:
        raise CommandError(f"{name} is empty. List at least one integer.")
    for seed in seeds:
        # The range of NumPy's global generator, which Trainer seeds.
        if not 0 <= seed < 2**32:
            raise CommandError(f"{name}: {seed!r} is invalid; a seed must be an integer from 0 to 2^32-1.")
        if seeds.count(seed) > 1:
            raise CommandError(f"{name}: {seed} is listed twice. Remove the duplicate.")


def _check_disjoint(changes: Mapping[str, Any], more: Mapping[str, Any], prefix: str, path: str = "") -> None:
    """Reject a field that is given twice, once nested and once with a dotted key."""
    for key in changes.keys() & more.keys():
        if not (isinstance(changes[key], dict) and isinstance(more[key], dict)):
            raise CommandError(f"{prefix} changes {path}{key} twice. Remove one of the two changes.")
        _check_disjoint(changes[key], more[key], prefix, f"{path}{key}.")


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or `None` if the path does not exist."""
    found: Any = values
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
