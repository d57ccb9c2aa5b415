"""
Read classes from source code, without importing it.

The import of `transformers.TrainingArguments` takes several seconds, because it imports torch. With the functions of
this module, the command line checks the names and types in a recipe, and completes options, before any import.

[`source_value`] evaluates the definition of a name and the names in it. Names of the standard library are imported. A
class has its bases, annotations, constants and docstring, and no methods. In an annotation, a class that is not an
enumeration becomes an empty class, because no value of a YAML file is an instance of such a class.

An annotation that needs an import becomes `Any`, and such a default becomes `...`.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_federated.experiments.recipe.schema import RecipeField
from hf_federated.utils.options import option


@functools.cache
def source_value(module: str, name: str, in_annotation: bool = False) -> Any:
    """
    Return the class or the value that a name of a module has.

    Args:
        module (`str`): Dotted name of the module that defines or imports the name.
        name (`str`): The name.
        in_annotation (`bool`, *optional*, defaults to `False`): Whether a class that is not an enumeration is empty.

    Raises:
        ModuleNotFoundError: If the module is not installed.
        ValueError: If the source code has no class, assignment or import of this name.

    Example:

    ```python
    >>> import dataclasses
    >>> from hf_federated.experiments.recipe.source_fields import source_value

    >>> arguments = source_value("transformers.training_args", "TrainingArguments")
    >>> {field.name: field.default for field in dataclasses.fields(arguments)}["weight_decay"]
    0.0

    ```
    """
    if module.partition(".")[0] in sys.stdlib_module_names:
        return getattr(importlib.import_module(module), name)
    for statement in _statements(module):
        match statement:
            case ast.ClassDef(name=found) if found == name:
                is_enum = any(ast.unparse(base).endswith("Enum") for base in statement.bases)
                return type(name, (), {}) if in_annotation and not is_enum else _build_class(module, statement)
            case ast.Import(names=aliases) if name in sys.stdlib_module_names:
                if name in [alias.asname or alias.name for alias in aliases]:
                    return importlib.import_module(name)
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    if (alias.asname or alias.name) == name:
                        return source_value(_imported_module(module, statement), alias.name, in_annotation)
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
            ) if found == name:
                return _evaluate(module, value, in_annotation)
    raise ValueError(f"{module} has no class or value {name}.")


def source_parameters(module: str, name: str, method: str) -> dict[str, RecipeField]:
    """
    Return the parameters of a method by name, without `self`.

    Args:
        module (`str`): Dotted name of the module that defines the class.
        name (`str`): Name of the class.
        method (`str`): Name of the method.

    Returns:
        `dict[str, RecipeField]`: The parameters, of any type.

    Raises:
        ValueError: If the source code has no such class or method.
    """
    for cls in _statements(module):
        for statement in cls.body if isinstance(cls, ast.ClassDef) and cls.name == name else ():
            if isinstance(statement, ast.FunctionDef) and statement.name == method:
                names = [item.arg for item in statement.args.args]
                defaults = [_evaluate_or(module, value, ...) for value in statement.args.defaults]
                values = [dataclasses.MISSING] * (len(names) - len(defaults)) + defaults
                return {key: RecipeField(key, Any, value) for key, value in list(zip(names, values, strict=True))[1:]}
    raise ValueError(f"{module} has no method {name}.{method}.")


def _build_class(module: str, node: ast.ClassDef) -> type:
    """Build a class with its bases, annotations, constants and docstring."""
    annotations: dict[str, Any] = {}
    values: dict[str, Any] = {"__module__": module, "__doc__": ast.get_docstring(node), "__annotations__": annotations}
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                if not ast.unparse(annotation).startswith("ClassVar"):
                    annotations[name] = _evaluate_or(module, annotation, Any, in_annotation=True)
                if value is not None:
                    values[name] = _default(module, value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=constant)):
                values[name] = constant
    bases = [base for item in node.bases if (base := _evaluate_or(module, item, None)) is not None]

    def fill(namespace: dict[str, Any]) -> None:
        for name, value in values.items():  # the namespace of an enumeration has no such `update` in Python 3.10
            namespace[name] = value

    cls = types.new_class(node.name, tuple(bases), {}, fill)
    for decorator in node.decorator_list:
        if ast.unparse(decorator).startswith("dataclass"):
            cls = _evaluate(module, decorator)(cls)
    return cls


def _default(module: str, value: ast.expr) -> Any:
    """The default of a field, with its help. Only the factories `list` and `dict` are called."""
    function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    if not isinstance(value, ast.Call) or function not in ("field", "dataclasses.field", "option"):
        return _evaluate_or(module, value, ...)
    if function == "option":
        further = {str(item.arg): _evaluate_or(module, item.value, None) for item in value.keywords}
        return option(*(_evaluate_or(module, item, ...) for item in value.args), **further)
    given: dict[str, Any] = {}
    for keyword in value.keywords:
        if isinstance(keyword.value, ast.Dict):  # the metadata
            items = zip(keyword.value.keys, keyword.value.values, strict=True)
            texts = {_evaluate(module, key): _evaluate_or(module, item, None) for key, item in items if key}
            given[str(keyword.arg)] = texts
        elif keyword.arg == "default_factory" and ast.unparse(keyword.value) not in ("list", "dict"):
            given["default"] = ...
        else:
            given[str(keyword.arg)] = _evaluate_or(module, keyword.value, ...)
    return dataclasses.field(**given)


def _evaluate_or(module: str, node: ast.expr, default: Any, in_annotation: bool = False) -> Any:
    """Return the value of an expression, or a default if the value needs an import."""
    try:
        return _evaluate(module, node, in_annotation)
    except Exception:  # from the source code of another library, which the real import evaluates
        return default


def _evaluate(module: str, node: ast.expr, in_annotation: bool = False) -> Any:
    if in_annotation:
        text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
        node = ast.fix_missing_locations(_AnyForAttributes().visit(ast.parse(str(text), mode="eval"))).body
    code = compile(ast.Expression(node), f"<{module}>", "eval")
    return eval(code, {"__builtins__": {}}, _Names(module, in_annotation))  # The source code of an installed package.


class _AnyForAttributes(ast.NodeTransformer):
    """Replaces an attribute of an imported module, such as `np.ndarray`, with `Any`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name("Any", ast.Load())


class _Names(dict[str, Any]):
    """The names that the expressions of a module can use."""

    def __init__(self, module: str, in_annotation: bool) -> None:
        super().__init__()
        self.module = module
        self.in_annotation = in_annotation

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or source_value(self.module, name, self.in_annotation)


def _statements(module: str) -> Iterator[ast.stmt]:
    """The statements of a module, with the statements of its `if` blocks, such as `if TYPE_CHECKING`."""
    for statement in _tree(module).body:
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
    # A relative import starts at the package of the module, and a package is its own package.
    package = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
