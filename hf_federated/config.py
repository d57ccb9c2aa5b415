"""`FederatedConfig`: everything a federation needs beside the `TrainingArguments`.

A plain dataclass, like `peft.LoraConfig`: it parses with `HfArgumentParser`, saves and loads as
`federated_config.json`, and leaves `TrainingArguments` alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar


EXCHANGES = ("auto", "trainable", "adapter", "all")
EXCHANGE_DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZER_STATES = ("reset", "carry")
LR_SCHEDULES = ("global", "round")
STORES = ("memory", "disk")
SERVER_DEVICES = ("cpu",)
BALANCES = ("min",)


if TYPE_CHECKING:
    from typing_extensions import Self

    ShareOrCount = int | float
else:

    class ShareOrCount:
        """A share when written with a point (`0.5`, `1.0`), a count when written without (`10`, `1`).

        `HfArgumentParser` calls it on the text of a command line, where a union of `int` and `float` would read `1` as
        `1.0`, which is everybody instead of one.
        """

        def __new__(cls, text: str) -> int | float:
            return float(text) if any(mark in text.lower() for mark in ".e") else int(text)


def _parse_dict(value: Any, name: str) -> dict[str, Any]:
    """A dictionary from a dictionary, from None, or from JSON text as a command line gives it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{name}` is not JSON: {error}. Example: --{name} '{{\"server_lr\": 0.1}}'.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` must be a dictionary, got {type(value).__name__}.")
    return value


def name_functions(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the names of functions in their place, which JSON can hold and which are the same in every run."""
    return {
        name: f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        if callable(value)
        else value
        for name, value in settings.items()
    }


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}; allowed are {', '.join(map(repr, allowed))}.")


class SavedConfig:
    """A dataclass that saves and loads as one JSON file in a directory, like the configurations of transformers."""

    # The file's name.
    file_name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """
        The config that `to_dict` wrote.

        Raises:
            ValueError: If `values` holds a key that is not a field. The message lists the fields.
        """
        known = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]  # as above
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"Unknown fields {unknown} of {cls.__name__}; the fields are {known}.")
        return cls(**values)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the file into a directory, which is created if need be."""
        os.makedirs(save_directory, exist_ok=True)
        with open(os.path.join(save_directory, self.file_name), "w", encoding="utf-8") as file:
            file.write(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Read the file from a directory."""
        with open(os.path.join(directory, cls.file_name), encoding="utf-8") as file:
            return cls.from_dict(json.load(file))


@dataclass
class FederatedConfig(SavedConfig):
    """
    The settings of a federation.

    Args:
        num_rounds (`int`, *optional*):
            Rounds to run. Defaults to `num_train_epochs` of the training arguments, rounded up.
        clients_per_round (`int` or `float`, *optional*, defaults to `1.0`):
            Clients sampled in a round, without replacement: an `int` is a count, a `float` in (0, 1] a share of the
            clients, rounded to the nearest count.
        local_epochs (`int`, *optional*, defaults to `1`):
            Passes of a client over its own data in a round.
        local_steps (`int`, *optional*):
            Optimizer steps of a client in a round, instead of `local_epochs`.
        max_rows_per_round (`int`, *optional*):
            Rows that a client trains on in a round at most (250 in FedDRS, section 5.1). A client that has more draws
            so many without replacement, anew in every round, from its seed of the run, the round and its id.
            `local_epochs` are passes over the drawn rows, `local_steps` are taken on them alone, and averages weigh a
            client by them. By default all rows.
        balance (`str`, *optional*):
            `"min"`: no client trains on more rows than the smallest of the round's cohort has, so that clients with
            many rows do not outweigh the others (the "balance trick" of FedDRS, section 5.3). Rows are drawn as for
            `max_rows_per_round`, and where both are given the smaller number counts. By default clients are not
            balanced.
        aggregation (`str` or [`~hf_federated.aggregation.Aggregation`], *optional*, defaults to `"fedavg"`):
            How client parameters become global ones: a name of `hf_federated.AGGREGATIONS` or an instance.
        aggregation_kwargs (`dict`, *optional*):
            Arguments of the algorithm when it is named by string. JSON text on a command line.
        distillation (`str` or [`~hf_federated.distillation.Distillation`], *optional*):
            How the server, and clients with models of their own, learn from predictions of public rows: a name of
            `hf_federated.DISTILLATIONS` or an instance. The trainer then needs `public_dataset`.
        distillation_kwargs (`dict`, *optional*):
            Arguments of that algorithm when it is named by string. JSON text on a command line.
        exchange (`str`, *optional*, defaults to `"auto"`):
            What travels. `"auto"`: the adapter of a PEFT model, otherwise the trainable parameters; `"trainable"`;
            `"adapter"`; `"all"`: trainable and frozen parameters and buffers.
        exchange_dtype (`str`, *optional*):
            The dtype in which floating values travel, in both directions: `"float32"`, `"bfloat16"` or `"float16"`.
            By default their own. The server keeps its values as they are; clients start from the rounded ones and send
            back what they changed, so that small changes survive.
        client_optimizer_state (`str`, *optional*, defaults to `"reset"`):
            `"reset"`: a client starts each round with a fresh optimizer. `"carry"`: it keeps its optimizer's state.
        lr_schedule (`str`, *optional*, defaults to `"global"`):
            `"global"`: one learning-rate curve over the whole run, where a client's place is round × its local steps.
            `"round"`: the curve starts again in every round.
        min_clients (`int`, *optional*, defaults to `1`):
            Number of valid updates below which a round fails.
        round_deadline (`float`, *optional*):
            Seconds after which a round stops waiting for clients, once `min_clients` clients have replied. Clients
            without a reply count as failed in that round. By default a round waits for all clients.
        evaluate_clients (`bool`, *optional*, defaults to `False`):
            Evaluate the global model on each client's own evaluation data whenever the global evaluation runs.
            `eval_dataset` must then be a [`FederatedDataset`].
        log_clients (`bool`, *optional*, defaults to `False`):
            Log each client's loss, gradient norm and steps under `client/<id>/`.
        freeze (`str`, *optional*):
            What is frozen before training: `"embeddings"`, a number of layers from the embedding up (`"2"`), or both
            (`"embeddings+2"`). Frozen parameters never travel.
        parallelism (`str`, *optional*, defaults to `"data"`):
            How the processes of `accelerate launch` share the work. `"data"`: they train each client together, its
            batches spread over them, as accelerate does. `"clients"`: each trains whole clients on its own. The
            results of `"clients"` are those of one process; of one client, those of `"data"` are the plain Trainer's
            under the same launch.
        server_device (`str`, *optional*):
            `"cpu"` keeps the global state, the sums of updates and the server optimizer on the CPU. By default all of
            them are on the model's device, where they take up to four times the memory of the exchanged values.
        client_store (`str`, *optional*, defaults to `"memory"`):
            Where the state that a client keeps between rounds lives: `"memory"` or `"disk"` (below `output_dir`).
        max_resident_clients (`int`, *optional*):
            Where clients have models of their own: how many of these are in memory at a time. The others wait in the
            client store, and results are the same. All by default.
        federation_seed (`int`, *optional*):
            Seed of client sampling and of the clients' own randomness. Defaults to `seed` of the training arguments.
            (Not `seed`: `HfArgumentParser` could then not parse both dataclasses.)

    Raises:
        ValueError: If a field has a value that is not allowed. The message names the field and what is allowed.

    Example:

    ```python
    >>> from hf_federated import FederatedConfig

    >>> config = FederatedConfig(num_rounds=5, clients_per_round=0.5, aggregation="fedprox")
    >>> FederatedConfig.from_dict(config.to_dict()) == config
    True
    ```
    """

    file_name: ClassVar[str] = "federated_config.json"

    num_rounds: int | None = field(default=None, metadata={"help": "Rounds to run (default: num_train_epochs)."})
    clients_per_round: ShareOrCount = field(
        default=1.0, metadata={"help": "Clients sampled in a round: a count (10) or a share of them (0.1)."}
    )
    local_epochs: int = field(default=1, metadata={"help": "Passes of a client over its data in a round."})
    local_steps: int | None = field(
        default=None, metadata={"help": "Optimizer steps of a client in a round, instead of local_epochs."}
    )
    max_rows_per_round: int | None = field(
        default=None, metadata={"help": "Rows a client trains on in a round at most, drawn anew in each."}
    )
    balance: str | None = field(
        default=None,
        metadata={
            "help": "'min': no client trains on more rows than its cohort's smallest.",
            "choices": list(BALANCES),
        },
    )
    aggregation: str = field(default="fedavg", metadata={"help": "Name of the aggregation algorithm."})
    aggregation_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Arguments of the algorithm, as JSON on a command line."}
    )
    distillation: str | None = field(default=None, metadata={"help": "Name of the distillation algorithm."})
    distillation_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Arguments of the algorithm, as JSON on a command line."}
    )
    exchange: str = field(default="auto", metadata={"help": "What travels.", "choices": list(EXCHANGES)})
    exchange_dtype: str | None = field(
        default=None, metadata={"help": "Dtype of what travels (default: its own).", "choices": list(EXCHANGE_DTYPES)}
    )
    client_optimizer_state: str = field(
        default="reset",
        metadata={"help": "Whether a client keeps its optimizer's state.", "choices": list(OPTIMIZER_STATES)},
    )
    lr_schedule: str = field(
        default="global",
        metadata={"help": "One learning-rate curve over the run or one a round.", "choices": list(LR_SCHEDULES)},
    )
    min_clients: int = field(default=1, metadata={"help": "Valid updates below which a round fails."})
    round_deadline: float | None = field(
        default=None,
        metadata={"help": "Seconds after which a round with min_clients replies waits for no further client."},
    )
    evaluate_clients: bool = field(default=False, metadata={"help": "Evaluate on each client's own data too."})
    log_clients: bool = field(default=False, metadata={"help": "Log each client's training under client/<id>/."})
    freeze: str | None = field(
        default=None, metadata={"help": "'embeddings', a number of layers, or both: 'embeddings+2'."}
    )
    parallelism: str = field(
        default="data", metadata={"help": "How processes share the work.", "choices": ["data", "clients"]}
    )
    server_device: str | None = field(
        default=None,
        metadata={
            "help": "Where the global state and the sums of updates are (default: the model's device).",
            "choices": list(SERVER_DEVICES),
        },
    )
    client_store: str = field(
        default="memory", metadata={"help": "Where state kept by clients lives.", "choices": list(STORES)}
    )
    max_resident_clients: int | None = field(
        default=None, metadata={"help": "Clients' own models in memory at a time (default: all)."}
    )
    federation_seed: int | None = field(
        default=None, metadata={"help": "Seed of sampling and of the clients (default: seed)."}
    )

    def __post_init__(self) -> None:
        # Typed as text for the command line's sake; whoever reads the field finds a dictionary.
        self.aggregation_kwargs = _parse_dict(self.aggregation_kwargs, "aggregation_kwargs")
        self.distillation_kwargs = _parse_dict(self.distillation_kwargs, "distillation_kwargs")
        if self.max_resident_clients is not None and self.max_resident_clients < 1:
            raise ValueError(f"`max_resident_clients` is {self.max_resident_clients}; it must be at least 1.")
        if self.num_rounds is not None and self.num_rounds < 1:
            raise ValueError(f"`num_rounds` is {self.num_rounds}; it must be at least 1.")
        if isinstance(self.clients_per_round, bool) or not isinstance(self.clients_per_round, (int, float)):
            raise ValueError(f"`clients_per_round` is {self.clients_per_round!r}; give a count (10) or a share (0.1).")
        if isinstance(self.clients_per_round, float) and not 0 < self.clients_per_round <= 1:
            raise ValueError(
                f"`clients_per_round` is {self.clients_per_round}; a share lies in (0, 1]. A count is an integer."
            )
        if isinstance(self.clients_per_round, int) and self.clients_per_round < 1:
            raise ValueError(f"`clients_per_round` is {self.clients_per_round}; sample at least one client.")
        if self.local_epochs < 1 or self.local_epochs != int(self.local_epochs):
            raise ValueError(
                f"`local_epochs` is {self.local_epochs}; give a whole number of at least 1, or use `local_steps`."
            )
        if self.local_steps is not None and self.local_steps < 1:
            raise ValueError(f"`local_steps` is {self.local_steps}; it must be at least 1.")
        if self.max_rows_per_round is not None and self.max_rows_per_round < 1:
            raise ValueError(
                f"`max_rows_per_round` is {self.max_rows_per_round}; it must be at least 1. Leave it out for all rows."
            )
        if self.balance is not None:
            _check_choice("balance", self.balance, BALANCES)
        if self.min_clients < 1:
            raise ValueError(f"`min_clients` is {self.min_clients}; a round needs at least one update.")
        if self.round_deadline is not None and not self.round_deadline > 0:
            raise ValueError(f"`round_deadline` is {self.round_deadline}; it must be a positive number of seconds.")
        _check_choice("exchange", self.exchange, EXCHANGES)
        if self.exchange_dtype is not None:
            _check_choice("exchange_dtype", self.exchange_dtype, EXCHANGE_DTYPES)
        _check_choice("client_optimizer_state", self.client_optimizer_state, OPTIMIZER_STATES)
        _check_choice("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        _check_choice("parallelism", self.parallelism, ("data", "clients"))
        _check_choice("client_store", self.client_store, STORES)
        if self.server_device is not None:
            _check_choice("server_device", self.server_device, SERVER_DEVICES)
        if self.freeze is not None:
            self.freeze = str(self.freeze)
            if not re.fullmatch(r"embeddings|(embeddings\+)?\d+", self.freeze):
                raise ValueError(
                    f"`freeze` is {self.freeze!r}; write 'embeddings', a number of layers, or 'embeddings+2'."
                )

    def to_dict(self) -> dict[str, Any]:
        """
        The fields as JSON values. An algorithm given as an instance is written as its name and its settings, a
        function among these as its name.
        """
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        if not isinstance(self.aggregation, str):
            values["aggregation"] = self.aggregation.name
            values["aggregation_kwargs"] = self.aggregation.non_default_settings()
        if self.distillation is not None and not isinstance(self.distillation, str):
            values["distillation"] = self.distillation.name
            values["distillation_kwargs"] = self.distillation.non_default_settings()
        values["distillation_kwargs"] = name_functions(values["distillation_kwargs"])
        return values
