"""Read the YAML file of a recipe, apply one of its scales and apply the changes of `--set`.

Numbers and booleans follow YAML 1.2: `5e-4` is a number and `no` is a string. The section `scales` maps the name of a
scale to changes of the recipe: `--set scale=paper` merges `scales.paper` into the other sections.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hf_federated.experiments.recipe.schema import Mistakes, RecipeError


DEFAULT_SCALE = "default"
DEFAULT_TASK = "text-classification"
# Limits of a YAML document. A value counts once for each of its aliases.
MAX_DEPTH = 100
MAX_VALUES = 200_000
MAX_CHARACTERS = 16 * 1024**2
# The sections that name a class, with the default class.
NAMED_SECTIONS = {"task": DEFAULT_TASK, "partition": None}


def read_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """
    Read the values of a recipe at one scale, without checking the names of its fields.

    Args:
        path (`str`): The YAML file.
        overrides (`Sequence[str]`, *optional*): Changes of the form `section.field=value`, where the value is YAML.
            They are applied after the changes of the scale.

    Returns:
        `dict[str, Any]`: The recipe without `scales`. Its `scale` is the name of the applied scale.

    Raises:
        RecipeError: If the file cannot be read, is not a YAML mapping, or does not define the scale.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = parse_yaml(file.read(MAX_CHARACTERS + 1), str(path)) or {}
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {os.fspath(path)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read the recipe {os.fspath(path)!r}: it is not UTF-8.") from error
    if not isinstance(values, dict):
        raise RecipeError(
            f"{os.fspath(path)!r} holds a {type(values).__name__}; a recipe must be a mapping of sections."
        )
    changes, mistakes = [], Mistakes()
    for override in overrides:
        with mistakes.collect():
            changes.append(_parse_override(override))
    mistakes.raise_found()
    scales = values.pop("scales", None) or {}
    scale = next((value for keys, value, _ in reversed(changes) if keys == ["scale"]), values.get("scale"))
    if not isinstance(scales, dict) or not all(
        isinstance(name, str) and isinstance(change, dict) for name, change in scales.items()
    ):
        raise RecipeError("scales must be a mapping of names to sections.")
    if not isinstance(scale, (str, type(None))):
        raise RecipeError(f"scale is {scale!r}; it must be the name of a scale.")
    if scale is not None and scale != DEFAULT_SCALE:
        if scale not in scales:
            raise RecipeError(f"scale is {scale!r}; it must be one of {', '.join([DEFAULT_SCALE, *scales])}.")
        values = apply_changes(values, scales[scale])
    for keys, value, text in changes:
        _apply(values, keys, value, text)
    values["scale"] = scale or DEFAULT_SCALE
    return values


def apply_changes(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a copy of a recipe with changes merged into it by [`merge_mappings`].

    A changed section that names a different class (a different task or partitioner) replaces the section of the
    recipe, because the fields of the previous class do not apply to the new class.

    Args:
        recipe (`Mapping[str, Any]`): The values of a recipe.
        changes (`Mapping[str, Any]`): Sections, with the fields to change.
    """
    base = dict(recipe)
    for section, default in NAMED_SECTIONS.items():
        current, change = base.get(section), changes.get(section)
        if isinstance(current, dict) and isinstance(change, Mapping) and "name" in change:
            if change["name"] != current.get("name", default):
                base[section] = None
    return merge_mappings(base, changes)


def merge_mappings(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `values` with `changes` merged recursively. Values that are not mappings are replaced."""
    result = copy.deepcopy(dict(values))
    for key, change in changes.items():
        current = result.get(key)
        if isinstance(change, Mapping) and isinstance(current, dict):
            result[key] = merge_mappings(current, change)
        else:
            result[key] = copy.deepcopy(change)
    return result


def _parse_override(override: str) -> tuple[list[str], Any, str]:
    key, equals, text = override.partition("=")
    keys = key.split(".")
    if not equals or not all(keys) or len(keys) > MAX_DEPTH:
        raise RecipeError(f"--set {override!r} is invalid; it must be of the form section.field=value.")
    return keys, parse_yaml(text, f"--set {override}"), override


def _apply(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    *parents, last = keys
    for parent in parents:
        inner = values.get(parent)
        if inner is None:
            inner = values[parent] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"--set {override!r}: {parent} is {inner!r}, which is not a mapping and has no fields.")
        values = inner
    values[last] = value


# The parser of libyaml is five times as fast as the parser in Python, which PyYAML without libyaml uses.
_SafeLoader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Loader(_SafeLoader):
    """A loader with the numbers and booleans of YAML 1.2, which rejects duplicate keys and too large documents."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        num_values, depth = (0, 0) if node is None else _measure(node, {})
        if num_values > MAX_VALUES:
            raise yaml.YAMLError(
                f"it has more than {MAX_VALUES} values, counting a value once for each of its aliases"
            )
        if depth > MAX_DEPTH:
            raise _too_deep()
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is a duplicate key", node.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """
    Return the number of values in a node and the depth of the node, with all aliases replaced by their values.

    Args:
        node (`yaml.Node`): The node.
        sizes (`dict[int, tuple[int, int] | None]`): The results for other nodes by id. `None` for a node in progress.

    Raises:
        yaml.YAMLError: If a value contains itself.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) not in sizes:
        sizes[id(node)] = None
        pairs = [node.value] if isinstance(node, yaml.SequenceNode) else node.value
        inner = [_measure(child, sizes) for pair in pairs for child in pair]
        num_values, depth = 1 + sum(size[0] for size in inner), 1 + max((size[1] for size in inner), default=0)
        sizes[id(node)] = num_values, depth
    size = sizes[id(node)]
    if size is None:
        raise yaml.YAMLError("a value contains an alias of itself")
    return size


def _check_size(text: str) -> None:
    """
    Raise a `YAMLError` if a document is too large or nested too deeply, before it is in memory as nodes.

    The parser of libyaml would end the process for a document that is nested too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has more than {MAX_CHARACTERS} characters")
    num_values = depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        num_values += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH:
            raise _too_deep()
        if num_values > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES} values")


def _too_deep() -> yaml.YAMLError:
    return yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep")


# PyYAML follows YAML 1.1, which reads 5e-4 as a string, `no` (an `eval_strategy`) as false, 010 as 8 and 1:30 as 90.
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in ("bool", "float", "int", "timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


# The constructors of PyYAML raise these errors for a value that does not match its tag, such as `!!bool maybe`.
_YAML_ERRORS = (
    yaml.YAMLError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def parse_yaml(text: str, source: str) -> Any:
    """
    Parse YAML.

    Args:
        text (`str`): The YAML document.
        source (`str`): Where the text is from, for error messages.

    Raises:
        RecipeError: If the text is not valid YAML.
    """
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except _YAML_ERRORS as error:
        raise RecipeError(f"{source} is not YAML: {' '.join(str(error).split())}") from error
