"""Fields of dataclasses that are read from source code are the fields of the imported classes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.experiments.recipe.schema import dataclass_fields, type_name
from hf_federated.experiments.recipe.source_fields import find_class, source_classes, source_fields
from hf_federated.split_training import SplitConfig
from hf_federated.tasks import TASKS


CLASSES = {
    "TrainingArguments": TrainingArguments,
    "Seq2SeqTrainingArguments": Seq2SeqTrainingArguments,
    "SplitConfig": SplitConfig,
    **TASKS,
    **PARTITIONERS,
}


@pytest.mark.parametrize("name", CLASSES)
def test_source_fields_equal_the_fields_of_the_imported_class(name):
    cls = CLASSES[name]
    found = source_fields(cls.__module__, cls.__name__)
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
    fields = {name: source_fields(cls.__module__, cls.__name__) for name, cls in CLASSES.items()}
    unknown = {(name, key) for name, items in fields.items() for key, item in items.items() if item.annotation is Any}
    # From Python 3.13, `pathlib.Path` is defined in a private module.
    assert unknown <= {("Seq2SeqTrainingArguments", "generation_config")}


@pytest.mark.parametrize(
    ("module", "name", "classes"),
    [("hf_federated.tasks", "TASKS", TASKS), ("hf_federated.data.partitioners", "PARTITIONERS", PARTITIONERS)],
)
def test_source_classes_equal_the_imported_table(module, name, classes):
    found = source_classes(module, name)
    assert {key: (cls.module, cls.node.name) for key, cls in found.items()} == {
        key: (cls.__module__, cls.__name__) for key, cls in classes.items()
    }


def test_inherited_class_attributes_are_found():
    tasks = source_classes("hf_federated.tasks", "TASKS")
    assert {name: cls.attribute("arguments_class") for name, cls in tasks.items()} == {
        name: cls.arguments_class.__name__ for name, cls in TASKS.items()
    }


def test_missing_classes_and_tables_are_errors():
    assert find_class("hf_federated.no_such_module", "Task") is None
    assert find_class("no_such_package.module", "Task") is None
    with pytest.raises(ValueError, match=r"transformers\.training_args has no class Arguments"):
        source_fields("transformers.training_args", "Arguments")
    with pytest.raises(ValueError, match=r"hf_federated\.tasks has no dict TABLE"):
        source_classes("hf_federated.tasks", "TABLE")


def test_reading_fields_imports_no_library():
    code = (
        "import sys\n"
        "from hf_federated.experiments.recipe.source_fields import source_fields\n"
        "source_fields('transformers.training_args', 'TrainingArguments')\n"
        "print(*sys.modules)\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hf_federated.experiments.recipe.source_fields" in loaded
    assert not {"torch", "transformers", "datasets", "numpy"} & set(loaded)
