"""
Read the fields of dataclasses from source code, without importing it.

The import of `transformers.TrainingArguments` takes several seconds, because it imports torch. With the functions of
this module, the command line checks the names and types in a recipe, and completes options, before any import.

- [`source_fields`] returns the fields of a dataclass, with inherited fields.
- [`source_classes`] returns the classes in a dict from names to classes, such as `hf_federated.tasks.TASKS`.

In an annotation, a class that is not an enumeration becomes an empty class with its name, because no value of a YAML
file is an instance of such a class. An annotation with a name that is not found becomes `Any`.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hf_federated.experiments.recipe.schema import RecipeField, documented_arguments


ENUM_BASES = {"Enum", "StrEnum", "ExplicitEnum"}
PLAIN_TYPES = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}


@dataclass(frozen=True)
class SourceClass:
    """
    A class in source code.

    Args:
        module (`str`): Dotted name of the module that defines the class.
        node (`ast.ClassDef`): The definition.
    """

    module: str
    node: ast.ClassDef

    def bases(self) -> Iterator[SourceClass]:
        """The base classes that can be found, in the order of the definition."""
        for base in self.node.bases:
            found = find_class(self.module, base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                yield found

    def attribute(self, name: str) -> str | None:
        """The name that a class attribute is set to, in the class or in a base class, or `None`."""
        for statement in self.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if statement.target.id == name and isinstance(statement.value, ast.Name):
                    return statement.value.id
        return next((found for base in self.bases() if (found := base.attribute(name)) is not None), None)


def source_fields(module: str, name: str) -> dict[str, RecipeField]:
    """
    Return the fields of a dataclass by name, as [`~hf_federated.experiments.recipe.schema.dataclass_fields`] does.

    Args:
        module (`str`): Dotted name of the module that defines or imports the class.
        name (`str`): Name of the class.

    Returns:
        `dict[str, RecipeField]`: The fields. A default that is not a literal is `...`.

    Raises:
        ValueError: If the source code has no class with this name.

    Example:

    ```python
    >>> from hf_federated.experiments.recipe.source_fields import source_fields

    >>> source_fields("transformers.training_args", "TrainingArguments")["learning_rate"].annotation
    <class 'float'>

    ```
    """
    cls = find_class(module, name)
    if cls is None:
        raise ValueError(f"{module} has no class {name}.")
    return _fields(cls)


def source_parameters(module: str, name: str, method: str) -> dict[str, RecipeField]:
    """
    Return the parameters of a method by name, without `self`.

    Args:
        module (`str`): Dotted name of the module that defines the class.
        name (`str`): Name of the class.
        method (`str`): Name of the method.

    Returns:
        `dict[str, RecipeField]`: The parameters, of any type. A default that is not a literal is `...`.

    Raises:
        ValueError: If the source code has no such class or method.
    """
    cls = find_class(module, name)
    for statement in () if cls is None else cls.node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == method:
            names = [item.arg for item in statement.args.args]
            defaults = [_literal(value) for value in statement.args.defaults]
            values = [dataclasses.MISSING] * (len(names) - len(defaults)) + defaults
            return {key: RecipeField(key, Any, value) for key, value in list(zip(names, values, strict=True))[1:]}
    raise ValueError(f"{module} has no method {name}.{method}.")


def source_classes(module: str, name: str) -> dict[str, SourceClass]:
    """
    Return the classes in a module-level dict from names to classes, by name.

    Args:
        module (`str`): Dotted name of the module.
        name (`str`): Name of the dict.

    Raises:
        ValueError: If the source code has no such dict.
    """
    for statement in _tree(module).body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
            continue
        if ast.unparse(statement.target) == name:
            items = zip(statement.value.keys, statement.value.values, strict=True)
            found = {_literal(key): find_class(module, ast.unparse(value)) for key, value in items if key is not None}
            return {key: cls for key, cls in found.items() if cls is not None}
    raise ValueError(f"{module} has no dict {name}.")


def find_class(module: str, name: str) -> SourceClass | None:
    """Find a class in a module, or in the module that it is imported from. Return `None` if there is none."""
    try:
        tree = _tree(module)
    except (ModuleNotFoundError, OSError):
        return None
    for statement in _statements(tree):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return SourceClass(module, statement)
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return find_class(_imported_module(module, statement), alias.name)
    return None


def _fields(cls: SourceClass) -> dict[str, RecipeField]:
    fields: dict[str, RecipeField] = {}
    if not any(ast.unparse(decorator).startswith("dataclass") for decorator in cls.node.decorator_list):
        return fields
    for base in reversed(list(cls.bases())):
        fields |= _fields(base)
    texts = documented_arguments(ast.get_docstring(cls.node) or "")
    for statement in cls.node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        field = statement.target.id
        default, help_text = _default(statement.value)
        annotation = _evaluate(statement.annotation, cls.module)
        fields[field] = RecipeField(field, annotation, default, help_text or texts.get(field, ""))
    return fields


def _default(value: ast.expr | None) -> tuple[Any, str]:
    """The default value and the help of a field."""
    if value is None:
        return dataclasses.MISSING, ""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"):
        return _literal(value), ""
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    help_text = ""
    if isinstance(given.get("metadata"), ast.Dict):
        metadata = typing.cast(ast.Dict, given["metadata"])
        for key, text in zip(metadata.keys, metadata.values, strict=True):
            if key is not None and _literal(key) == "help":
                help_text = _literal(text) if isinstance(_literal(text), str) else ""
    if "default" in given:
        return _literal(given["default"]), help_text
    if "default_factory" in given:
        factory = given["default_factory"]
        factories: dict[str, Any] = {"list": [], "dict": {}}
        return factories.get(ast.unparse(factory), ...), help_text
    return dataclasses.MISSING, help_text


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ...


def _evaluate(annotation: ast.expr, module: str) -> Any:
    """The type of an annotation, or `Any` if a name in it is not found."""
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    tree = _AnyForAttributes().visit(ast.parse(str(text), mode="eval"))
    code = compile(ast.fix_missing_locations(tree), "<annotation>", "eval")
    try:
        return eval(code, {"__builtins__": {}}, _Names(module))  # The source code of an installed package.
    except (NameError, TypeError):
        return Any


class _AnyForAttributes(ast.NodeTransformer):
    """Replaces an attribute of an imported module, such as `np.ndarray`, with `Any`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name("Any", ast.Load())


class _Names(Mapping[str, Any]):
    """The names in annotations of a module: builtin types, names of `typing`, containers and enumerations."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getitem__(self, name: str) -> Any:
        if name in PLAIN_TYPES:
            return PLAIN_TYPES[name]
        if name in collections.abc.__all__:
            return getattr(collections.abc, name)
        if name in typing.__all__:
            return getattr(typing, name)
        if alias := _find_alias(self.module, name):
            return _evaluate(alias.value, alias.module)
        found = find_class(self.module, name)
        if found is None:
            raise KeyError(name)
        is_enum = ENUM_BASES & {ast.unparse(base) for base in found.node.bases}
        return _enum(found) if is_enum else type(name, (), {})

    def __iter__(self) -> Iterator[str]:
        return iter(PLAIN_TYPES)

    def __len__(self) -> int:
        return len(PLAIN_TYPES)


@dataclass(frozen=True)
class _Alias:
    """A type alias in the source code of a module."""

    module: str
    value: ast.expr


def _find_alias(module: str, name: str) -> _Alias | None:
    """Find a type alias in a module, or in the module that it is imported from. Return `None` if there is none."""
    try:
        tree = _tree(module)
    except (ModuleNotFoundError, OSError):
        return None
    for statement in _statements(tree):
        if isinstance(statement, ast.AnnAssign) and statement.value and ast.unparse(statement.target) == name:
            return _Alias(module, statement.value)
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
            return _Alias(module, statement.value)
        if isinstance(statement, ast.ImportFrom):
            for imported in statement.names:
                if (imported.asname or imported.name) == name:
                    return _find_alias(_imported_module(module, statement), imported.name)
    return None


def _enum(cls: SourceClass) -> Any:
    members = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in cls.node.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    return Enum(cls.node.name, members)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, with the statements of its `if` blocks, such as `if TYPE_CHECKING`."""
    for statement in tree.body:
        yield statement
        if isinstance(statement, ast.If):
            yield from statement.body


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


def _path(module: str) -> Path:
    """The file of a module. Its package is located and not imported."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise ModuleNotFoundError(f"{package} is not installed, or it has no source code.", name=package)
    if not spec.submodule_search_locations:
        return Path(str(spec.origin))
    path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported_module(module: str, statement: ast.ImportFrom) -> str:
    """The dotted name of the module in a `from ... import ...` statement."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    # A relative import starts at the package of the module, and a package is its own package.
    keep = len(parts) - statement.level + (1 if _path(module).name == "__init__.py" else 0)
    return ".".join([*parts[:keep], *([statement.module] if statement.module else [])])
