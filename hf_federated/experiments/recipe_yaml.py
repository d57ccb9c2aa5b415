"""The YAML of a recipe: how it is read, which scale of it is meant, and what `--set` changes.

Numbers and truth values are read as YAML 1.2 writes them: `5e-4` is a number, `no` is a word. Under `scales` a recipe
may say, by name, what is different at another scale: `--set scale=paper` lays `scales.paper` over the rest.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hf_federated.experiments.recipe_schema import RecipeError


DEFAULT_SCALE = "default"
DEFAULT_TASK = "text-classification"
# The sections that name a class, and which it is if they do not say.
NAMED_SECTIONS = {"task": DEFAULT_TASK, "partition": None}


def read_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """
    Reads a recipe as it stands, at one scale and with changes, and checks no name in it.

    Args:
        path (`str`): The YAML file.
        overrides (`Sequence[str]`, *optional*): `section.field=value` each; the value is YAML. They come last, after
            what the scale changes.

    Returns:
        `dict[str, Any]`: The mapping, without `scales`; its `scale` is the one that was taken.

    Raises:
        RecipeError: If the file is missing or not a YAML mapping, or there is no such scale.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = read_yaml(file.read(), str(path)) or {}
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {os.fspath(path)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read the recipe {os.fspath(path)!r}: it is not UTF-8.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{os.fspath(path)!r} holds a {type(values).__name__}; a recipe is a mapping of sections.")
    changes = [_parse_override(override) for override in overrides]
    scales = values.pop("scales", None) or {}
    scale = next((value for keys, value, _ in reversed(changes) if keys == ["scale"]), values.get("scale"))
    if not isinstance(scales, dict) or not all(
        isinstance(name, str) and isinstance(change, dict) for name, change in scales.items()
    ):
        raise RecipeError("scales must be a mapping from names to sections.")
    if not isinstance(scale, (str, type(None))):
        raise RecipeError(f"scale is {scale!r}; it must be a name.")
    if scale is not None and scale != DEFAULT_SCALE:
        if scale not in scales:
            raise RecipeError(f"scale is {scale!r}; this recipe has {', '.join([DEFAULT_SCALE, *scales])}.")
        values = lay_over(values, scales[scale])
    for keys, value, text in changes:
        _apply(values, keys, value, text)
    values["scale"] = scale or DEFAULT_SCALE
    return values


def lay_over(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """
    A copy of a recipe with changes laid over it, as [`merged`] does.

    A section that names another class (another task or partitioner) replaces the one that is there, whose fields are
    not its own.
    """
    base = dict(recipe)
    for section, default in NAMED_SECTIONS.items():
        there, change = base.get(section), changes.get(section)
        if isinstance(there, dict) and isinstance(change, Mapping) and "name" in change:
            if change["name"] != there.get("name", default):
                base[section] = None
    return merged(base, changes)


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested mappings with others laid over them: mappings are merged, anything else is replaced."""
    result = copy.deepcopy(dict(values))
    for key, change in changes.items():
        there = result.get(key)
        if isinstance(change, Mapping) and isinstance(there, dict):
            result[key] = merged(there, change)
        else:
            result[key] = copy.deepcopy(change)
    return result


def _parse_override(override: str) -> tuple[list[str], Any, str]:
    key, equals, text = override.partition("=")
    keys = key.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {override!r} is not of the form section.field=value.")
    return keys, read_yaml(text, f"--set {override}"), override


def _apply(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    *folders, last = keys
    for folder in folders:
        inner = values.get(folder)
        if inner is None:
            inner = values[folder] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"--set {override!r}: {folder} is {inner!r}, which has no fields.")
        values = inner
    values[last] = value


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers and truth values; a key that stands twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, where 5e-4 is text, `no` (an `eval_strategy`) is false, 010 is 8 and 1:30 is 90.
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


def read_yaml(text: str, source: str) -> Any:
    """
    Raises:
        RecipeError: If the text is not YAML. The message names the source.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{source} is not YAML: {' '.join(str(error).split())}") from error
