"""Check limits on the size of files and functions, on assertions for type checkers, and on private names in tests.

python tests/check_structure.py            # each offender of a limit that is exceeded
python tests/check_structure.py --count    # the numbers and their limits
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# The largest number of offenders of each kind.
LIMITS = {
    "assertions that a value is not None": 5,
    f"functions of more than {MAX_FUNCTION_LINES} lines without the docstring": 3,
    f"files of more than {MAX_FILE_LINES} lines": 17,
    "lines of tests that read a private name": 100,
}


def is_private(name: str) -> bool:
    """Whether a name has a leading underscore and is no special name, such as `__init__`."""
    return name.startswith("_") and not name.endswith("__")


def not_none_assertions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line of each `assert ... is not None`, also as a part of a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.IsNot):
                    if isinstance(part.comparators[0], ast.Constant) and part.comparators[0].value is None:
                        yield node.lineno, ast.unparse(node)
                        break


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The first line of each function that is too long. The lines of its docstring do not count."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_docstring = ast.get_docstring(node, clean=False) is not None
            docstring_lines = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
            num_lines = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines
            if num_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {num_lines} lines"


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each line that reads a private attribute of another object, or imports a private name of the package."""
    found: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.setdefault(node.lineno, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_federated":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(is_private(name) and name != "_compat" for name in names):
                found.setdefault(node.lineno, ast.unparse(node))
    yield from sorted(found.items())


def offenders() -> dict[str, list[str]]:
    """The offenders of each limit, each with its file and line."""
    found: dict[str, list[str]] = {kind: [] for kind in LIMITS}
    assertions, functions, files, names = found.values()
    for folder in ("hf_federated", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source, where = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
            tree = ast.parse(source)
            if folder == "tests":
                names += [f"{where}:{line}: {text}" for line, text in private_names(tree)]
                continue
            assertions += [f"{where}:{line}: {text}" for line, text in not_none_assertions(tree)]
            functions += [f"{where}:{line}: {text}" for line, text in long_functions(tree)]
            num_lines = len(source.splitlines())
            if num_lines > MAX_FILE_LINES:
                files.append(f"{where}: {num_lines} lines")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="print the numbers and their limits")
    arguments = parser.parse_args()
    exceeded = False
    for kind, found in offenders().items():
        if arguments.count:
            print(f"{len(found):6d}  {kind}, at most {LIMITS[kind]}")
        elif len(found) > LIMITS[kind]:
            exceeded = True
            print(*found, f"{len(found)} {kind}, at most {LIMITS[kind]} are allowed", sep="\n")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
