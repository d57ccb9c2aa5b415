"""Every public class has a docstring example, and all docstring examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import hf_federated


class MarkdownParser(doctest.DocTestParser):
    """Parses examples inside Markdown fences. A closing fence is not part of the expected output."""

    def parse(self, string: str, name: str = "<string>") -> list[Any]:
        return super().parse("\n".join("" if line.strip() == "```" else line for line in string.split("\n")), name)


FINDER = doctest.DocTestFinder(parser=MarkdownParser(), recurse=False)


def public_objects() -> dict[str, Any]:
    """All public classes and functions of the package, and the public methods of its classes, by dotted name."""
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(hf_federated.__path__, "hf_federated."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, item in vars(module).items():
            if name.startswith("_") or getattr(item, "__module__", None) != info.name:
                continue
            if inspect.isclass(item):
                methods = {key: value for key, value in vars(item).items() if not key.startswith("_")}
                found.update({f"{info.name}.{name}.{key}": value for key, value in methods.items()})
            if inspect.isclass(item) or inspect.isroutine(item):
                found[f"{info.name}.{name}"] = item
    return found


def examples(item: Any, name: str) -> list[doctest.DocTest]:
    return [test for test in FINDER.find(item, name, globs={}) if test.examples]


OBJECTS = public_objects()
WITH_EXAMPLES = sorted(name for name, item in OBJECTS.items() if inspect.getdoc(item) and examples(item, name))


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples may write files
    for test in examples(OBJECTS[name], name):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("name", sorted(hf_federated.__all__))
def test_public_class_has_an_example(name):
    item = getattr(hf_federated, name)
    if inspect.isclass(item) and not issubclass(item, Exception):
        assert f"{item.__module__}.{item.__qualname__}" in WITH_EXAMPLES


def test_every_public_object_is_documented():
    undocumented = sorted(name for name, item in OBJECTS.items() if callable(item) and not inspect.getdoc(item))
    assert not undocumented


def test_doctest_finder_finds_known_examples():
    names = {name.rpartition(".")[2] for name in WITH_EXAMPLES}
    assert {"FederatedTrainer", "FedAvg", "Ledger", "pack", "federate"} <= names
