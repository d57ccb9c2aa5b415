"""`SplitConfig`, which configures the training of a split model in addition to the `TrainingArguments`.

The module also computes the digest of the settings that all parties of a networked run must share.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from peft import PeftConfig
from transformers import PretrainedConfig, TrainingArguments

from ..split.comparison import PARTY_SPECIFIC
from ..split.server_state import MAX_GRAPHS
from ..split.session_config import as_json
from ..split.wire import WIRE_DTYPES
from ..utils.fields import ShareOrCount
from ..utils.options import option
from ..utils.robust_statistics import share_to_count
from ..utils.saved_config import SavedConfig


STRATEGIES = ("serial", "client_batch", "server_hierarchical")
# Training arguments that determine the number of steps or the result of a step.
SHARED_ARGUMENTS = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "dataloader_drop_last",
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "neftune_noise_alpha",
    "num_train_epochs",
    "optim",
    "optim_args",
    "optim_target_modules",
    "per_device_train_batch_size",
    "save_steps",
    "save_strategy",
    "seed",
    "warmup_steps",
    "weight_decay",
)
# Config fields that saving, loading or `Trainer` changes. `Trainer` copies the special tokens of the tokenizer.
_VOLATILE = PARTY_SPECIFIC | {"_name_or_path", "dtype", "inference_mode", "torch_dtype"}


@dataclass
class SplitConfig(SavedConfig):
    """
    Configuration of the strategy, the cut of the model, and the transfer of hidden states (FL-GLM, section 3.3).

    Use a split model if a client cannot hold the whole model. `strategy` decides whether clients take turns, or train
    at the same time.

    `SplitConfig` is a plain dataclass like [`FederatedConfig`]. It works with
    `HfArgumentParser((TrainingArguments, SplitConfig))`, and saves to and loads from `split_config.json`.

    Args:
        strategy (`str`, *optional*, defaults to `"serial"`):
            - `"serial"`: The clients train with the server one at a time. With `average_every=None` each client
              continues with the head and tail of the previous client. Otherwise each client trains its own head and
              tail until they are averaged.
            - `"client_batch"`: All clients take a step together. The server body processes their hidden states as one
              batch.
            - `"server_hierarchical"`: All clients take a step in parallel, each with its own replica of the server
              body. Heads, tails and bodies are averaged.
        average_every (`int`, *optional*): Number of optimizer steps after which the clients' parts, and the bodies of
            `"server_hierarchical"`, are replaced by their average. The weights are the numbers of examples trained
            since the last average. By default the parts are never averaged during training: the average is evaluated
            and saved, but training does not continue from the average.
        steps_per_turn (`int`, *optional*): For `"serial"`: number of optimizer steps of a client before the next
            client continues. By default a full epoch of the client.
        head_blocks (`int`, *optional*, defaults to `1`): Number of first blocks, which the clients keep.
        tail_blocks (`int`, *optional*, defaults to `1`): Number of last blocks, which the clients keep.
        wire_dtype (`str`, *optional*, defaults to `"auto"`): As in [`SplitModel.from_model`].
        encryption (`bool`, *optional*, defaults to `False`): Whether to encrypt the messages between client and
            server.
        rotate_keys_every (`int`, *optional*, defaults to `100`): Number of optimizer steps of a client after which its
            encryption keys are replaced.
        micro_batches_in_flight (`int`, *optional*, defaults to `8`): Number of micro-batches of an optimizer step
            (`gradient_accumulation_steps`) that a networked client sends together. A step of as many micro-batches
            costs two round trips. The server holds the activations of its blocks for this number of micro-batches,
            and the client those of its first blocks. At most 64. It does not change the results.
        max_length (`int`, *optional*): Largest number of positions of a row of a networked client, in training,
            evaluation and generation. The server refuses longer rows. Set it to the length of the longest examples, so
            that a client cannot fill the memory of the server. By default the number of positions of the model. A row
            of packed sequences can then have as many positions as a full micro-batch.
        body_devices (`list[str]`, *optional*): Devices of the server's bodies with `"server_hierarchical"`, such as
            `["cuda:0", "cuda:1"]`. The bodies are distributed over these devices in turn and compute in parallel. By
            default all bodies are on the device of the training arguments. Each party can choose its own devices.
        min_clients (`int` or `float`, *optional*, defaults to `1`): Number of clients, or their share as a float, with
            which a networked run continues after other clients failed. The steps of a failed client are skipped. With
            `1.0` the run ends when a client fails, and can be resumed with all clients.
        split_seed (`int`, *optional*): Seed of the random numbers that the parties draw, such as dropout. Defaults to
            `seed` of the training arguments. The order of the examples follows from `data_seed` or `seed`, as in
            `Trainer`.

    Raises:
        ValueError: If a field has an invalid value.

    Example:

    ```python
    >>> from hf_federated import SplitConfig

    >>> SplitConfig(strategy="client_batch", average_every=50).average_every
    50
    ```
    """

    file_name: ClassVar[str] = "split_config.json"

    strategy: str = option("serial", "Order in which the clients train.", choices=list(STRATEGIES))
    average_every: int | None = option(
        None, "Optimizer steps between averages of the clients' parts (default: never)."
    )
    steps_per_turn: int | None = option(
        None, "For serial: steps of a client before the next client continues (default: an epoch)."
    )
    head_blocks: int = option(1, "Number of first blocks, which the clients keep.")
    tail_blocks: int = option(1, "Number of last blocks, which the clients keep.")
    wire_dtype: str = option(
        "auto", "Dtype or compression of sent hidden states and gradients.", choices=["auto", *WIRE_DTYPES]
    )
    encryption: bool = option(False, "Encrypt the messages between client and server (extra: split).")
    rotate_keys_every: int = option(100, "Steps of a client between key rotations.")
    micro_batches_in_flight: int = option(
        8, "Micro-batches of a step that a networked client sends together (at most 64)."
    )
    max_length: int | None = option(
        None, "Largest number of positions of a row of a networked client (default: those of the model)."
    )
    body_devices: list[str] | None = option(
        None, "For server_hierarchical: devices of the server's bodies (default: one)."
    )
    min_clients: ShareOrCount = option(
        1, "Clients, or their share, with which a networked run continues if others fail."
    )
    split_seed: int | None = option(
        None, "Seed of the random numbers of the parties, such as dropout (default: seed)."
    )

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", STRATEGIES), ("wire_dtype", ("auto", *WIRE_DTYPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported; choose one of {', '.join(allowed)}."
                )
        for name in ("average_every", "steps_per_turn", "rotate_keys_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}, but it must be a number of optimizer steps, at least 1.")
        if self.steps_per_turn is not None and self.strategy != "serial":
            raise ValueError(
                f"`steps_per_turn` applies to strategy='serial' only, not to {self.strategy!r}. Leave it out."
            )
        in_flight = self.micro_batches_in_flight
        if type(in_flight) is not int or not 1 <= in_flight <= MAX_GRAPHS:
            raise ValueError(
                f"micro_batches_in_flight={in_flight!r}, but it must be a number of micro-batches from 1 to "
                f"{MAX_GRAPHS}."
            )
        if self.max_length is not None and (type(self.max_length) is not int or self.max_length < 1):
            raise ValueError(f"max_length={self.max_length!r}, but it must be a number of positions, at least 1.")
        self._check_devices()
        is_count = type(self.min_clients) is int and self.min_clients >= 1
        if not is_count and not (type(self.min_clients) is float and 0 < self.min_clients <= 1):
            raise ValueError(
                f"min_clients={self.min_clients!r}, but it must be a number of clients (2) or a share (0.5) of at "
                "most 1.0."
            )
        if type(self.head_blocks) is not int or self.head_blocks < 0:
            raise ValueError(f"head_blocks={self.head_blocks!r}, but it must be a number of blocks, at least 0.")
        if type(self.tail_blocks) is not int or self.tail_blocks < 1:
            raise ValueError(
                f"tail_blocks={self.tail_blocks!r}, but a client keeps at least the last block. Set it to at least 1."
            )

    def _check_devices(self) -> None:
        devices = self.body_devices
        if devices is None:
            return
        if isinstance(devices, str) or not devices:
            raise ValueError(f"body_devices={devices!r}, but it must be a list such as ['cuda:0', 'cuda:1'].")
        if self.strategy != "server_hierarchical":
            raise ValueError(
                f"`body_devices` applies to strategy='server_hierarchical' only. With {self.strategy!r} the server "
                "has one body. Leave it out."
            )
        for name in devices:
            try:
                torch.device(name)
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"body_devices contains {name!r}, which is not a device: {error}") from None

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that all parties of a run share: all except the devices."""
        # Without `max_length`, the settings equal those of a checkpoint from before this field was added.
        left_out = {"body_devices"} if self.max_length is not None else {"body_devices", "max_length"}
        return {name: value for name, value in self.to_dict().items() if name not in left_out}

    def device_of_body(self, number: int) -> torch.device | None:
        """
        Return the device of one of the server's bodies, or `None` for the device of the model.

        Args:
            number (`int`): Number of the body, in the order of the clients.
        """
        return None if self.body_devices is None else torch.device(self.body_devices[number % len(self.body_devices)])

    def resolve_seed(self, args: TrainingArguments) -> int:
        """Return the seed of the parties' random numbers: `split_seed`, or `seed` of the training arguments."""
        return args.seed if self.split_seed is None else self.split_seed

    def resolve_min_clients(self, num_clients: int) -> int:
        """
        Return the number of clients with which a run of `num_clients` continues.

        Raises:
            ValueError: If `min_clients` is larger than the number of clients.
        """
        if isinstance(self.min_clients, float):
            return max(share_to_count(num_clients, self.min_clients), 1)
        if self.min_clients > num_clients:
            raise ValueError(
                f"min_clients={self.min_clients}, but the run has {num_clients} clients. Set it to at most "
                f"{num_clients}."
            )
        return self.min_clients

    def ends_period(self, num_steps: int) -> bool:
        """Whether the clients average their parts after this number of optimizer steps."""
        return self.average_every is not None and num_steps % self.average_every == 0

    @property
    def hands_over(self) -> bool:
        """Whether each client continues with the head and tail of the previous client."""
        return self.strategy == "serial" and self.average_every is None


def run_settings(split: SplitConfig, args: TrainingArguments) -> dict[str, object]:
    """
    Return the settings that the parties compare by value on connection, so that an error names a differing setting.

    Args:
        split ([`SplitConfig`]): Strategy and cut.
        args (`TrainingArguments`): Training arguments. Only the arguments in `SHARED_ARGUMENTS` are included.
    """
    return {"split": split.shared_settings(), "training": {name: getattr(args, name) for name in SHARED_ARGUMENTS}}


def run_digest(
    config: PretrainedConfig, split: SplitConfig, args: TrainingArguments, adapter: PeftConfig | None
) -> str:
    """
    Compute a digest that is equal for parties with equal settings.

    The weights are not part of the digest. The parties compare the weights when they connect.

    Args:
        config (`PretrainedConfig`): Config of the full model.
        split ([`SplitConfig`]): Strategy and cut.
        args (`TrainingArguments`): Training arguments. Only the arguments in `SHARED_ARGUMENTS` are included.
        adapter (`PeftConfig`, *optional*): Config of the adapters of all parts.

    Returns:
        `str`: SHA-256, in hexadecimal.
    """
    settings = {
        "model": _without_volatile(config.to_dict()),
        **run_settings(split, args),
        "adapter": None if adapter is None else _without_volatile(adapter.to_dict()),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=as_json).encode()).hexdigest()


def run_and_step(
    config: PretrainedConfig, split: SplitConfig, args: TrainingArguments, adapter: PeftConfig | None, step: int
) -> dict[str, object]:
    """Return run and step of the saved parts of a party. `merge_parts` compares them between parties."""
    return {"digest": run_digest(config, split, args, adapter), "step": step}


def _without_volatile(values: dict[str, object]) -> dict[str, object]:
    return {str(name): value for name, value in values.items() if name not in _VOLATILE}
