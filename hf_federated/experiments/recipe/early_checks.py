"""
Checks of a recipe against this machine: data files, output folder, disk, packages and the length of the run.

The checks need no model and no import of torch, so that the command line answers in seconds. They refuse only what
certainly fails. The trainer repeats the checks of its arguments, for scripts and for what is known only then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.data_columns import missing_column, named_columns
from hf_federated.experiments.recipe.fields import CLASS_TABLES, named_section_fields, section_fields
from hf_federated.experiments.recipe.schema import Mistakes, RecipeError, recipe_errors
from hf_federated.experiments.recipe.sections import DEFAULT_OUTPUT_DIR
from hf_federated.experiments.recipe.source_fields import source_value
from hf_federated.experiments.recipe.yaml_file import DEFAULT_TASK
from hf_federated.utils.due_steps import describe_undue_steps, warn_once
from hf_federated.utils.optimizer_packages import check_optimizer_package
from hf_federated.utils.storage import check_folder, check_free_space


# Metrics of every evaluation, in addition to those of the task.
COMMON_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second")
# A Hub id that cannot be a path of a file. `check_local_path` decides about all other names.
PLAIN_HUB_ID = re.compile(r"[\w-]+(/[\w-]+)?")
# The head of the pretrained model, which a task replaces, can have up to this share of the weights.
MAX_HEAD_SHARE = 0.5


def check_early(
    values: Mapping[str, Any],
    output_dir: str,
    trains: bool = True,
    evaluates: bool = True,
    examples: str | None = None,
    test_examples: str | None = None,
) -> None:
    """
    Check a recipe whose names and types are valid before anything is imported or loaded.

    Args:
        values (`Mapping[str, Any]`): The values of the recipe.
        output_dir (`str`): The output folder of the run.
        trains (`bool`, *optional*, defaults to `True`): Whether this party trains. The server of a network does not.
        evaluates (`bool`, *optional*, defaults to `True`): Whether this party evaluates, logs and saves the rounds. A
            client of a network does not.
        examples (`str`, *optional*): The examples of a client of a network. Replaces `data.path`.
        test_examples (`str`, *optional*): The test examples of the server of a network. Replaces `data.test_path`.

    Raises:
        RecipeError: If a column, a metric or the package of an optimizer does not exist. The error lists all mistakes.
        StorageError: If the output folder cannot be written to, or the disk has no space for the model.
    """
    mistakes = Mistakes()
    data = values.get("data") or {}
    # A client with its own examples reads none of the recipe's data.
    test = None if examples is not None else test_examples or data.get("test_path")
    mistakes.found += _path_mistakes(values, trains, examples, test)
    train = (examples or data.get("path")) if trains else None
    if data.get("csv") is None:  # Options of the reader can name another separator or encoding.
        mistakes.found += _column_mistakes(values, train, test, examples is None)
    training = values.get("training") or {}
    if evaluates:
        mistakes.found += _metric_mistakes(values, training)
    if trains:
        models = values.get("client_models") or []
        sections = {f"client_models[{number}].training": item.get("training") for number, item in enumerate(models)}
        for section, given in {"training": training, **sections}.items():
            with mistakes.collect(), recipe_errors(section):
                check_optimizer_package(str((given or {}).get("optim", "")))
    mistakes.raise_found()
    check_folder(output_dir)
    if not evaluates:
        return
    if not any(Path(output_dir).glob("checkpoint-*")):  # a run to replace or to resume, whose space is free later
        check_free_space(output_dir, _smallest_model(values), 1)
    if values.get("split") is None and (num_rounds := number_of_rounds(values, training)) is not None:
        if (text := describe_undue_steps(_with_defaults(values, training), num_rounds)) is not None:
            warn_once(text)


def output_folder(values: Mapping[str, Any], output_dir: str | None) -> str:
    """Return the output folder of a recipe, which `--output-dir` replaces."""
    return output_dir or (values.get("training") or {}).get("output_dir") or DEFAULT_OUTPUT_DIR


def _path_mistakes(values: Mapping[str, Any], trains: bool, examples: str | None, test: str | None) -> Iterator[str]:
    """The names that are written like local paths and do not exist."""
    data, models = values.get("data") or {}, values.get("client_models") or []
    named = {f"client_models[{number}].name_or_path": item.get("name_or_path") for number, item in enumerate(models)}
    named |= {"model.name_or_path": (values.get("model") or {}).get("name_or_path")}
    named |= {"data.test_path": test, "--examples": examples}
    named |= {"data.path": data.get("path")} if trains and examples is None else {}
    for field, name in named.items():
        if name is None or PLAIN_HUB_ID.fullmatch(str(name)) or Path(str(name)).exists():
            continue
        # The import of `datasets` takes half a second.
        from hf_federated.experiments.data.files import check_local_path

        try:
            check_local_path(str(name), f"{field}: ")
        except CommandError as error:
            yield str(error)


def _column_mistakes(
    values: Mapping[str, Any], train: str | None, test: str | None, is_partitioned: bool
) -> Iterator[str]:
    """The columns that the recipe names and that the local data files do not have."""
    task_columns = list(_columns_of("task", values))
    of_partition = list(_columns_of("partition", values)) if is_partitioned else []
    for path, columns in ((train, [*task_columns, *of_partition]), (test, task_columns)):
        if path is not None and Path(path).exists():
            found = (missing_column(Path(path), field, column) for field, column in columns)
            yield from filter(None, found)


def _columns_of(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    given = values.get(section)
    if given is None and section == "partition":
        return
    given = {"name": DEFAULT_TASK, **(given or {})}
    yield from named_columns(section, named_section_fields()[section][str(given["name"])], given)


def _task_name(values: Mapping[str, Any]) -> str:
    return str((values.get("task") or {}).get("name", DEFAULT_TASK))


def _metric_mistakes(values: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[str]:
    """A `metric_for_best_model` that no evaluation of the task has."""
    name = training.get("metric_for_best_model")
    known = source_value(*CLASS_TABLES["task"])[_task_name(values)].metric_names
    if name is None or not known or str(training.get("eval_strategy", "no")) == "no":
        return  # The metrics of SuperGLUE depend on the examples.
    names = list(dict.fromkeys((*known, *filter(None, [(values.get("task") or {}).get("metric")]), *COMMON_METRICS)))
    if str(name).removeprefix("eval_") not in names:
        yield (
            f"training.metric_for_best_model is {name!r}, but the evaluation of the task {_task_name(values)} has the "
            f"metrics {', '.join(names)}. Set the field to one of them."
        )


def number_of_rounds(values: Mapping[str, Any], training: Mapping[str, Any]) -> int | None:
    """The number of rounds, or `None` if `max_steps` and `local_steps` do not define it."""
    federation, max_steps = values.get("federation") or {}, training.get("max_steps") or -1
    if max_steps > 0:
        num_rounds, rest = divmod(max_steps, federation.get("local_steps") or max_steps + 1)
        return None if rest else num_rounds
    if (num_rounds := federation.get("num_rounds")) is not None:
        return num_rounds
    epochs = training.get("num_train_epochs")
    if epochs is not None and not math.isfinite(epochs):
        raise RecipeError(f"training.num_train_epochs is {epochs}. Set it to a number of rounds of at least 1.")
    return max(math.ceil(3 if epochs is None else epochs), 1)


def _with_defaults(values: Mapping[str, Any], training: Mapping[str, Any]) -> SimpleNamespace:
    """The training arguments of the recipe with the defaults of their class, without its import."""
    defaults = {name: item.default for name, item in section_fields(_task_name(values))["training"].items()}
    return SimpleNamespace(**{**defaults, **training})


def _smallest_model(values: Mapping[str, Any]) -> int:
    """Smallest size of the trained model in bytes, from the weight files on this machine, or 0 if it is not known."""
    model, federation = values.get("model") or {}, values.get("federation") or {}
    changes = ("lora", "prefix", "kwargs", "decoder_name_or_path", "head")
    folder = Path(str(model.get("name_or_path")))
    if any(model.get(name) is not None for name in changes) or federation.get("freeze") or not folder.is_dir():
        return 0
    size = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    return int(size * MAX_HEAD_SHARE)
