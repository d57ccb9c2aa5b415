"""Recipes: one YAML file that says what to train, on which clients and how.

A recipe has the sections `model`, `data`, `task` (a task of `hf_federated.tasks` and its arguments), `partition` (a
partitioner of `hf_federated.data` and its arguments), `training` (any field of `transformers.TrainingArguments`),
`federation` (any field of [`FederatedConfig`]) or in its place `split` (any field of [`SplitConfig`]), and `card` (any
argument of `Trainer.create_model_card`), and beside them `compare`, `local_clients` and `plots`. Everything is checked
before anything is loaded; what is wrong is a [`RecipeError`] of one line. How the file is read is in `recipe_yaml.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from hf_federated.aggregation import build_aggregation
from hf_federated.config import FederatedConfig, ShareOrCount
from hf_federated.data.partitioners import PARTITIONERS, Partitioner
from hf_federated.distillation import build_distillation
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.recipe_schema import (
    RecipeError,
    RecipeField,
    check_section,
    dataclass_fields,
    unknown_field,
)
from hf_federated.experiments.recipe_sections import ClientModelSection, DataSection, ModelSection, PublicSection
from hf_federated.experiments.recipe_yaml import DEFAULT_TASK, read_values
from hf_federated.split_training import SplitConfig
from hf_federated.tasks import TASKS, Seq2Seq, SuperGlueSeq2Seq, Task


@dataclass(frozen=True)
class Choice:
    """
    A section that names a class and gives its arguments.

    Args:
        name (`str`): The name of the class in a recipe.
        cls (`type`): The class.
        arguments (`dict[str, Any]`): Arguments that were written; some may be left to be read from the data.
    """

    name: str
    cls: Any
    arguments: dict[str, Any]

    @property
    def writes(self) -> bool:
        """Of a task: whether it is evaluated on texts that its model writes."""
        return self.cls.trainer_class is Seq2SeqTrainer

    @property
    def joins_models(self) -> bool:
        """Of a task: whether its model can be an encoder and a decoder, joined."""
        return issubclass(self.cls, (Seq2Seq, SuperGlueSeq2Seq))


@dataclass
class Recipe:
    """
    What a run does.

    Args:
        model ([`ModelSection`]): The model that every client starts from.
        data ([`DataSection`]): The rows.
        task ([`Choice`]): How rows become inputs, and predictions metrics.
        partition ([`Choice`], *optional*): Who has which rows; `None` where the data set says so itself.
        training (`dict`, *optional*): Fields of `transformers.TrainingArguments`.
        federation (`dict`, *optional*): Fields of [`FederatedConfig`].
        split (`dict`, *optional*): Fields of [`SplitConfig`]: the model is split, and there are no rounds.
        card (`dict`, *optional*): Arguments of `Trainer.create_model_card`.
        public ([`PublicSection`], *optional*): Rows that are set aside for distillation.
        client_models (`list[ClientModelSection]`, *optional*): Models that are dealt out to the clients in turn.
        compare (`list[str]`, *optional*): Baselines to train in the same run: `"centralized"`, `"local"`.
        local_clients (`int`, *optional*): How many clients (seeded) train alone for `"local"`; all by default.
        plots (`bool`, *optional*, defaults to `False`): Write PNG plots of the learning curve and the partition.
        scale (`str`, *optional*, defaults to `"default"`): The name in `scales` that was taken.
        benchmark (`dict`, *optional*): What `hf-federated benchmark` makes of the recipe.
    """

    model: ModelSection
    data: DataSection
    task: Choice
    partition: Choice | None = None
    training: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] | None = None
    public: PublicSection | None = None
    client_models: list[ClientModelSection] = field(
        default_factory=list,
        metadata={"help": "Models dealt out to the clients in turn: {name_or_path, revision, kwargs, training} each."},
    )
    compare: list[Literal["centralized", "local"]] = field(
        default_factory=list, metadata={"help": "Baselines to train in the same run."}
    )
    local_clients: int | None = field(
        default=None, metadata={"help": "How many training clients (seeded) train alone for 'local'; default: all."}
    )
    plots: bool = field(default=False, metadata={"help": "Write learning_curve.png and partition.png (extra: plots)."})
    scale: str = field(default="default", metadata={"help": "What the recipe's scales lay over the rest."})
    benchmark: dict[str, Any] | None = field(
        default=None, metadata={"help": "The runs that hf-federated benchmark makes of the recipe."}
    )

    def __post_init__(self) -> None:
        if self.local_clients is not None and self.local_clients < 1:
            raise RecipeError(f"local_clients is {self.local_clients}; it must be at least 1.")
        if self.task.writes and self.training.get("predict_with_generate") is False:
            raise RecipeError(
                f"training.predict_with_generate is false; the task {self.task.name} is evaluated on what it writes."
            )
        if self.model.decoder_name_or_path is not None and not self.task.joins_models:
            raise RecipeError(f"model.decoder_name_or_path is for tasks of seq2seq; this one is {self.task.name}.")
        if self.split is not None:
            for name in ("federation", "public", "client_models"):
                if getattr(self, name):
                    raise RecipeError(f"split: clients of a split model have no {name}; leave that section out.")
        if self.public is not None and self.partition is None:
            raise RecipeError("public sets rows aside before they are cut into clients; name a partition.")


BESIDE = ("client_models", "compare", "local_clients", "plots", "scale", "benchmark")


def _federation_fields() -> dict[str, RecipeField]:
    """The fields of `FederatedConfig` with the types that YAML can write instead of those a command line can."""
    fields = dataclass_fields(FederatedConfig)
    written = {"aggregation_kwargs": dict[str, Any] | None, "distillation_kwargs": dict[str, Any] | None}
    for name, item in fields.items():
        annotation = int | float if item.annotation is ShareOrCount else written.get(name, item.annotation)
        fields[name] = dataclasses.replace(item, annotation=annotation)
    return fields


def _card_fields() -> dict[str, RecipeField]:
    parameters = list(inspect.signature(Trainer.create_model_card).parameters.values())[1:]
    return {item.name: RecipeField(item.name, Any, item.default) for item in parameters}


def task_fields(cls: type[Task]) -> dict[str, RecipeField]:
    """The arguments of a task. Names of labels can be left out: they are then read from the data."""
    fields = dataclass_fields(cls)
    for name, item in fields.items():
        if item.required:
            fields[name] = RecipeField(name, item.annotation | None, None, f"{item.help} (read from the data)")
    return fields


def choices() -> dict[str, dict[str, dict[str, RecipeField]]]:
    """
    The sections that name a class.

    Returns:
        `dict`: Section to name to the fields that the section may then have beside `name`.
    """
    partitioners: Mapping[str, type[Partitioner]] = PARTITIONERS
    return {
        "task": {name: task_fields(cls) for name, cls in TASKS.items()},
        "partition": {name: dataclass_fields(cls) for name, cls in partitioners.items()},
    }


def sections(task: str = DEFAULT_TASK) -> dict[str, dict[str, RecipeField]]:
    """
    The fields of every section that names no class, and under `""` those that stand beside the sections.

    Args:
        task (`str`, *optional*, defaults to `"text-classification"`): The task, whose trainer has its own arguments.

    Returns:
        `dict[str, dict[str, RecipeField]]`: Section name to field name to field, in the order of `--help`.
    """
    top = dataclass_fields(Recipe)
    # A list of mappings in YAML, each of which is checked by itself.
    top["client_models"] = dataclasses.replace(top["client_models"], annotation=list[dict])
    return {
        "model": dataclass_fields(ModelSection),
        "data": dataclass_fields(DataSection),
        "training": dataclass_fields(TASKS[task].arguments_class),
        "federation": _federation_fields(),
        "card": _card_fields(),
        "public": dataclass_fields(PublicSection),
        "split": dataclass_fields(SplitConfig),
        "": {name: top[name] for name in BESIDE},
    }


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """
    Reads a recipe and checks every name and type in it.

    Args:
        path (`str`): The YAML file.
        overrides (`Sequence[str]`, *optional*): `section.field=value` each; the value is YAML.

    Raises:
        RecipeError: If the file is missing or not YAML, or a field is unknown, missing or of the wrong type.

    Example:

    ```python
    >>> import pathlib, tempfile
    >>> from hf_federated.experiments.recipe import load_recipe

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "recipe.yaml"
    ...     _ = path.write_text("{model: {name_or_path: bert}, data: {path: you/clients}}")
    ...     load_recipe(path, ["training.learning_rate=5e-4"]).training
    {'learning_rate': 0.0005}

    ```
    """
    return parse_recipe(read_values(path, overrides))


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """
    Checks every name and type in what was read.

    Args:
        values (`Mapping[str, Any]`): As [`~hf_federated.experiments.recipe_yaml.read_values`] returns it.

    Raises:
        RecipeError: If a field is unknown, missing or of the wrong type.
    """
    chosen = choices()
    task_values = values.get("task")
    if isinstance(task_values, dict) and "name" not in task_values:
        task_values = {"name": DEFAULT_TASK, **task_values}
    task = _choose("task", {"name": DEFAULT_TASK} if task_values is None else task_values, chosen["task"], TASKS)
    assert task is not None
    partition = _choose("partition", values.get("partition"), chosen["partition"], PARTITIONERS)
    known = sections(task.name)
    beside = known.pop("")
    for key in values:
        if key not in known and key not in beside and key not in chosen:
            raise unknown_field(str(key), str(key), [*known, *chosen, *beside])
    # Sections that set rows aside, or split the model, are there or not.
    absent = {name for name in ("public", "split") if values.get(name) is None}
    checked = {
        name: check_section(name, values.get(name), fields) for name, fields in known.items() if name not in absent
    }
    others = check_section("", {key: value for key, value in values.items() if key in beside}, beside)
    models = [_client_model(place, item) for place, item in enumerate(others.get("client_models") or [])]
    return Recipe(
        model=ModelSection(**checked["model"]),
        data=DataSection(**checked["data"]),
        task=task,
        partition=partition,
        training=checked["training"],
        federation=checked["federation"],
        card=checked["card"],
        split=checked.get("split"),
        public=None if "public" in absent else PublicSection(**checked["public"]),
        **{**others, "compare": others.get("compare") or [], "client_models": models},
    )


def _client_model(place: int, values: Any) -> ClientModelSection:
    """One of the models for clients, with every name and type checked."""
    section = f"client_models[{place}]"
    checked = check_section(section, values, dataclass_fields(ClientModelSection))
    check_section(f"{section}.training", checked.get("training"), dataclass_fields(TrainingArguments))
    return ClientModelSection(**{**checked, "training": checked.get("training") or {}})


def check_recipe(values: Mapping[str, Any]) -> None:
    """
    Checks all that can be checked of a recipe without loading anything: names, types, and what fits together.

    Args:
        values (`Mapping[str, Any]`): As [`~hf_federated.experiments.recipe_yaml.read_values`] returns it.

    Raises:
        RecipeError: If it cannot be run.
    """
    recipe = parse_recipe(values)
    if recipe.split is not None:
        build("split", SplitConfig, recipe.split)
    federation: FederatedConfig = build("federation", FederatedConfig, recipe.federation)
    with recipe_errors("federation"):
        build_aggregation(federation.aggregation, federation.aggregation_kwargs)
        build_distillation(federation.distillation, federation.distillation_kwargs)


def partitioner_has_seed(partition: Mapping[str, Any]) -> bool:
    """Whether the partitioner of a recipe's section `partition` draws anything."""
    return "seed" in choices()["partition"].get(str(partition.get("name")), {})


def _choose(
    section: str, values: Any, fields: dict[str, dict[str, RecipeField]], classes: Mapping[str, Any]
) -> Choice | None:
    if values is None:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("name"), str) or values["name"] not in classes:
        given = values.get("name") if isinstance(values, dict) else values
        raise RecipeError(f"{section}.name is {given!r}; it must be one of {', '.join(classes)}.")
    name = values["name"]
    arguments = {key: value for key, value in values.items() if key != "name"}
    check_section(section, arguments, fields[name])
    # A class knows best what fits together; what needs the data is left out here and given later.
    required = [item.name for item in dataclasses.fields(classes[name]) if item.default is dataclasses.MISSING]
    if all(arguments.get(item) is not None for item in required):
        build(section, classes[name], arguments)
    return Choice(name, classes[name], arguments)


@contextmanager
def recipe_errors(section: str) -> Iterator[None]:
    """Turns what a library says about a section's values into a [`RecipeError`] that names the section."""
    try:
        with command_errors(section):
            yield
    except RecipeError:
        raise
    except CommandError as error:
        raise RecipeError(str(error)) from error


def build(section: str, function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Calls `function(**values)`; what it refuses is a [`RecipeError`]."""
    with recipe_errors(section):
        return function(**values)
