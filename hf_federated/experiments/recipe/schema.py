"""The fields that a section of a recipe accepts, and the validation of a section against these fields."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.utils.fields import ShareOrCount, check_of, is_enum


# Number of unknown fields of a section that an error lists.
MAX_UNKNOWN_FIELDS = 20
# Length of the longest name for which similar names are searched.
MAX_KEY_CHARACTERS = 100

# Usual names of fields, and the fields of a recipe that have this meaning. A section suggests the fields that it has.
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "eta": ("learning_rate",),
    "client_lr": ("learning_rate",),
    "batch_size": ("per_device_train_batch_size",),
    "train_batch_size": ("per_device_train_batch_size",),
    "local_batch_size": ("per_device_train_batch_size",),
    "test_batch_size": ("per_device_eval_batch_size",),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "epochs": ("num_train_epochs", "local_epochs"),
    "num_epochs": ("num_train_epochs", "local_epochs"),
    "steps": ("max_steps", "local_steps"),
    "optimizer": ("optim",),
    "scheduler": ("lr_scheduler_type",),
    "lr_scheduler": ("lr_scheduler_type",),
    "lr_schedule": ("lr_scheduler_type",),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
    "l2": ("weight_decay",),
    "grad_clip": ("max_grad_norm",),
    "clip_grad_norm": ("max_grad_norm",),
    "gradient_clipping": ("max_grad_norm",),
    "grad_accum": ("gradient_accumulation_steps",),
    "accumulation_steps": ("gradient_accumulation_steps",),
    "evaluation_strategy": ("eval_strategy",),
    "no_cuda": ("use_cpu",),
    "cpu": ("use_cpu",),
    "device": ("use_cpu",),
    "output": ("output_dir",),
    "rounds": ("num_rounds",),
    "communication_rounds": ("num_rounds",),
    "algorithm": ("aggregation", "distillation"),
    "strategy": ("aggregation",),
    "method": ("aggregation", "distillation"),
    "fraction_fit": ("clients_per_round",),
    "client_fraction": ("clients_per_round",),
    "participation": ("clients_per_round",),
    "sample_rate": ("clients_per_round",),
    "seed": ("federation_seed",),
    "model": ("name_or_path",),
    "name": ("name_or_path",),
    "model_name": ("name_or_path",),
    "model_name_or_path": ("name_or_path",),
    "dataset": ("path",),
    "dataset_name": ("path",),
    "data_path": ("path",),
    "max_seq_length": ("max_length",),
    "max_len": ("max_length",),
    "concentration": ("alpha",),
    "dirichlet_alpha": ("alpha",),
    "clients": ("num_clients",),
}


class RecipeError(CommandError):
    """
    An invalid recipe. Each mistake is one line, which states the given value and the allowed values.

    Args:
        mistakes (`str`): The mistakes. The message of a single mistake is the mistake itself.

    Attributes:
        mistakes (`tuple[str, ...]`): The mistakes.
    """

    def __init__(self, *mistakes: str) -> None:
        self.mistakes = mistakes
        lines = [f"the recipe has {len(mistakes)} mistakes:", *(f"  - {mistake}" for mistake in mistakes)]
        super().__init__(mistakes[0] if len(mistakes) == 1 else "\n".join(lines))


class Mistakes:
    """
    Collects the mistakes of a recipe, so that one error lists all of them.

    Example:

    ```python
    >>> from hf_federated.experiments.recipe.schema import Mistakes, RecipeError

    >>> mistakes = Mistakes()
    >>> for name in ("a", "b"):
    ...     with mistakes.collect():
    ...         raise RecipeError(f"{name} is wrong.")
    >>> mistakes.found
    ['a is wrong.', 'b is wrong.']

    ```
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch a [`RecipeError`] and keep its mistakes. The rest of the block is skipped."""
        try:
            yield
        except RecipeError as error:
            self.found += [mistake for mistake in error.mistakes if mistake not in self.found]

    def raise_found(self) -> None:
        """Raise a [`RecipeError`] with all mistakes, if there are any."""
        if self.found:
            raise RecipeError(*self.found)


@contextmanager
def recipe_errors(section: str) -> Iterator[None]:
    """Convert an error from a library into a [`RecipeError`] that names the section."""
    try:
        with command_errors(section):
            yield
    except RecipeError:
        raise
    except CommandError as error:
        raise RecipeError(str(error)) from error


def build(section: str, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """
    Return `function(**values)`.

    Args:
        section (`str`): The section of the recipe that contains `values`, for error messages.
        function (`Callable`): A class or function.
        values (`Mapping[str, Any]`): The keyword arguments.

    Raises:
        RecipeError: If `function` rejects the values.
    """
    with recipe_errors(section):
        return function(**values)


def build_config(section: str, cls: type, values: Mapping[str, Any]) -> Any:
    """
    Build a configuration whose fields are optional.

    Args:
        section (`str`): The section of the recipe that contains `values`, for error messages.
        cls (`type`): A dataclass that checks each field in `__post_init__`.
        values (`Mapping[str, Any]`): The fields.

    Raises:
        RecipeError: If a field or a combination of fields is invalid. The error lists the mistakes of all fields.
    """
    try:
        return build(section, cls, values)
    except RecipeError:
        # The constructor stops at the first mistake. A field that is invalid without the other fields has a mistake.
        mistakes, valid = Mistakes(), {}
        for name, value in values.items():
            with mistakes.collect():
                build(section, cls, {name: value})
                valid[name] = value
        with mistakes.collect():
            build(section, cls, valid)
        raise RecipeError(*mistakes.found) from None


@dataclass(frozen=True)
class RecipeField:
    """
    One field of a recipe, as used by `--help` and by validation.

    Args:
        name (`str`): Name of the field.
        annotation (`Any`): Type of the field.
        default (`Any`): Default value, or `dataclasses.MISSING` for a required field.
        help (`str`, *optional*, defaults to `""`): Description of the field.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING


def dataclass_fields(cls: type) -> dict[str, RecipeField]:
    """The fields of a dataclass by name. The help comes from a field's metadata or from the class docstring."""
    annotations, texts = typing.get_type_hints(cls), argument_help(cls)
    fields = {}
    for item in dataclasses.fields(cls):
        default = item.default
        if default is dataclasses.MISSING and item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        help_text = item.metadata.get("help") or texts.get(item.name, "")
        fields[item.name] = RecipeField(item.name, annotations[item.name], default, help_text)
    return fields


def argument_help(cls: type) -> dict[str, str]:
    """The first sentence of each entry in the `Args:` section of a class docstring, by argument name."""
    return documented_arguments(inspect.getdoc(cls) or "")


def documented_arguments(documentation: str) -> dict[str, str]:
    """The first sentence of each entry in the `Args:` section of a docstring, by argument name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", documentation, flags=re.DOTALL | re.MULTILINE)
    entries = re.split(r"^    (\w+) \([^\n]*?\):", section.group(1) if section else "", flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
    return {name: re.split(r"(?<=\.) ", text)[0].rstrip(".").replace("`", "") for name, text in texts.items()}


def type_name(annotation: Any) -> str:
    """A readable name of a type: `int or float`, `list of str`, or the values of an enumeration."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        writable = [item for item in arguments if item is not type(None) and not _is_function(item)]
        enum_names = [type_name(item) for item in writable if is_enum(item)]
        # In a union of an enumeration and `str`, only the enumeration is informative.
        names = enum_names or list(dict.fromkeys(type_name(item) for item in writable))
        return " or ".join(names + (["null"] if type(None) in arguments else []))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (list, tuple, Sequence):
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if origin is dict:
        return "mapping"
    if is_enum(annotation):
        return " | ".join(str(item.value) for item in annotation)
    words: dict[Any, str] = {Any: "any", dict: "mapping", bool: "true | false", ShareOrCount: "int or float"}
    return words.get(annotation) or annotation.__name__


def _is_function(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.get_origin(typing.Callable[[], None])


def check_section(name: str, values: Any, fields: dict[str, RecipeField]) -> dict[str, Any]:
    """
    Validate the names and types in a section and return the section.

    Args:
        name (`str`): Name of the section, or `""` for the top-level fields that belong to no section.
        values (`Any`): The section as read from YAML. `None` is read as an empty section.
        fields (`dict[str, RecipeField]`): The fields that the section accepts.

    Returns:
        `dict[str, Any]`: The fields that the section sets.

    Raises:
        RecipeError: If a field is unknown, missing or of the wrong type. The error lists all mistakes of the section.
    """
    prefix = f"{name}." if name else ""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{name or 'the recipe'} is {values!r}; it must be a mapping of fields to values.")
    mistakes = Mistakes()
    mistakes.found += describe_unknown_fields(prefix, [key for key in values if key not in fields], list(fields))
    for key, value in values.items():
        with mistakes.collect():
            # The entries of a mapping are checked by the section or the class that they configure.
            without_entries = {} if isinstance(value, dict) else value
            if key in fields and check_of(fields[key].annotation)(without_entries) is not None:
                raise RecipeError(
                    f"{prefix}{key} is {value!r} ({type(value).__name__}); it must be "
                    f"{type_name(fields[key].annotation)}."
                )
    for key, item in fields.items():
        if item.required and key not in values:
            mistakes.found.append(f"{prefix}{key} is missing; it must be {type_name(item.annotation)}: {item.help}")
    mistakes.raise_found()
    return values


def check_at_least_one(field: str, value: int | None) -> None:
    """Raise [`RecipeError`] if a number of clients or examples is set and below 1."""
    if value is not None and value < 1:
        raise RecipeError(f"{field} is {value}; it must be at least 1.")


def describe_unknown_fields(prefix: str, keys: Sequence[Any], known: list[str]) -> list[str]:
    """
    Describe the unknown fields of a section, with suggestions of usual and similar names.

    Args:
        prefix (`str`): The name of the section and a dot, or `""` for the top level.
        keys (`Sequence[Any]`): The unknown fields.
        known (`list[str]`): The names of the known fields.

    Returns:
        `list[str]`: One mistake per field. The fields after the first `MAX_UNKNOWN_FIELDS` are only counted, because
        the search for similar names takes milliseconds per field.
    """
    where = f"the section {prefix.removesuffix('.')}" if prefix else "a recipe"
    allowed = ", ".join(known) if len(known) <= 30 else "the fields that `hf-federated train --help` lists"
    found = []
    for key in map(str, keys[:MAX_UNKNOWN_FIELDS]):
        usual = [name for name in USUAL_NAMES.get(key.lower(), ()) if name in known]
        similar = usual or difflib.get_close_matches(key[:MAX_KEY_CHARACTERS], known, n=3)
        hint = f"; did you mean {' or '.join(similar)}? " if similar else ". "
        found.append(f"{prefix}{key} is not a field of {where}{hint}Allowed: {allowed}.")
    if len(keys) > MAX_UNKNOWN_FIELDS:
        found.append(f"{len(keys) - MAX_UNKNOWN_FIELDS} more names are not fields of {where}.")
    return found
