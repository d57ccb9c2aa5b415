"""Folders import only from lower layers, and importing the package loads no optional dependency."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_federated


PACKAGE = Path(hf_federated.__file__).parent

# Layers from bottom to top. A module may import from its own folder and from lower layers.
LAYERS = (
    "_compat config utils",
    "messages distributed codecs",
    "adapters data tasks transport security",
    "features methods secure_aggregation reporting",
    "clients postprocessing",
    "aggregation distillation split",
    "engines",
    "server cards audits",
    "compatibility",
    "trainer split_training",
    "experiments",
    "cli",
    "testing",
)
LAYER = {folder: number for number, folders in enumerate(LAYERS) for folder in folders.split()}


def modules() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the path of every module with the parts of its dotted name below the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).with_suffix("").parts


def imported_names(path: Path, name: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield line number and dotted name of each import from the package, including imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        imported: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            imported = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                module = ("hf_federated", *name[: len(name) - node.level], *module)
            # `from . import folder` names the folder after the import.
            imported = [(*module, alias.name) for alias in node.names]
        for parts in imported:
            if parts[0] == "hf_federated" and len(parts) > 1:
                yield node.lineno, parts[1:]


def imported_folders(path: Path, name: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield line number and top-level folder of each import from the package."""
    for line, imported in imported_names(path, name):
        yield line, imported[0]


def imports_between_folders() -> dict[tuple[str, str], str]:
    """One location (file and line) for each pair of folders of which the first imports the second."""
    found: dict[tuple[str, str], str] = {}
    for path, name in modules():
        for line, imported in imported_folders(path, name) if name[0] != "__init__" else ():
            if imported != name[0]:
                found.setdefault((name[0], imported), f"{path.relative_to(PACKAGE)}:{line}")
    return found


def test_every_folder_has_a_layer():
    folders = {name[0] for _, name in modules()} - {"__init__"}
    assert folders == set(LAYER)


def test_folders_import_only_from_lower_layers():
    # `from .. import name` imports a public name of the package itself, which is above all layers.
    wrong = [
        f"{location}: {folder} imports {imported}"
        for (folder, imported), location in imports_between_folders().items()
        if LAYER.get(imported, len(LAYERS)) > LAYER[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_folders_import_each_other():
    pairs = imports_between_folders()
    both = [f"{pairs[pair]} and {pairs[pair[::-1]]}" for pair in pairs if pair[::-1] in pairs]
    assert not both, "\n".join(both)


def test_folders_form_no_import_cycle():
    graph: dict[str, set[str]] = {}
    for folder, imported in imports_between_folders():
        graph.setdefault(folder, set()).add(imported)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # Raises CycleError.


def test_modules_of_a_folder_form_no_import_cycle():
    """An import inside a function, or one for type checkers only, would hide a cycle, so these imports count."""
    paths = {name: path for path, name in modules()}
    graph = {
        name: {
            found
            for _, imported in imported_names(path, name)
            for found in (imported, imported[:-1])
            if found in paths and found != name
        }
        for name, path in paths.items()
    }
    assert ("data", "client_mapping") in graph["data", "statistics", "label_statistics"]
    tuple(graphlib.TopologicalSorter(graph).static_order())  # Raises CycleError.


def test_import_scan_finds_known_imports():
    names = [("clients", "worker"), ("trainer", "workers")]
    found = [
        {folder for _, folder in imported_folders(PACKAGE.joinpath(*name).with_suffix(".py"), name)} for name in names
    ]
    assert {"messages", "config", "postprocessing"} <= found[0]
    assert {"clients", "engines", "server"} <= found[1]


def test_aggregation_imports_only_tensor_and_message_modules():
    allowed = {"_compat", "aggregation", "messages", "methods", "postprocessing", "utils"}
    # MutualKD also distills and trains a private model of the client. Two modules read the scales of LoRA modules.
    exceptions = {"mutual_kd": {"distillation"}, "base_changes": {"adapters"}, "stacked_lora": {"adapters"}}
    for path, name in modules():
        if name[0] == "aggregation":
            folders = {folder for _, folder in imported_folders(path, name)}
            assert folders <= allowed | exceptions.get(path.stem, set()), path.name


def test_public_names_are_sorted_and_exist():
    # ruff sorts constants, classes and functions separately, each by name.
    order = sorted(hf_federated.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert hf_federated.__all__ == order
    for name in hf_federated.__all__:
        assert getattr(hf_federated, name) is not None
    assert set(hf_federated.__all__) <= set(dir(hf_federated))


def test_unknown_public_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FedAverage'"):
        hf_federated.FedAverage  # noqa: B018


def test_type_checkers_and_lazy_imports_see_the_same_public_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: f".{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    assert typed == hf_federated._MODULES
    assert sorted(typed) == sorted(hf_federated.__all__)


def test_importing_federated_dataset_loads_neither_torch_nor_models():
    """The limits are those of the project: 2.5 s of CPU time and 300 MB. A measurement is 1.4 s and 157 MB."""
    # `ru_maxrss` includes the memory of the parent before exec, and VmHWM does not.
    code = (
        "import pathlib, re, sys, time\n"
        "from hf_federated import FederatedDataset\n"
        "status = pathlib.Path('/proc/self/status')\n"
        "peak = re.search(r'VmHWM:\\s*(\\d+) kB', status.read_text())[1] if status.exists() else 0\n"
        "print(time.process_time(), int(peak) / 1000, *sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, megabytes, *loaded = result.stdout.split()
    assert "hf_federated.data.federated_dataset" in loaded
    assert not {"torch", "peft", "accelerate", "transformers.trainer", "transformers.modeling_utils"} & set(loaded)
    assert float(seconds) < 5  # twice the limit, because the CPU of a test machine may be slower
    assert float(megabytes) < 300


def test_submodules_are_attributes_of_the_package():
    """`import hf_federated as hff; hff.data.IidPartitioner` works, as before names were imported on first use."""
    code = (
        "import hf_federated; print(hf_federated.data.IidPartitioner.__name__)\n"
        "print(hasattr(hf_federated, 'dta'), hasattr(hf_federated, '__wrapped__'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["IidPartitioner", "False", "False"]


@pytest.fixture(scope="module")
def loaded_by_import() -> set[str]:
    """
    Top-level modules that `import hf_federated` loads in a fresh interpreter, except modules of its requirements.
    """
    names = "{name.partition('.')[0] for name in sys.modules}"
    # Import PEFT first, because it imports bitsandbytes if bitsandbytes is installed.
    # Also import the packages that need the extra `split`.
    package = (
        "hf_federated, hf_federated.security.certificates, hf_federated.security.encrypted_session, "
        "hf_federated.transport, hf_federated.trainer.federate, hf_federated.split_training"
    )
    code = f"import sys, peft, transformers; before = {names}; import {package}; print(*({names} - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_required_packages_exclude_optional_packages():
    try:
        requirements = importlib.metadata.requires("hf-federated") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, so its requirements are unknown")
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
