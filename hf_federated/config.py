"""`FederatedConfig`: settings of a federation, in addition to `TrainingArguments`.

It is a plain dataclass, like `peft.LoraConfig`. `HfArgumentParser` can parse it, and it is saved and loaded as
`federated_config.json`. It shares no field with `TrainingArguments`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from .utils.algorithm_names import (
    AGGREGATION_NAMES,
    COLLECTOR_NAMES,
    DISTILLATION_NAMES,
    EXCHANGE_CODEC_NAMES,
    SECURE_AGGREGATION_NAMES,
)
from .utils.arguments import require, require_one_of
from .utils.fields import ShareOrCount
from .utils.options import option
from .utils.run_files import CONFIG_NAME
from .utils.saved_config import SavedConfig
from .utils.selection import SAVED_FUNCTION, check_selection


EXCHANGES = ("auto", "trainable", "adapter", "all")
# The word of `keep_local`.
HEAD = "head"

# The fields that contain the name or an instance of an algorithm. Each has a field of its arguments.
_NAMES = (
    COLLECTOR_NAMES,
    AGGREGATION_NAMES,
    DISTILLATION_NAMES,
    SECURE_AGGREGATION_NAMES,
    EXCHANGE_CODEC_NAMES,
)
# The allowed values of fields that are `None` or at least 1.
_COUNTS = {
    "num_rounds": "at least 1",
    "local_steps": "at least 1",
    "max_rows_per_round": "at least 1, or None for all examples",
    "max_resident_clients": "at least 1",
}


def _check_share_or_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{name}` is {value!r}; set a count (10) or a share (0.1).")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"`{name}` is {value}; a share must be in (0, 1]. Set an integer for a count.")
    if isinstance(value, int):
        require(name, value, value >= 1, "at least 1")


def _parse_dict(value: Any, name: str) -> dict[str, Any]:
    """Return a dictionary from a dictionary, from `None`, or from the JSON text of a command line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{name}` is not valid JSON: {error}. Example: --{name} '{{\"name\": 0.1}}'.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` must be a dictionary, got {type(value).__name__}.")
    return value


def _parse_limits(value: Any) -> int | dict[str, int] | None:
    """Check the value of `max_examples_per_client`, which a command line passes as JSON text."""
    name = "max_examples_per_client"
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    limits = list(value.values()) if isinstance(value, dict) else [value]
    if value is not None and not (limits and all(type(limit) is int and limit >= 1 for limit in limits)):
        raise ValueError(
            f"`{name}` is {value!r}; it must be an integer of at least 1, or such an integer for each client id. "
            f"Example: --{name} '{{\"north\": 500}}'."
        )
    return value


def name_functions(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace functions in settings by their names, which JSON supports and which are the same in every run."""
    return {
        name: f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        if callable(value)
        else value
        for name, value in settings.items()
    }


def parse_freeze(freeze: str) -> tuple[bool, int]:
    """
    Parse a value of `freeze`.

    Args:
        freeze (`str`): `"embeddings"`, a number of layers (`"2"`), or both in any order (`"embeddings+2"`).

    Returns:
        `tuple[bool, int]`: Whether to freeze the embeddings, and the number of layers to freeze.

    Raises:
        ValueError: If `freeze` has another format.
    """
    match = re.fullmatch(r"embeddings|(?:embeddings\+)?(\d+)|(\d+)\+embeddings", freeze)
    if match is None:
        raise ValueError(f"`freeze` is {freeze!r}; use 'embeddings', a number of layers, or 'embeddings+2'.")
    return "embeddings" in freeze, int(match[1] or match[2] or 0)


@dataclass
class FederatedConfig(SavedConfig):
    """
    Settings of a federation: its rounds, the clients of a round, and what the server does with their updates.

    Args:
        num_rounds (`int`, *optional*):
            Number of rounds. Defaults to `num_train_epochs` of the training arguments, rounded up. If the training
            arguments set `max_steps`, defaults to `max_steps / local_steps`; `local_steps` must then be set.
        clients_per_round (`int` or `float`, *optional*, defaults to `1.0`):
            Number of clients sampled per round, without replacement. An `int` is a count. A `float` in (0, 1] is a
            share of the clients, rounded to the nearest count.
        local_epochs (`int`, *optional*, defaults to `1`):
            Number of epochs of a client on its training data per round.
        local_steps (`int`, *optional*):
            Number of optimizer steps of a client per round. It replaces `local_epochs`. A round continues after the
            last batch of the client's previous round.
        local_loop (`str`, *optional*, defaults to `"auto"`):
            `"auto"`: if nothing in local training is customized, it runs in a lean loop that computes the same bits
            as `Trainer.train()` and costs a small client less time. `"trainer"`: always in `Trainer.train()`.
        max_rows_per_round (`int`, *optional*):
            Maximum number of examples that a client trains on per round (250 in FedDRS, section 5.1). A client with
            more examples draws this number of examples without replacement in every round. The draw depends on the
            seed of the run, the round and the client id. Epochs, steps and weights in averages then refer to the drawn
            examples only. By default a client trains on all examples.
        balance (`str`, *optional*):
            `"min"`: no client trains on more examples than the smallest client of the cohort of the round, so that
            clients with many examples do not dominate (the "balance trick" of FedDRS, section 5.3). Examples are drawn
            as for `max_rows_per_round`. If both are set, the smaller number applies. By default clients are not
            balanced.
        max_examples_per_client (`int` or `dict[str, int]`, *optional*):
            Largest number of examples that a client on another machine may announce: training examples before and
            after encoding, evaluation examples with `evaluate_clients`, and the examples of a round if a stream or
            `weighting="tokens"` counts them. The server refuses a client that announces more. A dictionary has the
            number of training examples of each client by its id, before encoding, such as those in `partition.json`.
            It is not saved with the model. All parties set the same value. By default, from three clients on, the
            server refuses a number of more than ten times the median of the other clients. Clients in one process or
            one launch announce nothing. With `secure_aggregation`, clients hide their numbers, and only the client
            itself compares them.
        aggregation (`str` or [`~hf_federated.aggregation.Aggregation`], *optional*, defaults to `"fedavg"`):
            Algorithm that computes the global parameters from the client parameters: a name in
            `hf_federated.AGGREGATIONS`, the name of an entry point `hf_federated.aggregations` of an installed
            package, a reference to a class (`"my_package.module:MyAverage"`), or an instance.
        aggregation_kwargs (`dict`, *optional*):
            Arguments of the aggregation algorithm if `aggregation` is a name. On a command line, a JSON text.
        distillation (`str` or [`~hf_federated.distillation.Distillation`], *optional*):
            Algorithm with which the server, and clients that keep their own models, learn from predictions for public
            examples: a name in `hf_federated.DISTILLATIONS`, the name of an entry point `hf_federated.distillations`,
            a reference to a class, or an instance. The trainer then needs `public_dataset`.
        distillation_kwargs (`dict`, *optional*):
            Arguments of the distillation algorithm if `distillation` is a name. On a command line, a JSON text.
        collector (`str` or `UpdateCollector`, *optional*, defaults to `"synchronous"`):
            How the server obtains the updates of a round: `"synchronous"` waits for the clients of the cohort,
            `"fedbuff"` ([`~hf_federated.server.collectors.BufferedCollector`]) for any `buffer_size` of them. Also a
            reference to a class, or an instance of [`~hf_federated.server.collectors.UpdateCollector`].
        collector_kwargs (`dict`, *optional*):
            Arguments of the collector if `collector` is a name. On a command line, a JSON text.
        secure_aggregation (`str` or `SecureAggregation`, *optional*):
            Protocol with which the server learns the sum of the updates of a round, and no single update: `"secagg"`
            ([`SecAgg`]), `"secagg+"` for hundreds of clients ([`~hf_federated.secure_aggregation.SecAggPlus`]), or
            `"lightsecagg"` ([`~hf_federated.secure_aggregation.LightSecAgg`]). Also a reference to a class, or an
            instance.
        secure_aggregation_kwargs (`dict`, *optional*):
            Arguments of the protocol if `secure_aggregation` is a name. On a command line, a JSON text.
        exchange (`str`, `list[str]` or `Callable`, *optional*, defaults to `"auto"`):
            Tensors that the server and the clients exchange. `"auto"`: the adapter of a PEFT model, otherwise the
            trainable parameters. `"trainable"`: the trainable parameters, and the buffers of their modules.
            `"adapter"`: the adapter of a PEFT model. `"all"`: trainable and frozen parameters and buffers. Another
            text is a pattern: those tensors of `"trainable"` are exchanged whose complete name it matches, such as
            `"bert.*"`. `*` matches any text including dots, `?` one character and `[ab]` one of the characters; upper
            and lower case differ. The tensors of a list match one of its patterns. A function is called with the name
            and the tensor of each tensor of `"trainable"`, and returns whether it is exchanged. A saved configuration
            contains the name of the function, and cannot be loaded. `keep_local` must select all trainable parameters
            that are not exchanged.
        keep_local (`str`, `list[str]` or `Callable`, *optional*):
            Tensors that each client trains and keeps: a pattern, a list of patterns or a function as in `exchange`, of
            the trainable parameters and of all buffers that `state_dict()` contains. `"head"`: the parameters that the
            class of a transformers model adds to its base model, or `modules_to_save` of a PEFT model. `keep_local`
            has precedence over `exchange`. These tensors never leave a client. They are in the client's state, also in
            checkpoints, and the client trains and evaluates with them. Before its first training, a client has the
            values of its model. `evaluate_clients` evaluates each client with its own tensors. The server's model,
            which `evaluate` evaluates and `save_model` saves, keeps its initial values.
        exchange_dtype (`str`, *optional*):
            Dtype of the exchanged floating tensors in both directions: `"float32"`, `"bfloat16"` or `"float16"`. By
            default tensors keep their dtypes. The server keeps its values unrounded. Clients start from the rounded
            values and send back their changes, so that small changes are not lost.
        exchange_codec (`str` or [`~hf_federated.codecs.Codec`], *optional*):
            Codec of the exchanged floating tensors. The clients send their changes with error feedback
            ([`~hf_federated.postprocessing.EncodeUpdate`]), and the server sends the change since the last round
            ([`~hf_federated.postprocessing.EncodeState`]): `"int8"`, `"int4"`, `"topk"`
            ([`~hf_federated.codecs.TopK`]) or `"powersgd"` ([`~hf_federated.codecs.PowerSGD`]). Also the name of an
            entry point `hf_federated.codecs`, a reference to a class, or an instance.
        exchange_codec_kwargs (`dict`, *optional*):
            Arguments of the codec if `exchange_codec` is a name, such as `{"share": 0.1}`, and `direction`: `"both"`
            (the default), `"up"` or `"down"`. On a command line, a JSON text.
        client_optimizer_state (`str`, *optional*, defaults to `"reset"`):
            `"reset"`: a client starts each round with a fresh optimizer. `"carry"`: a client keeps its optimizer state
            between rounds. With `fp16=True`, this also applies to the client's gradient scaler.
        lr_schedule (`str`, *optional*, defaults to `"global"`):
            `"global"`: one learning-rate schedule over the whole run. The position of a client in the schedule is
            round × local steps of the client. `"round"`: the schedule restarts in every round.
        min_clients (`int` or `float`, *optional*, defaults to `1`):
            Minimum number of valid updates per round. A round with fewer updates fails. An `int` is a count. A `float`
            in (0, 1] is a share of the sampled clients, rounded up.
        max_update_ratio (`float`, *optional*, defaults to `30.0`):
            Largest change by a client in a round, as a ratio to the median change of the clients in this round and in
            past rounds. Changes are compared per optimizer step (with `"fednova"` per unit of its normalizer) and per
            learning rate of the schedule, see [`~hf_federated.server.bound_update.BoundUpdate`]. The server rejects an
            update with a larger change and names the client. `inf` or `None` accepts every finite change.
        round_deadline (`float`, *optional*):
            Time in seconds after which a round stops waiting for clients, once `min_clients` clients have replied.
            Clients without a reply count as failed in the round. By default a round waits for all clients.
        evaluate_clients (`bool`, *optional*, defaults to `False`):
            Whether to evaluate the global model on the evaluation data of each client whenever the global evaluation
            runs. `eval_dataset` must then be a [`FederatedDataset`].
        log_clients (`bool`, *optional*, defaults to `False`):
            Whether to log the loss, gradient norm and steps of each client under `client/<id>/`.
        report_anomalies (`bool`, *optional*, defaults to `False`):
            Whether to report the norm, the cosine and the distance rank of each update in the log and in
            `federated_anomalies.json`, as [`AnomalyReport`] does.
        live_report (`bool`, *optional*, defaults to `False`):
            Whether to write a page about the run to `_live_report.html` of the output directory after each round, as
            [`LiveReport`] does.
        freeze (`str`, *optional*):
            Parameters to freeze before training: `"embeddings"`, a number of layers from the embedding up (`"2"`), or
            both (`"embeddings+2"`). Frozen parameters are not exchanged.
        parallelism (`str`, *optional*, defaults to `"data"`):
            How the processes of `accelerate launch` share the work. `"data"`: the processes train each client
            together and split its batches, as accelerate does. With one client, the results are equal to the plain
            Trainer under the same launch. `"clients"`: each process trains different clients. The results are equal to
            the results of one process.
        server_device (`str`, *optional*):
            `"cpu"` keeps the global state, the sums of updates and the server optimizer on the CPU. By default they
            are on the device of the model, where they use up to four times the memory of the exchanged tensors.
        client_store (`str`, *optional*, defaults to `"memory"`):
            Storage of the state that clients keep between rounds: `"memory"` or `"disk"` (below `output_dir`).
        max_resident_clients (`int`, *optional*):
            Maximum number of client models in memory, if clients keep their own models. The other models are in the
            client store. The results do not change. By default all client models are in memory.
        federation_seed (`int`, *optional*):
            Seed of client sampling and of the random numbers of the clients. Defaults to `seed` of the training
            arguments. The name differs from `seed`, so that `HfArgumentParser` can parse both dataclasses.

    Raises:
        ValueError: If the value of a field is not allowed. The message names the field and the allowed values.

    Example:

    ```python
    >>> from hf_federated import FederatedConfig

    >>> config = FederatedConfig(num_rounds=5, clients_per_round=0.5, aggregation="fedprox")
    >>> FederatedConfig.from_dict(config.to_dict()) == config
    True
    ```
    """

    file_name: ClassVar[str] = CONFIG_NAME

    num_rounds: int | None = option(None, "Rounds (default: num_train_epochs, or max_steps / local_steps).")
    clients_per_round: ShareOrCount = option(1.0, "Clients sampled per round: a count (10) or a share (0.1).")
    local_epochs: int = option(1, "Epochs of a client on its data per round.")
    local_steps: int | None = option(None, "Optimizer steps of a client per round, instead of local_epochs.")
    local_loop: str = option(
        "auto", "Loop of local training: 'auto', or 'trainer' for Trainer.train().", choices=["auto", "trainer"]
    )
    max_rows_per_round: int | None = option(
        None, "Maximum number of examples of a client per round, drawn again in each round."
    )
    balance: str | None = option(
        None, "'min': no client trains on more examples than the smallest client of its cohort.", choices=["min"]
    )
    # `HfArgumentParser` passes text.
    max_examples_per_client: dict | str | int | None = option(
        None, "Maximum number of examples that a client on another machine may announce, or one per client as JSON."
    )
    aggregation: str = option("fedavg", "Name of the aggregation algorithm, or my_package.module:MyAverage.")
    aggregation_kwargs: dict | str | None = option(None, "Arguments of the algorithm, as JSON on a command line.")
    distillation: str | None = option(None, "Name of the distillation algorithm, or my_package.module:MyDistillation.")
    distillation_kwargs: dict | str | None = option(None, "Arguments of the algorithm, as JSON on a command line.")
    collector: str = option(
        "synchronous", "How the server obtains the updates of a round: 'synchronous' or 'fedbuff'."
    )
    collector_kwargs: dict | str | None = option(None, "Arguments of the collector, as JSON on a command line.")
    secure_aggregation: str | None = option(
        None, "Protocol that shows the server only the sum of the updates: 'secagg', 'secagg+' or 'lightsecagg'."
    )
    secure_aggregation_kwargs: dict | str | None = option(
        None, "Arguments of the protocol, as JSON on a command line."
    )
    exchange: str | list[str] = option(
        "auto", "Exchanged tensors: 'auto', 'trainable', 'adapter', 'all', or patterns of their names."
    )
    # `HfArgumentParser` takes the first type if the second one is `None`: a list of patterns.
    keep_local: list[str] | None | str = option(
        None, "Tensors that clients train and do not send: 'head', or patterns of their names."
    )
    exchange_dtype: str | None = option(
        None,
        "Dtype of the exchanged tensors (default: the dtypes of the model).",
        choices=["float32", "bfloat16", "float16"],
    )
    exchange_codec: str | None = option(
        None, "Codec of the exchanged tensors: 'int8', 'int4', 'topk', 'powersgd', or my_package.module:MyCodec."
    )
    exchange_codec_kwargs: dict | str | None = option(
        None, "Arguments of the codec, and 'direction' ('both', 'up' or 'down'), as JSON on a command line."
    )
    client_optimizer_state: str = option(
        "reset", "Whether a client keeps its optimizer state between rounds.", choices=["reset", "carry"]
    )
    lr_schedule: str = option(
        "global", "One learning-rate schedule over the run or one per round.", choices=["global", "round"]
    )
    min_clients: ShareOrCount = option(1, "Minimum number of valid updates per round: a count (10) or a share (0.5).")
    max_update_ratio: float | None = option(
        30.0, "Largest change by a client, as a ratio to the median change of the clients ('inf': any)."
    )
    round_deadline: float | None = option(None, "Seconds after which a round with min_clients replies stops waiting.")
    evaluate_clients: bool = option(False, "Also evaluate on the evaluation data of each client.")
    log_clients: bool = option(False, "Log the training of each client under client/<id>/.")
    report_anomalies: bool = option(False, "Report norm, cosine and distance rank of each update.")
    live_report: bool = option(False, "Write a page about the run after each round.")
    freeze: str | None = option(None, "Parameters to freeze: 'embeddings', a number of layers, or 'embeddings+2'.")
    parallelism: str = option("data", "How the processes of a launch share the work.", choices=["data", "clients"])
    server_device: str | None = option(
        None, "Device of the global state and the sums of updates (default: the device of the model).", choices=["cpu"]
    )
    client_store: str = option(
        "memory", "Storage of the state that clients keep between rounds.", choices=["memory", "disk"]
    )
    max_resident_clients: int | None = option(None, "Maximum number of client models in memory (default: all).")
    federation_seed: int | None = option(None, "Seed of client sampling and of the clients (default: seed).")

    def __post_init__(self) -> None:
        # The field types include text for the command line. After initialization, the values are dictionaries.
        for names in _NAMES:
            kwargs = f"{names.field}_kwargs"
            setattr(self, kwargs, _parse_dict(getattr(self, kwargs), kwargs))
            names.check(getattr(self, names.field))
        for name, allowed in _COUNTS.items():
            if (count := getattr(self, name)) is not None:
                require(name, count, count >= 1, allowed)
        for item in dataclasses.fields(FederatedConfig):
            if "choices" in item.metadata and (value := getattr(self, item.name)) != item.default:
                require_one_of(item.name, value, item.metadata["choices"])
        _check_share_or_count("clients_per_round", self.clients_per_round)
        _check_share_or_count("min_clients", self.min_clients)
        epochs, allowed = self.local_epochs, "an integer of at least 1. Use `local_steps` for less"
        require("local_epochs", epochs, epochs >= 1 and epochs == int(epochs), allowed)
        if self.max_update_ratio is not None:
            require("max_update_ratio", self.max_update_ratio, self.max_update_ratio > 1, "above 1, or None for any")
        if self.round_deadline is not None:
            require("round_deadline", self.round_deadline, self.round_deadline > 0, "a positive number of seconds")
        self.max_examples_per_client = _parse_limits(self.max_examples_per_client)
        # Without the option on a command line, `HfArgumentParser` passes `None` for a field that may be a list.
        self.exchange = check_selection("exchange", "auto" if self.exchange is None else self.exchange)
        if isinstance(self.exchange, str) and self.exchange not in EXCHANGES and not set("*?[.") & set(self.exchange):
            raise ValueError(
                f"`exchange` is {self.exchange!r}; allowed are {', '.join(map(repr, EXCHANGES))}, or a pattern of "
                "names such as 'bert.*'."
            )
        if self.keep_local is not None:
            self.keep_local = check_selection("keep_local", self.keep_local)
        if self.freeze is not None:
            self.freeze = str(self.freeze)
            parse_freeze(self.freeze)

    def min_clients_of(self, num_clients: int) -> int:
        """Return the minimum number of valid updates of a cohort of `num_clients` clients."""
        if isinstance(self.min_clients, int):
            return self.min_clients
        return max(1, math.ceil(round(self.min_clients * num_clients, 9)))

    def to_dict(self) -> dict[str, Any]:
        """
        Return the fields as JSON values.

        An instance of an algorithm is replaced by its settings and its built-in name, or a reference to its class.
        Functions in the settings are replaced by their names.
        """
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for names in _NAMES:
            algorithm: Any = values[names.field]
            if algorithm is not None and not isinstance(algorithm, str):
                values[names.field] = names.name_of(algorithm)
                # `direction` of a codec is no setting of the instance.
                key = f"{names.field}_kwargs"
                values[key] = {**values[key], **algorithm.non_default_settings()}
        values["distillation_kwargs"] = name_functions(values["distillation_kwargs"])
        selections = {name: values[name] for name in ("exchange", "keep_local") if callable(values[name])}
        values |= {name: SAVED_FUNCTION + text for name, text in name_functions(selections).items()}
        return values
