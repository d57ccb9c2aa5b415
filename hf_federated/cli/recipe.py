"""Recipes: one YAML file that says what to train, on which clients and how.

A recipe has the sections `model`, `data`, `training` (any field of `transformers.TrainingArguments`), `federation`
(any field of [`FederatedConfig`]) and `card` (any argument of `Trainer.create_model_card`), and beside them `compare`,
`local_clients` and `plots`. Everything is checked before anything is loaded; what is wrong is a [`RecipeError`] of one
line. Numbers and truth values are read as YAML 1.2 writes them: `5e-4` is a number, `no` is a word.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import yaml
from transformers import Trainer, TrainingArguments

from hf_federated.cli.errors import CommandError, command_errors
from hf_federated.config import FederatedConfig, ShareOrCount


class RecipeError(CommandError):
    """A recipe that cannot be run. The message is one line: what was given, and what is allowed."""


@dataclass
class ModelSection:
    """The model that every client starts from."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."})
    task: Literal["sequence-classification"] = field(
        default="sequence-classification", metadata={"help": "What the model's head does."}
    )
    lora: dict[str, Any] | None = field(
        default=None, metadata={"help": "Any fields of peft.LoraConfig; clients then train and send the adapter only."}
    )


@dataclass
class DataSection:
    """The rows, whose they are, and which clients are held out to test on."""

    path: str = field(metadata={"help": "Hub id, or a local folder or file of parquet, JSON or CSV."})
    name: str | None = field(default=None, metadata={"help": "Configuration of the data set on the Hub."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the data set on the Hub."})
    train_split: str = field(default="train", metadata={"help": "Split that is dealt out to clients."})
    text_column: str | list[str] = field(
        default="text", metadata={"help": "Column of the text, or two columns of a pair of texts."}
    )
    label_column: str = field(default="label", metadata={"help": "Column of the label."})
    client_column: str | None = field(
        default=None, metadata={"help": "Column that says whose a row is (natural clients)."}
    )
    num_clients: int | None = field(
        default=None, metadata={"help": "Deal rows out evenly to so many clients, instead of client_column."}
    )
    min_rows_per_client: int | None = field(
        default=None, metadata={"help": "Leave out clients of client_column with fewer rows."}
    )
    max_clients: int | None = field(default=None, metadata={"help": "Train on so many clients at most (seeded)."})
    test_clients: int | float = field(
        default=0.2, metadata={"help": "Clients held out as the test set (seeded): a count (10) or a share (0.2)."}
    )
    max_length: int = field(default=128, metadata={"help": "Tokens after which a text is cut."})
    seed: int = field(default=0, metadata={"help": "Seed of dealing out rows and of holding out clients."})

    def __post_init__(self) -> None:
        if (self.client_column is None) == (self.num_clients is None):
            raise RecipeError("data: give either client_column (natural clients) or num_clients (even shares).")
        if self.num_clients is not None and self.min_rows_per_client is not None:
            raise RecipeError("data.min_rows_per_client goes with client_column; rows dealt out evenly need none.")
        if isinstance(self.text_column, list) and len(self.text_column) not in (1, 2):
            raise RecipeError(
                f"data.text_column names {len(self.text_column)} columns; a model reads one or two texts."
            )
        share = isinstance(self.test_clients, float)
        if not (0 < self.test_clients < 1 if share else self.test_clients >= 1):
            raise RecipeError(
                f"data.test_clients is {self.test_clients}; give a count of at least 1 or a share between 0 and 1."
            )
        for name in ("num_clients", "max_clients", "min_rows_per_client", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"data.{name} is {value}; it must be at least 1.")


@dataclass
class Recipe:
    """
    What a run does.

    Args:
        model ([`ModelSection`]): The model that every client starts from.
        data ([`DataSection`]): The rows and their clients.
        training (`dict`, *optional*): Fields of `transformers.TrainingArguments`.
        federation (`dict`, *optional*): Fields of [`FederatedConfig`].
        card (`dict`, *optional*): Arguments of `Trainer.create_model_card`.
        compare (`list[str]`, *optional*): Baselines to train in the same run: `"centralized"`, `"local"`.
        local_clients (`int`, *optional*): How many clients (seeded) train alone for `"local"`; all by default.
        plots (`bool`, *optional*, defaults to `False`): Write PNG plots of the learning curve and the partition.
    """

    model: ModelSection
    data: DataSection
    training: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    compare: list[Literal["centralized", "local"]] = field(
        default_factory=list, metadata={"help": "Baselines to train in the same run."}
    )
    local_clients: int | None = field(
        default=None, metadata={"help": "How many training clients (seeded) train alone for 'local'; default: all."}
    )
    plots: bool = field(default=False, metadata={"help": "Write learning_curve.png and partition.png (extra: plots)."})

    def __post_init__(self) -> None:
        if self.local_clients is not None and self.local_clients < 1:
            raise RecipeError(f"local_clients is {self.local_clients}; it must be at least 1.")


@dataclass(frozen=True)
class RecipeField:
    """One field of a recipe as `--help` and the checks need it."""

    name: str
    annotation: Any
    default: Any
    help: str = ""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def _dataclass_fields(cls: type) -> dict[str, RecipeField]:
    annotations = typing.get_type_hints(cls)
    fields = {}
    for item in dataclasses.fields(cls):
        default = item.default
        if default is dataclasses.MISSING and item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        fields[item.name] = RecipeField(item.name, annotations[item.name], default, item.metadata.get("help", ""))
    return fields


def _federation_fields() -> dict[str, RecipeField]:
    """The fields of `FederatedConfig` with the types that YAML can write instead of those a command line can."""
    fields = _dataclass_fields(FederatedConfig)
    written = {"aggregation_kwargs": dict[str, Any] | None}
    for name, item in fields.items():
        annotation = int | float if item.annotation is ShareOrCount else written.get(name, item.annotation)
        fields[name] = dataclasses.replace(item, annotation=annotation)
    return fields


def _card_fields() -> dict[str, RecipeField]:
    parameters = list(inspect.signature(Trainer.create_model_card).parameters.values())[1:]
    return {item.name: RecipeField(item.name, Any, item.default) for item in parameters}


def sections() -> dict[str, dict[str, RecipeField]]:
    """
    The fields of every section, and under `""` those that stand beside the sections.

    Returns:
        `dict[str, dict[str, RecipeField]]`: Section name to field name to field, in the order of `--help`.
    """
    top = _dataclass_fields(Recipe)
    return {
        "model": _dataclass_fields(ModelSection),
        "data": _dataclass_fields(DataSection),
        "training": _dataclass_fields(TrainingArguments),
        "federation": _federation_fields(),
        "card": _card_fields(),
        "": {name: top[name] for name in ("compare", "local_clients", "plots")},
    }


def type_name(annotation: Any) -> str:
    """A type as a person reads it: `int or float`, `list of str`, the choices of an enumeration."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        names = [type_name(item) for item in arguments if item is not type(None)]
        choices = [type_name(item) for item in arguments if _is_enum(item)]
        kept = choices or list(dict.fromkeys(names))  # an enumeration says more than the `str` beside it
        return " or ".join(kept + (["null"] if type(None) in arguments else []))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is list:
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if origin is dict:
        return "mapping"
    if _is_enum(annotation):
        return " | ".join(str(item.value) for item in annotation)
    words: dict[Any, str] = {Any: "any", dict: "mapping", bool: "true | false"}
    return words.get(annotation) or annotation.__name__


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value read from YAML may be given to a field of this type. Whole numbers pass for floats."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        # Where an enumeration stands beside `str`, only its own values are meant.
        enums = [item for item in arguments if _is_enum(item)]
        return any(_fits(value, item) for item in arguments if not (enums and item is str))
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict or annotation is dict:
        return isinstance(value, dict)
    if _is_enum(annotation):
        return value in [item.value for item in annotation]
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # Anything else is a class of its own (say, accelerate's ParallelismConfig) that YAML cannot write.
    return isinstance(value, annotation)


def _check_section(name: str, values: Any, fields: dict[str, RecipeField]) -> dict[str, Any]:
    prefix = f"{name}." if name else ""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{name or 'the recipe'} is {values!r}; it must be a mapping of fields to values.")
    for key, value in values.items():
        if key not in fields:
            raise RecipeError(_unknown(f"{prefix}{key}", str(key), list(fields)))
        if not _fits(value, fields[key].annotation):
            raise RecipeError(
                f"{prefix}{key} is {value!r} ({type(value).__name__}); it must be {type_name(fields[key].annotation)}."
            )
    for key, item in fields.items():
        if item.required and key not in values:
            raise RecipeError(f"{prefix}{key} is missing; it must be {type_name(item.annotation)}: {item.help}")
    return values


def _unknown(given: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    listed = ", ".join(known) if len(known) <= 30 else "the fields that `hf-federated train --help` lists"
    return f"{given} is not a field of a recipe; {hint}Allowed: {listed}."


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
    >>> from hf_federated.cli.recipe import load_recipe

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "recipe.yaml"
    ...     _ = path.write_text("{model: {name_or_path: bert}, data: {path: imdb, num_clients: 10}}")
    ...     load_recipe(path, ["training.learning_rate=5e-4"]).training
    {'learning_rate': 0.0005}

    ```
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = _read_yaml(file.read(), str(path)) or {}
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {os.fspath(path)!r}: {error.strerror}.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{os.fspath(path)!r} holds a {type(values).__name__}; a recipe is a mapping of sections.")
    for override in overrides:
        _override(values, override)
    known = sections()
    beside = known.pop("")
    for key in values:
        if key not in known and key not in beside:
            raise RecipeError(_unknown(str(key), str(key), [*known, *beside]))
    checked = {name: _check_section(name, values.get(name), fields) for name, fields in known.items()}
    others = _check_section("", {key: value for key, value in values.items() if key in beside}, beside)
    others["compare"] = others.get("compare") or []
    return Recipe(
        model=ModelSection(**checked["model"]),
        data=DataSection(**checked["data"]),
        training=checked["training"],
        federation=checked["federation"],
        card=checked["card"],
        **others,
    )


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"--set {override!r} is not of the form section.field=value.")
    *folders, last = key.split(".")
    for folder in folders:
        inner = values.get(folder)
        if inner is None:
            inner = values[folder] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"--set {override!r}: {folder} is {inner!r}, which has no fields.")
        values = inner
    values[last] = _read_yaml(text, f"--set {override}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers and truth values; a key that stands twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, where 5e-4 is text and `no` (an `eval_strategy`) is false.
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def _read_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not YAML: {' '.join(str(error).split())}") from error


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
