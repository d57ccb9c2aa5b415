"""Imports point down, as the house is built, and importing the package loads nothing that is optional."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_federated


PACKAGE = Path(hf_federated.__file__).parent

# From the ground up. A module may import from its own floor and from those below.
FLOORS: list[set[str]] = [
    {"packing", "messages", "config", "garbage", "generators", "ledger", "metrics", "quantization"},
    {"notices", "processes"},
    {"validation", "postprocessing", "checkpoint", "loop_arguments", "round_steps"},
    {"adapters", "clients", "data", "tasks"},
    {"aggregation", "distillation", "split"},
    {"client_models"},
    {"agreement", "audits", "callbacks", "cards", "checks", "engines"},
    {"algorithms", "client_files", "federation_builder", "rounds"},
    {"runtime"},
    {"preparation", "roles", "saving"},
    {"mixin", "split_training", "trainer"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every module and its dotted place below the package; a package's own is that of its `__init__`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).with_suffix("").parts


def imported_rooms(path: Path, place: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """The rooms of the package that a module imports, also inside functions, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                module = ("hf_federated", *place[: len(place) - node.level], *module)
            # `from . import room` names the room behind the import.
            names = [(*module, alias.name) for alias in node.names]
        for name in names:
            if name[0] == "hf_federated" and len(name) > 1:
                yield node.lineno, name[1]  # type: ignore[attr-defined]


def test_every_room_has_a_floor():
    rooms = {place[0] for _, place in modules()} - {"__init__"}
    assert rooms <= set(FLOOR), f"add {sorted(rooms - set(FLOOR))} to FLOORS"


def test_imports_point_down():
    wrong = []
    for path, place in modules():
        room = place[0]
        if room in ("__init__", "__main__"):
            continue
        for line, imported in imported_rooms(path, place):
            # `from .. import name` takes a public name from the roof, whatever it is.
            if FLOOR.get(imported, len(FLOORS)) > FLOOR[room]:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} ({room}) imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_direction_is_really_read():
    places = [("clients", "worker"), ("federation_builder",)]
    found = [{room for _, room in imported_rooms(PACKAGE.joinpath(*p).with_suffix(".py"), p)} for p in places]
    assert {"messages", "config", "postprocessing"} <= found[0]
    assert {"engines", "clients", "config"} <= found[1]


def test_algorithms_see_tensors_and_messages_only():
    seen = {"aggregation", "messages", "postprocessing"}
    # One of them is a distillation too, and trains a model of the client's.
    others = {"mutual_kd": {"distillation", "generators", "validation"}}
    for path, place in modules():
        if place[0] == "aggregation":
            allowed = seen | others.get(path.stem, set())
            assert {room for _, room in imported_rooms(path, place)} <= allowed, path.name


def test_public_names_are_sorted_and_there():
    # Constants, classes, functions, each by name: as ruff sorts.
    order = sorted(hf_federated.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert hf_federated.__all__ == order
    assert set(hf_federated.__all__) <= set(vars(hf_federated))


@pytest.fixture(scope="module")
def loaded_by_import() -> set[str]:
    """Top-level modules that `import hf_federated` loads in a fresh interpreter, beyond those of its requirements."""
    names = "{name.partition('.')[0] for name in sys.modules}"
    # PEFT imports bitsandbytes wherever it is installed.
    # Those that need the extra `split` are named, whether the package imports them or not.
    rooms = ("certificates", "encryption", "network")
    package = ", ".join(["hf_federated", *(f"hf_federated.split.{room}" for room in rooms)])
    code = f"import sys, peft, transformers; before = {names}; import {package}; print(*({names} - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_the_core_requires_nothing_optional():
    try:
        requirements = importlib.metadata.requires("hf-federated") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, so nobody knows its requirements")
    required = {re.split(r"[^\w.-]", text)[0].lower() for text in requirements if "extra ==" not in text}
    assert {"torch", "transformers"} <= required
    assert required.isdisjoint({"trl", "bitsandbytes", "flwr", "ray", "sentence-transformers", "matplotlib"})


@pytest.mark.parametrize(
    "name",
    [
        "trl",
        "flwr",
        "flwr_datasets",
        "ray",
        "bitsandbytes",
        "matplotlib",
        "sklearn",
        "sentence_transformers",
        "seqeval",
        "cryptography",
        "grpc",
    ],
)
def test_importing_the_package_does_not_import(loaded_by_import, name):
    assert "hf_federated" in loaded_by_import
    assert name not in loaded_by_import
