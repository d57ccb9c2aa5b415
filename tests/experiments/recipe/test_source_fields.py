"""Classes that are read from source code have the fields of the imported classes."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from typing import Any

import pytest
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.experiments.recipe.schema import dataclass_fields, type_name
from hf_federated.experiments.recipe.source_fields import source_parameters, source_value
from hf_federated.split_training import SplitConfig
from hf_federated.tasks import TASKS
from hf_federated.utils.fields import check_of


CLASSES = {
    "TrainingArguments": TrainingArguments,
    "Seq2SeqTrainingArguments": Seq2SeqTrainingArguments,
    "SplitConfig": SplitConfig,
    **TASKS,
    **PARTITIONERS,
}


@pytest.mark.parametrize("name", CLASSES)
def test_fields_from_source_equal_the_fields_of_the_imported_class(name):
    cls = CLASSES[name]
    found = dataclass_fields(source_value(cls.__module__, cls.__name__))
    expected = dataclass_fields(cls)
    assert list(found) == list(expected)
    for field, item in expected.items():
        assert found[field].required == item.required
        assert found[field].help == item.help
        if found[field].default is not ...:
            assert found[field].default == item.default
        if found[field].annotation is not Any:
            assert type_name(found[field].annotation) == type_name(item.annotation), field


def test_few_annotations_need_an_import():
    fields = {name: dataclass_fields(source_value(cls.__module__, cls.__name__)) for name, cls in CLASSES.items()}
    unknown = {(name, key) for name, items in fields.items() for key, item in items.items() if item.annotation is Any}
    assert not unknown


@pytest.mark.parametrize(
    ("module", "name", "classes"),
    [("hf_federated.tasks", "TASKS", TASKS), ("hf_federated.data.partitioners", "PARTITIONERS", PARTITIONERS)],
)
def test_tables_of_classes_equal_the_imported_table(module, name, classes):
    found = source_value(module, name)
    assert {key: (cls.__module__, cls.__name__) for key, cls in found.items()} == {
        key: (cls.__module__, cls.__name__) for key, cls in classes.items()
    }


def test_inherited_class_attributes_are_found():
    assert {
        name: cls.arguments_class.__name__ for name, cls in source_value("hf_federated.tasks", "TASKS").items()
    } == {name: cls.arguments_class.__name__ for name, cls in TASKS.items()}


def test_missing_names_and_modules_are_errors():
    with pytest.raises(FileNotFoundError, match="no_such_module"):
        source_value("hf_federated.no_such_module", "Task")
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        source_value("no_such_package.module", "Task")
    with pytest.raises(ValueError, match=r"transformers\.training_args has no class or value Arguments"):
        source_value("transformers.training_args", "Arguments")
    with pytest.raises(ValueError, match=r"transformers\.trainer has no method Trainer\.create_card"):
        source_parameters("transformers.trainer", "Trainer", "create_card")


LIBRARY = '''
"""A module of a library that is not installed completely."""
import dataclasses
import enum
import os
from dataclasses import dataclass, field

import numpy_of_tomorrow as np
from not_installed import Backend, choose_seed
from typing import ClassVar, Optional

LIMIT = 2 * 8


class Level(str, enum.Enum):
    """A level."""

    LOW = "low"
    HIGH = "high"


class Device:
    """A class that YAML cannot represent."""


@dataclasses.dataclass(kw_only=True)
class Base:
    """A base."""

    kind: ClassVar["Backend"] = Backend
    level: "Optional[Level]" = None
    limit: int = LIMIT


@dataclass
class Settings(Base, Backend):
    """
    Settings.

    Args:
        array (`np.ndarray`): The array. It has a second sentence.
    """

    array: np.ndarray
    backend: Backend | None = None
    device: Device | None = None
    seed: int = choose_seed()
    names: list[str] = field(default_factory=lambda: os.listdir(), metadata={"help": "Names.", "more": Backend})
    tags: list[str] = dataclasses.field(default_factory=list)

    def method(self, first, second=Backend, third=LIMIT):
        raise RuntimeError("not executed")
'''


@pytest.fixture
def library(tmp_path, monkeypatch) -> str:
    """The name of a module that cannot be imported, because a library is missing."""
    name = f"library_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_values_that_need_a_missing_library_are_unknown(library):
    with pytest.raises(ImportError):
        __import__(library)
    settings = source_value(library, "Settings")
    fields = dataclass_fields(settings)
    assert list(fields) == ["level", "limit", "array", "backend", "device", "seed", "names", "tags"]
    assert [name for name, item in fields.items() if item.required] == ["array"]
    assert [name for name, item in fields.items() if item.annotation is Any] == ["array", "backend"]
    assert [name for name, item in fields.items() if item.default is ...] == ["seed", "names"]
    assert fields["limit"].default == 16 and fields["tags"].default == []
    assert fields["array"].help == "The array" and fields["names"].help == "Names."
    assert [field.kw_only for field in dataclasses.fields(settings)][:3] == [True, True, False]


def test_enumerations_keep_their_values_and_other_classes_accept_no_value(library):
    fields = dataclass_fields(source_value(library, "Settings"))
    assert type_name(fields["level"].annotation) == "low | high or null"
    level, device = check_of(fields["level"].annotation), check_of(fields["device"].annotation)
    assert level("low") is None and level("medium") == "must be low or high, but is 'medium'"
    assert device(None) is None and device("cpu") is not None
    assert issubclass(source_value(library, "Level"), enum.Enum)


def test_parameters_of_a_method_have_their_defaults(library):
    parameters = source_parameters(library, "Settings", "method")
    assert list(parameters) == ["first", "second", "third"]
    assert parameters["first"].required
    assert parameters["second"].default is ... and parameters["third"].default == 16


def test_reading_fields_imports_no_library():
    code = (
        "import sys\n"
        "from hf_federated.experiments.recipe.source_fields import source_value\n"
        "source_value('hf_federated.tasks', 'TASKS')\n"
        "source_value('transformers.training_args', 'TrainingArguments')\n"
        "print(*sys.modules)\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hf_federated.experiments.recipe.source_fields" in loaded
    assert not {"torch", "transformers", "datasets", "numpy"} & set(loaded)
