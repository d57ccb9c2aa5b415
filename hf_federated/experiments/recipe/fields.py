"""
The sections and fields of a recipe, and the check of their names and types.

The classes `TrainingArguments`, tasks and partitioners are read from source code, so that the check and
`hf-federated train --help` import neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_federated.config import FederatedConfig
from hf_federated.experiments.recipe.schema import (
    Mistakes,
    RecipeError,
    RecipeField,
    build_config,
    check_section,
    dataclass_fields,
    describe_unknown_fields,
)
from hf_federated.experiments.recipe.sections import (
    AuditSection,
    ClientModelSection,
    DataSection,
    ModelSection,
    NetworkSection,
    PublicSection,
    TopLevelFields,
)
from hf_federated.experiments.recipe.source_fields import source_parameters, source_value
from hf_federated.experiments.recipe.yaml_file import DEFAULT_TASK


# The tables of the classes that the sections name.
CLASS_TABLES = {
    "task": ("hf_federated.tasks", "TASKS"),
    "partition": ("hf_federated.data.partitioners", "PARTITIONERS"),
}


@dataclass
class CheckedSections:
    """
    The sections of a recipe with valid names and types. An invalid section is missing.

    Args:
        classes (`dict[str, dict[str, Any]]`): The sections `task` and `partition`, with `name`.
        sections (`dict[str, dict[str, Any]]`): The other sections.
        top_level (`dict[str, Any]`): The fields that belong to no section, except `client_models`.
        client_models (`list[ClientModelSection]`): The entries of `client_models`.
    """

    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    top_level: dict[str, Any] = field(default_factory=dict)
    client_models: list[ClientModelSection] = field(default_factory=list)


def named_section_fields() -> dict[str, dict[str, dict[str, RecipeField]]]:
    """
    The fields of the sections `task` and `partition`, for each class.

    Returns:
        `dict`: Maps the name of a section to the names of its classes, and each class to its fields without `name`.
    """
    fields = {
        section: {name: dataclass_fields(cls) for name, cls in source_value(*table).items()}
        for section, table in CLASS_TABLES.items()
    }
    # The data can provide the required arguments of a task, which are the label names.
    for task in fields["task"].values():
        for name, item in task.items():
            if item.required:
                task[name] = RecipeField(name, item.annotation | None, None, f"{item.help} (read from the data)")
    return fields


def section_fields(task: str = DEFAULT_TASK) -> dict[str, dict[str, RecipeField]]:
    """
    The fields of all other sections, and of the top level under the key `""`.

    Args:
        task (`str`, *optional*, defaults to `"text-classification"`): The task, which determines the class of the
            training arguments.

    Returns:
        `dict[str, dict[str, RecipeField]]`: Maps a section to its fields by name, in the order of `--help`.
    """
    top = dataclass_fields(TopLevelFields)
    # In YAML, client_models is a list of mappings. Each mapping is validated separately.
    top["client_models"] = dataclasses.replace(top["client_models"], annotation=list[dict])
    return {
        "model": dataclass_fields(ModelSection),
        "data": dataclass_fields(DataSection),
        "training": dataclass_fields(source_value(*CLASS_TABLES["task"])[task].arguments_class),
        "federation": _federation_fields(),
        "card": source_parameters("transformers.trainer", "Trainer", "create_model_card"),
        "public": dataclass_fields(PublicSection),
        "split": dataclass_fields(source_value("hf_federated.split_training.config", "SplitConfig")),
        "network": dataclass_fields(NetworkSection),
        "audit": dataclass_fields(AuditSection),
        "": top,
    }


def _federation_fields() -> dict[str, RecipeField]:
    """The fields of `FederatedConfig`, with types for YAML in place of the types for a command line."""
    fields = dataclass_fields(FederatedConfig)
    for name, item in fields.items():
        if name.endswith("_kwargs"):
            fields[name] = dataclasses.replace(item, annotation=dict[str, Any] | None)
    return fields


def check_names(values: Mapping[str, Any]) -> None:
    """
    Check the names and types in the values of a recipe, and the fields of `federation`, without an import of torch.

    [`~hf_federated.experiments.recipe.recipe.parse_recipe`] repeats this check and also validates the arguments of
    classes and algorithms.

    Args:
        values (`Mapping[str, Any]`): The values returned by
            [`~hf_federated.experiments.recipe.yaml_file.read_values`].

    Raises:
        RecipeError: If a field is unknown, missing or of the wrong type. The error lists all such mistakes.
    """
    mistakes = Mistakes()
    checked = check_sections(values, mistakes)
    with mistakes.collect():
        build_config("federation", FederatedConfig, checked.sections.get("federation", {}))
    mistakes.raise_found()


def check_sections(values: Mapping[str, Any], mistakes: Mistakes) -> CheckedSections:
    """
    Check the names and types in all sections.

    Args:
        values (`Mapping[str, Any]`): The values of a recipe.
        mistakes ([`~hf_federated.experiments.recipe.schema.Mistakes`]): Receives the mistakes.

    Returns:
        [`CheckedSections`]: The valid sections.
    """
    checked = CheckedSections()
    class_fields = named_section_fields()
    for section, fields in class_fields.items():
        given = _with_default_task(values.get(section)) if section == "task" else values.get(section)
        if given is not None:
            with mistakes.collect():
                checked.classes[section] = _check_class_section(section, given, fields)
    # With an unknown task, the arguments of all tasks are accepted. seq2seq has the arguments of all other tasks.
    task = named_class(_with_default_task(values.get("task")), class_fields["task"])
    known = section_fields(task or "seq2seq")
    top_level = known.pop("")
    names = [*known, *class_fields, *top_level]
    mistakes.found += describe_unknown_fields("", [key for key in values if key not in names], names)
    for name, fields_of_section in known.items():
        # An empty section `public`, `split` or `audit` changes the run, so a missing section must stay missing.
        if name not in ("public", "split", "audit") or values.get(name) is not None:
            with mistakes.collect():
                checked.sections[name] = check_section(name, values.get(name), fields_of_section)
    with mistakes.collect():
        top_values = {key: value for key, value in values.items() if key in top_level}
        checked.top_level = dict(check_section("", top_values, top_level))
    for index, item in enumerate(checked.top_level.pop("client_models", None) or []):
        with mistakes.collect():
            checked.client_models.append(_client_model(index, item))
    return checked


def named_class(values: Any, names: Mapping[str, Any]) -> str | None:
    """The name in a section `task` or `partition`, or `None` if it is not one of `names`."""
    name = values.get("name") if isinstance(values, dict) else None
    return name if isinstance(name, str) and name in names else None


def _with_default_task(values: Any) -> Any:
    """Add the name of the default task to a section `task` without a name."""
    if values is None:
        return {"name": DEFAULT_TASK}
    return {"name": DEFAULT_TASK, **values} if isinstance(values, dict) else values


def _check_class_section(section: str, values: Any, fields: dict[str, dict[str, RecipeField]]) -> dict[str, Any]:
    """Check a section that names a class."""
    name = named_class(values, fields)
    if name is None:
        given = values.get("name") if isinstance(values, dict) else values
        similar = difflib.get_close_matches(str(given), fields, n=1)
        hint = f"did you mean {similar[0]}? Allowed:" if similar else "it must be one of"
        raise RecipeError(f"{section}.name is {given!r}; {hint} {', '.join(fields)}.")
    check_section(section, {key: value for key, value in values.items() if key != "name"}, fields[name])
    return values


def _client_model(index: int, values: Any) -> ClientModelSection:
    """Check one entry of `client_models`."""
    section = f"client_models[{index}]"
    checked = check_section(section, values, dataclass_fields(ClientModelSection))
    training = source_value("transformers.training_args", "TrainingArguments")
    check_section(f"{section}.training", checked.get("training"), dataclass_fields(training))
    item = ClientModelSection(**{**checked, "training": checked.get("training") or {}})
    try:
        item.model  # noqa: B018  the property checks the combination of the fields
    except RecipeError as error:
        raise RecipeError(*(text.replace("model", section, 1) for text in error.mistakes)) from error
    return item
