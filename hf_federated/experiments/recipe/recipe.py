"""The class [`Recipe`], which defines what to train on which clients, and the validation of its sections.

A recipe is a YAML file with these sections:

- `model`: the initial model of every client;
- `data`: the dataset;
- `task`: a task of `hf_federated.tasks` and its arguments;
- `partition`: a partitioner of `hf_federated.data` and its arguments;
- `training`: any field of `transformers.TrainingArguments`;
- `federation`: any field of [`FederatedConfig`], or in its place `split`: any field of [`SplitConfig`];
- `public` and `client_models`: data and client models for distillation;
- `network`: the clients of a federation on several machines, and how long its server waits for them;
- `card`: any argument of `Trainer.create_model_card`;
- `audit`: attacks on what a client sends;
- the top-level fields `compare`, `local_clients`, `plots`, `scale` and `benchmark`.

All sections are validated before any data or model is loaded. A [`RecipeError`] lists all mistakes, one line each.
`yaml_file.py` reads the YAML file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import Seq2SeqTrainer, TrainingArguments

from hf_federated.aggregation import build_aggregation
from hf_federated.config import FederatedConfig
from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.distillation import build_distillation
from hf_federated.experiments.recipe.fields import (
    CheckedSections,
    check_sections,
    named_class,
    named_section_fields,
)
from hf_federated.experiments.recipe.schema import (
    Mistakes,
    RecipeError,
    build,
    build_config,
    recipe_errors,
    too_small,
)
from hf_federated.experiments.recipe.sections import (
    VARIANT_FIELDS,
    AuditSection,
    DataSection,
    ModelSection,
    NetworkSection,
    PublicSection,
    TopLevelFields,
)
from hf_federated.experiments.recipe.yaml_file import DEFAULT_TASK, apply_changes, read_values
from hf_federated.postprocessing import exchange_codec_steps
from hf_federated.secure_aggregation import SecureAggregation
from hf_federated.split_training import SplitConfig
from hf_federated.tasks import TASKS, Seq2Seq, SuperGlueSeq2Seq
from hf_federated.utils.algorithm_names import SECURE_AGGREGATION_NAMES


@dataclass(frozen=True)
class ClassSection:
    """
    A section that names a class and its arguments: `task` or `partition`.

    Args:
        name (`str`): Name of the class in a recipe.
        cls (`type`): The class.
        arguments (`dict[str, Any]`): The arguments in the recipe. Arguments that depend on the data can be missing.
    """

    name: str
    cls: Any
    arguments: dict[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """The arguments in the recipe that are not null."""
        return {name: value for name, value in self.arguments.items() if value is not None}

    @property
    def missing(self) -> list[str]:
        """The required arguments that the recipe does not set."""
        required = [item.name for item in dataclasses.fields(self.cls) if item.default is dataclasses.MISSING]
        return [name for name in required if name not in self.given]

    @property
    def missing_labels(self) -> list[str]:
        """The missing names of labels or tags, which are read from the data."""
        return [name for name in self.missing if name in ("label_names", "tag_names")]

    @property
    def generates_text(self) -> bool:
        """Whether the class is a task that is evaluated on generated texts."""
        return self.cls.trainer_class is Seq2SeqTrainer

    @property
    def supports_encoder_decoder(self) -> bool:
        """Whether the class is a task whose model can be built from a pretrained encoder and a pretrained decoder."""
        return issubclass(self.cls, (Seq2Seq, SuperGlueSeq2Seq))


@dataclass(frozen=True)
class AuditVariant:
    """
    A setting of the section `audit`.

    Args:
        recipe ([`Recipe`]): The recipe with the changes of the variant.
        clip (`float`, *optional*): `max_norm` of [`ClipUpdate`].
        noise (`float`, *optional*): `std` of [`GaussianNoise`].
        num_summed (`int`, *optional*): Number of clients whose updates the attacked payload sums. Defaults to the
            clients of a round with secure aggregation, and to 1 without it.
    """

    recipe: Recipe
    clip: float | None = None
    noise: float | None = None
    num_summed: int | None = None


@dataclass
class Recipe(TopLevelFields):
    """
    The validated content of a recipe.

    Args:
        model ([`ModelSection`]): The initial model of every client.
        data ([`DataSection`]): The dataset.
        task ([`ClassSection`]): The task, which converts examples to model inputs and computes metrics.
        partition ([`ClassSection`], *optional*): The partitioner that distributes the examples over clients. `None`
            for a federated dataset, which is partitioned already.
        training (`dict`, *optional*): Fields of `transformers.TrainingArguments`.
        federation (`dict`, *optional*): Fields of [`FederatedConfig`].
        card (`dict`, *optional*): Arguments of `Trainer.create_model_card`.
        audit ([`AuditSection`], *optional*): Attacks on what a client sends, which run after training.
        variants (`dict[str, AuditVariant]`, *optional*): The settings that `audit` compares, by name.
        split (`dict`, *optional*): Fields of [`SplitConfig`]. If set, a split model is trained, without rounds.
        public ([`PublicSection`], *optional*): The public examples and the server's examples for distillation.
        network ([`NetworkSection`], *optional*): The clients on other machines, which `hf-federated serve` accepts.
        client_models (`list[ClientModelSection]`, *optional*): Models that are assigned to the clients in turn.
        compare (`list[str]`, *optional*): Baselines to train in the same run: `"centralized"`, `"local"`.
        local_clients (`int`, *optional*): Number of clients, chosen at random, that train alone for the baseline
            `"local"`. Defaults to all clients.
        plots (`bool`, *optional*, defaults to `False`): Write PNG plots of the learning curve and the partition.
        scale (`str`, *optional*, defaults to `"default"`): Name of the applied scale.
        benchmark (`dict`, *optional*): The section `benchmark`, which `hf-federated benchmark` reads.
    """

    model: ModelSection
    data: DataSection
    task: ClassSection
    partition: ClassSection | None = None
    training: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    audit: AuditSection | None = None
    variants: dict[str, AuditVariant] = field(default_factory=dict)
    split: dict[str, Any] | None = None
    public: PublicSection | None = None
    network: NetworkSection = field(default_factory=NetworkSection)

    @property
    def evaluates_clients(self) -> bool:
        """Whether clients are evaluated on their own test examples."""
        return bool(self.federation.get("evaluate_clients", FederatedConfig.evaluate_clients))

    def mistakes(self) -> Iterator[str]:
        yield from too_small(self, "", local_clients=1)
        if self.task.generates_text and self.training.get("predict_with_generate") is False:
            yield (
                f"training.predict_with_generate is false, but the task {self.task.name} is evaluated on generated"
                " texts. Remove the field."
            )
        if self.model.decoder_name_or_path is not None and not self.task.supports_encoder_decoder:
            yield (
                f"model.decoder_name_or_path is set, but the task is {self.task.name}. Only sequence-to-sequence tasks"
                " (seq2seq, superglue-seq2seq) accept it."
            )
        yield from self._head_mistakes()
        for name in ("federation", "public", "client_models", "audit"):
            if self.split is not None and getattr(self, name):
                yield f"split and {name} are both set. A split model does not use {name}; remove the section."
        if self.public is not None and self.public.share is not None and self.partition is None:
            yield (
                "public.share is set without partition. Public examples are set aside before partitioning; set"
                " partition, or set public.path instead of share."
            )

    def _head_mistakes(self) -> Iterator[str]:
        """Check the sections that a head on cached features excludes."""
        if self.model.head is None and not any(item.head for item in self.client_models):
            return
        if self.task.name != "text-classification":
            yield f"model.head is set, but the task is {self.task.name}. Cached features need text-classification."
        if self.split is not None:
            yield "model.head and split are both set. A split model trains all its blocks; remove one of them."
        if self.federation.get("freeze") is not None:
            yield (
                "federation.freeze is set with model.head. The head is trained and the rest is frozen; remove"
                " federation.freeze, or set head: blocks and model.freeze."
            )

    def training_arguments(self, **changes: Any) -> TrainingArguments:
        """
        Build the training arguments.

        Args:
            changes (`Any`): Fields that differ from the recipe.

        Raises:
            RecipeError: If an argument is invalid.
        """
        values = {**self.training, **changes}
        if self.task.generates_text:
            values["predict_with_generate"] = True
        args: TrainingArguments = build("training", self.task.cls.arguments_class, values)
        return args


# The partition of a dataset that belongs to a single client.
SINGLE_CLIENT = ClassSection("iid", PARTITIONERS["iid"], {"num_clients": 1})


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe and validate all names and types in it.

    Args:
        path (`str`): The YAML file.
        overrides (`Sequence[str]`, *optional*): Changes of the form `section.field=value`, where the value is YAML.

    Raises:
        RecipeError: If the file is missing or not YAML, or a name, type or combination of values is invalid.

    Example:

    ```python
    >>> import pathlib, tempfile
    >>> from hf_federated.experiments.recipe.recipe import load_recipe

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "recipe.yaml"
    ...     _ = path.write_text("{model: {name_or_path: bert}, data: {path: you/clients}}")
    ...     load_recipe(path, ["training.learning_rate=5e-4"]).training
    {'learning_rate': 0.0005}

    ```
    """
    return parse_recipe(read_values(path, overrides))


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """
    Validate names, types and combinations of values of a recipe, without loading data or models.

    Args:
        values (`Mapping[str, Any]`): The values returned by
            [`~hf_federated.experiments.recipe.yaml_file.read_values`].

    Raises:
        RecipeError: If a field is unknown, missing or of the wrong type, or a value or combination of values is
            invalid. The error lists all mistakes.
    """
    mistakes = Mistakes()
    checked = check_sections(values, mistakes)
    task = _class_section("task", values.get("task"), checked, TASKS, mistakes)
    partition = None
    if values.get("partition") is not None:
        partition = _class_section("partition", values["partition"], checked, PARTITIONERS, mistakes)
        # An invalid section has a placeholder, so that combinations with the other sections are validated.
        partition = partition or SINGLE_CLIENT
    _check_methods(checked.sections, mistakes)
    top_level = {**checked.top_level, "client_models": checked.client_models}
    recipe = _combine(task, partition, checked.sections, top_level, mistakes)
    if recipe.audit is not None:
        recipe.variants = audit_variants(values, recipe.audit)
    return recipe


def audit_variants(values: Mapping[str, Any], section: AuditSection) -> dict[str, AuditVariant]:
    """
    Build the recipes of the settings that an audit compares.

    Args:
        values (`Mapping[str, Any]`): The values of the recipe.
        section ([`AuditSection`]): The section `audit`.

    Raises:
        RecipeError: If the recipe of a variant is invalid. The error lists the mistakes of all variants.
    """
    base = {name: value for name, value in values.items() if name not in ("audit", "benchmark", "compare")}
    mistakes, variants = Mistakes(), {}
    for name, given in (section.variants or {"as configured": {}}).items():
        changes = dict(given or {})
        own = {key: changes.pop(key, None) for key in VARIANT_FIELDS}
        try:
            variants[name] = AuditVariant(parse_recipe(apply_changes(base, changes)), **own)
        except RecipeError as error:
            mistakes.found += [f"audit.variants.{name}: {mistake}" for mistake in error.mistakes]
    mistakes.raise_found()
    return variants


def _combine(
    task: ClassSection | None,
    partition: ClassSection | None,
    checked: Mapping[str, dict[str, Any]],
    top_values: dict[str, Any],
    mistakes: Mistakes,
) -> Recipe:
    """Build the sections and the recipe, which validates combinations. Raise an error with all mistakes."""
    # An invalid section has a placeholder, so that combinations of the other sections are validated.
    sections: dict[str, Any] = {"model": ModelSection("invalid"), "data": DataSection("invalid")}
    sections |= {name: checked.get(name, {}) for name in ("training", "federation", "card")}
    for name, cls in (
        ("model", ModelSection),
        ("data", DataSection),
        ("public", PublicSection),
        ("network", NetworkSection),
        ("audit", AuditSection),
    ):
        if name in checked:
            with mistakes.collect():
                sections[name] = cls(**checked[name])
    if task is not None:
        with mistakes.collect():
            recipe = Recipe(task=task, partition=partition, split=checked.get("split"), **sections, **top_values)
            if not mistakes.found:
                return recipe
    raise RecipeError(*mistakes.found)


def _check_methods(checked: Mapping[str, dict[str, Any]], mistakes: Mistakes) -> None:
    """Validate the values of `federation` and `split`, and the arguments of the algorithms that they name."""
    if "split" in checked:
        with mistakes.collect():
            build_config("split", SplitConfig, checked["split"])
    federation = checked.get("federation", {})
    with mistakes.collect():
        build_config("federation", FederatedConfig, federation)
    with mistakes.collect(), recipe_errors("federation"):
        build_aggregation(federation.get("aggregation", "fedavg"), federation.get("aggregation_kwargs"))
    with mistakes.collect(), recipe_errors("federation"):
        build_distillation(federation.get("distillation"), federation.get("distillation_kwargs"))
    if (name := federation.get("secure_aggregation")) is not None:
        with mistakes.collect(), recipe_errors("federation"):
            kwargs = federation.get("secure_aggregation_kwargs")
            SECURE_AGGREGATION_NAMES.build(name, kwargs, SecureAggregation)
    with mistakes.collect(), recipe_errors("federation"):
        kwargs = federation.get("exchange_codec_kwargs")
        exchange_codec_steps(
            FederatedConfig(exchange_codec=federation.get("exchange_codec"), exchange_codec_kwargs=kwargs)
        )


def partitioner_has_seed(partition: Mapping[str, Any]) -> bool:
    """Whether the partitioner of the section `partition` takes a seed."""
    return "seed" in named_section_fields()["partition"].get(str(partition.get("name")), {})


def _class_section(
    section: str, values: Any, checked: CheckedSections, classes: Mapping[str, Any], mistakes: Mistakes
) -> ClassSection | None:
    """
    Validate the arguments of a section that names one of `classes`.

    Returns:
        [`ClassSection`], *optional*: The section, without arguments if they are invalid, so that combinations with
            the other sections are validated. `None` if the name is invalid.
    """
    if section not in checked.classes:
        name = named_class({"name": DEFAULT_TASK, **values} if isinstance(values, dict) else values, classes)
        return None if name is None else ClassSection(name, classes[name], {})
    arguments = dict(checked.classes[section])
    name = arguments.pop("name")
    found = ClassSection(name, classes[name], arguments)
    # The constructor validates combinations of arguments. It is not called while required arguments are missing, which
    # are read from the data later.
    if not found.missing:
        with mistakes.collect():
            build(section, classes[name], arguments)
    return found
