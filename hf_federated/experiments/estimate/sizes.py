"""Numbers of clients and examples, and lengths of sequences, that an estimate needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, recipe_errors
from hf_federated.tasks import Task


# Tokens of an example if neither the task nor the model has a maximum.
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class EstimateOptions:
    """
    Numbers that an estimate uses in place of those of the data, and the speed of devices and connections.

    Args:
        num_clients (`int`, *optional*): Number of clients.
        num_examples (`int`, *optional*): Number of training examples of each client.
        num_public (`int`, *optional*): Number of public examples for distillation.
        num_labels (`int`, *optional*): Number of labels of the task.
        sequence_length (`int`, *optional*): Number of tokens of each example. Defaults to the maximum of the task.
        bandwidth_mbit (`float`, *optional*): Bandwidth of a client's connection in each direction, in 10⁶ bit/s.
        latency_ms (`float`, *optional*): Delay of a message in each direction, in milliseconds.
        tflops (`float`, *optional*): Throughput of a client's device, in 10¹² floating point operations per second.
        server_tflops (`float`, *optional*): Throughput of the server's device. Defaults to `tflops`.

    Raises:
        ValueError: If a number is not positive.
    """

    num_clients: int | None = None
    num_examples: int | None = None
    num_public: int | None = None
    num_labels: int | None = None
    sequence_length: int | None = None
    bandwidth_mbit: float | None = None
    latency_ms: float | None = None
    tflops: float | None = None
    server_tflops: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            smallest_is_zero = name == "latency_ms"
            if value is not None and (value < 0 or value == 0 and not smallest_is_zero):
                raise ValueError(f"{name} is {value:g}; it must be {'at least' if smallest_is_zero else 'above'} 0.")


@dataclass(frozen=True)
class DataSizes:
    """
    Numbers of the data of a recipe. A number is `None` if it is not known.

    Args:
        task ([`Task`]): The task, with the names of its labels.
        num_examples (`dict[str, int | None]`, *optional*): Number of training examples by client.
        num_public (`int`, *optional*): Number of public examples.
        source (`str`): Where the numbers are from.
    """

    task: Task
    num_examples: dict[str, int | None] | None
    num_public: int | None
    source: str

    @property
    def num_clients(self) -> int | None:
        """Number of clients."""
        return None if self.num_examples is None else len(self.num_examples)


def find_sizes(recipe: Recipe, options: EstimateOptions) -> DataSizes:
    """
    Find the numbers of clients and examples of a recipe.

    The data are read only if they are local and a number is neither given nor part of the recipe.

    Args:
        recipe ([`Recipe`]): The recipe.
        options ([`EstimateOptions`]): Given numbers.

    Raises:
        RecipeError: If the number of labels is not known, or the data cannot be read.
    """
    arguments, labels = recipe.task.given, recipe.task.missing_labels
    if options.num_labels is not None:
        arguments |= {name: [str(number) for number in range(options.num_labels)] for name in labels}
        labels = []
    needs_public = recipe.public is not None and options.num_public is None
    is_given = options.num_clients is not None and options.num_examples is not None
    if (labels or needs_public or not is_given) and Path(recipe.data.path).exists():
        return _read_sizes(recipe, options)
    if labels:
        raise RecipeError(
            f"task.{labels[0]} is not set, and the data are not on this machine. Pass --num-labels, or set the field."
        )
    with recipe_errors("task"):
        task: Task = recipe.task.cls(**arguments)
    names = _client_names(recipe, options)
    clients: dict[str, int | None] | None = None if names is None else dict.fromkeys(names, options.num_examples)
    return DataSizes(task, clients, options.num_public, "the options and the recipe")


def _client_names(recipe: Recipe, options: EstimateOptions) -> list[str] | None:
    number: Any = options.num_clients
    if number is None and recipe.network.clients:
        return list(recipe.network.clients)
    if number is None and recipe.partition is not None:
        number = recipe.partition.arguments.get("num_clients")
    return [f"client-{index}" for index in range(number)] if isinstance(number, int) else None


def _read_sizes(recipe: Recipe, options: EstimateOptions) -> DataSizes:
    raw = load_raw_data(recipe)
    clients: dict[str, int | None] = dict(raw.train.num_rows)
    if options.num_clients is not None:
        clients = {f"client-{index}": None for index in range(options.num_clients)}
    if options.num_examples is not None:
        clients = dict.fromkeys(clients, options.num_examples)
    num_public = len(raw.public) if raw.public is not None else None
    source = f"the data in {recipe.data.path}"
    if options.num_clients is not None or options.num_examples is not None:
        source += " and the options"
    return DataSizes(raw.task, clients, options.num_public or num_public, source)


@dataclass(frozen=True)
class Lengths:
    """
    Numbers of tokens of an example.

    Args:
        source (`int`): Tokens of the model's inputs.
        target (`int`, *optional*): Tokens of the decoder's targets, for an encoder–decoder.
        origin (`str`): Where the numbers are from.
    """

    source: int
    target: int | None
    origin: str


def find_lengths(task: Task, config: PretrainedConfig, options: EstimateOptions) -> Lengths:
    """
    Find the number of tokens of an example: the given number, or the maximum of the task, or that of the model.

    Args:
        task ([`Task`]): The task.
        config (`PretrainedConfig`): The config of the model.
        options ([`EstimateOptions`]): Given numbers.
    """
    values: dict[str, Any] = vars(task)
    target = values.get("max_target_length") if config.is_encoder_decoder else None
    if options.sequence_length is not None:
        return Lengths(options.sequence_length, target, "the option --sequence-length")
    if values.get("max_source_length") is not None:
        generated = 0 if config.is_encoder_decoder else values["max_target_length"]
        return Lengths(values["max_source_length"] + generated, target, "the maximum lengths of the task")
    for name in ("max_length", "block_size"):
        if values.get(name) is not None:
            return Lengths(values[name], target, f"task.{name}")
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions <= DEFAULT_LENGTH:
        return Lengths(positions, target, "the positions of the model")
    return Lengths(DEFAULT_LENGTH, target, "a default, because the task sets no maximum")
