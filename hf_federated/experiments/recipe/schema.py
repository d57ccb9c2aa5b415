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

# The fields of a recipe, and their usual names elsewhere. A section suggests the fields that it has.
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("lr", "eta", "client_lr"),
    "per_device_train_batch_size": ("batch_size", "train_batch_size", "local_batch_size"),
    "per_device_eval_batch_size": ("test_batch_size", "eval_batch_size"),
    "num_train_epochs": ("epochs", "num_epochs"),
    "local_epochs": ("epochs", "num_epochs"),
    "max_steps": ("steps",),
    "local_steps": ("steps",),
    "optim": ("optimizer",),
    "lr_scheduler_type": ("scheduler", "lr_scheduler", "lr_schedule"),
    "warmup_steps": ("warmup",),
    "weight_decay": ("wd", "l2"),
    "max_grad_norm": ("grad_clip", "clip_grad_norm", "gradient_clipping"),
    "gradient_accumulation_steps": ("grad_accum", "accumulation_steps"),
    "eval_strategy": ("evaluation_strategy",),
    "use_cpu": ("no_cuda", "cpu", "device"),
    "output_dir": ("output",),
    "num_rounds": ("rounds", "communication_rounds"),
    "aggregation": ("algorithm", "strategy", "method"),
    "distillation": ("algorithm", "method"),
    "clients_per_round": ("fraction_fit", "client_fraction", "participation", "sample_rate"),
    "federation_seed": ("seed",),
    "name_or_path": ("model", "name", "model_name", "model_name_or_path"),
    "path": ("dataset", "dataset_name", "data_path"),
    "max_length": ("max_seq_length", "max_len"),
    "alpha": ("concentration", "dirichlet_alpha"),
    "num_clients": ("clients",),
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


class Section:
    """Base class of the dataclasses of sections. The constructor raises a [`RecipeError`] with all mistakes."""

    def mistakes(self) -> Iterator[str]:
        """The invalid values and combinations of values, one sentence each."""
        yield from ()

    def __post_init__(self) -> None:
        if found := list(self.mistakes()):
            raise RecipeError(*found)


def documented(text: str, default: Any = None) -> Any:
    """
    Return a field of a section that is not required.

    Args:
        text (`str`): The description of the field in `--help`.
        default (`Any`, *optional*): The default value, or a function that returns it, such as `list`.
    """
    arguments: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**arguments, metadata={"help": text})


def too_small(values: Any, prefix: str, **minimums: int) -> Iterator[str]:
    """
    Describe the fields that are set and below their minimum.

    Args:
        values (`Any`): The object with the fields.
        prefix (`str`): The name of the section and a dot, or `""` for the top level.
        minimums (`int`): The minimums by field.
    """
    for name, minimum in minimums.items():
        value = getattr(values, name)
        if value is not None and value < minimum:
            yield f"{prefix}{name} is {value}; it must be at least {minimum}."


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
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        help_text = item.metadata.get("help") or texts.get(item.name, "")
        fields[item.name] = RecipeField(item.name, annotations[item.name], default, help_text)
    return fields


def argument_help(cls: type) -> dict[str, str]:
    """The first sentence of each entry in the `Args:` section of a class docstring, by argument name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(cls) or "", flags=re.DOTALL | re.MULTILINE)
    entries = re.split(r"^    (\w+) \([^\n]*?\):", section.group(1) if section else "", flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
    return {name: re.split(r"(?<=\.) ", text)[0].rstrip(".").replace("`", "") for name, text in texts.items()}


def type_name(annotation: Any) -> str:
    """A readable name of a type: `int or float`, `list of str`, or the values of an enumeration."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        writable = [item for item in arguments if item is not type(None) and typing.get_origin(item) is not Callable]
        enum_names = [type_name(item) for item in writable if is_enum(item)]
        # In a union of an enumeration and `str`, only the enumeration is informative.
        names = enum_names or list(dict.fromkeys(type_name(item) for item in writable))
        return " or ".join(names + (["null"] if type(None) in arguments else []))
    if origin is Literal or is_enum(annotation):
        return " | ".join(map(str, arguments or [item.value for item in annotation]))
    if origin in (list, tuple, Sequence):
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    words: dict[Any, str] = {Any: "any", dict: "mapping", bool: "true | false", ShareOrCount: "int or float"}
    return words.get(origin or annotation) or annotation.__name__


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
    found = describe_unknown_fields(prefix, [key for key in values if key not in fields], list(fields))
    for key, value in values.items():
        # The entries of a mapping are checked by the section or the class that they configure.
        without_entries = {} if isinstance(value, dict) else value
        if key in fields and check_of(fields[key].annotation)(without_entries) is not None:
            allowed = type_name(fields[key].annotation)
            found.append(f"{prefix}{key} is {value!r} ({type(value).__name__}); it must be {allowed}.")
    for key, item in fields.items():
        if item.required and key not in values:
            found.append(f"{prefix}{key} is missing; it must be {type_name(item.annotation)}: {item.help}")
    if found:
        raise RecipeError(*found)
    return values


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
    section = prefix.removesuffix(".") or "other"
    command = f"`hf-federated train --help {section}`"
    allowed = ", ".join(known) if len(known) <= 30 else f"the fields that {command} lists"
    found = []
    for key in map(str, keys[:MAX_UNKNOWN_FIELDS]):
        usual = [name for name, others in USUAL_NAMES.items() if name in known and key.lower() in others]
        similar = usual or difflib.get_close_matches(key[:MAX_KEY_CHARACTERS], known, n=3)
        hint = f"; did you mean {' or '.join(similar)}? " if similar else ". "
        found.append(f"{prefix}{key} is not a field of {where}{hint}Allowed: {allowed}.")
    if len(keys) > MAX_UNKNOWN_FIELDS:
        found.append(f"{len(keys) - MAX_UNKNOWN_FIELDS} more names are not fields of {where}.")
    return found
