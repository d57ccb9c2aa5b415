"""The private names of other libraries that the package uses exist, and `_compat.py` lists every one of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.state import GradientState
from datasets import Dataset
from language import language_model, texts, tokenizer
from packaging.version import Version
from public_trainers import TRAINERS, prompts
from tiny import arguments, rows, tiny_model

import hf_federated
from hf_federated import _compat
from hf_federated._compat import CHECKED_VERSIONS, PRIVATE_NAMES, PrivateName


PACKAGE = Path(hf_federated.__file__).parent
CONSTRAINTS = PACKAGE.parent / "constraints.txt"


def resolve(path: str) -> Any:
    """The class or module with a dotted path."""
    if importlib.util.find_spec(path.partition(".")[0]) is None:
        pytest.skip(f"{path.partition('.')[0]} is not installed")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def instances(tmp_path_factory) -> dict[str, Any]:
    """Objects of the classes that have private attributes of an instance."""
    model = tiny_model()
    model.loss_function = print
    output_dir = tmp_path_factory.mktemp("trainer")
    trainer = transformers.Trainer(model=model, args=arguments(output_dir), train_dataset=rows(4))
    trainer.train()  # sets attributes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {
        "accelerate.Accelerator": accelerate.Accelerator(cpu=True),
        "accelerate.state.GradientState": GradientState(),
        "datasets.Dataset": Dataset.from_dict({"column": [1]}),
        "datasets.IterableDataset": Dataset.from_dict({"column": [1]}).to_iterable_dataset(),
        "torch.nn.Module": accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1)),
        "torch.optim.lr_scheduler.LRScheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "transformers.PreTrainedModel": model,
        "transformers.PretrainedConfig": transformers.BertConfig(_commit_hash="0" * 40),
        "transformers.Trainer": trainer,
    }
    if importlib.util.find_spec("trl") is not None:
        objects["trl.SFTTrainer"] = sft_trainer(output_dir)
        spec = TRAINERS["GRPOTrainer"]
        objects["trl.GRPOTrainer"] = spec.build(spec.trainer_class, output_dir, prompts("north", 2))
    return objects


def sft_trainer(output_dir: Path) -> Any:
    trl = importlib.import_module("trl")
    return trl.SFTTrainer(
        model=language_model(),
        args=trl.SFTConfig(output_dir=str(output_dir), bf16=False, use_cpu=True, report_to=[]),
        train_dataset=texts("north", 2),
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: f"{private.owner}.{private.name}")
def test_private_name_exists(private: PrivateName, instances):
    owner = resolve(private.owner)
    library = importlib.import_module(private.owner.partition(".")[0])
    if private.removed is not None and Version(library.__version__) >= Version(private.removed):
        pytest.skip(f"{library.__name__} {private.removed} removed the name")
    assert hasattr(owner, private.name) or hasattr(instances.get(private.owner), private.name), (
        f"{library.__name__} {library.__version__} has no {private.owner}.{private.name}. hf_federated uses the name "
        f"({private.use}) and was checked with {library.__name__} {private.checked}. {private.without}"
    )


def test_checked_versions_are_those_of_the_constraints():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {name: pinned[name] for name in CHECKED_VERSIONS} == CHECKED_VERSIONS


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: f"{private.owner}.{private.name}")
def test_use_of_a_private_name_is_where_the_table_says(private: PrivateName):
    for use in private.use.split("; "):
        kind, _, places = use.partition(": ")
        for place in places.split(", "):
            if kind in ("wrapper", "constant"):
                assert hasattr(_compat, place), f"_compat.py has no {place}"
                continue
            files = sorted((PACKAGE / place).rglob("*.py"))
            assert any(private.name in file.read_text(encoding="utf-8") for file in files), (
                f"{place} does not use {private.name}"
            )


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each access to a private attribute of an object other than `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr


def test_package_uses_no_private_name_outside_the_table(instances):
    # TRL is optional.
    owners = [resolve(private.owner) for private in PRIVATE_NAMES if not private.owner.startswith("trl.")]
    owners += [instance for path, instance in instances.items() if not path.startswith("trl.")]
    in_place = {private.name for private in PRIVATE_NAMES if not re.fullmatch(r"(wrapper|constant): .*", private.use)}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "_compat.py":
            continue
        for line, name in private_attributes(ast.parse(path.read_text(encoding="utf-8"))):
            if name not in in_place and any(hasattr(owner, name) for owner in owners):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {name}. Wrap or list the name in _compat.py.")
    assert not wrong, "\n".join(wrong)
