"""`SplitConfig`: everything that training a split model needs beside the `TrainingArguments`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import ClassVar

from peft import PeftConfig
from transformers import PretrainedConfig, TrainingArguments

from ..config import SavedConfig
from ..messages.quantization import TRAVEL_DTYPES


STRATEGIES = ("serial", "client_batch", "server_hierarchical")
# Everything that decides which steps there are and what they do.
ARGUMENTS = (
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
# What saving changes, or `Trainer` (which also takes special tokens from a tokenizer), or says where something lies.
_VOLATILE = {
    "_name_or_path",
    "base_model_name_or_path",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "inference_mode",
    "pad_token_id",
    "revision",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


@dataclass
class SplitConfig(SavedConfig):
    """
    Who trains when, where the model is cut, and how states travel (FL-GLM, section 3.3).

    A plain dataclass, like [`FederatedConfig`]: it works in `HfArgumentParser((TrainingArguments, SplitConfig))`, and
    saves and loads as `split_config.json`.

    Args:
        strategy (`str`, *optional*, defaults to `"serial"`):
            - `"serial"`: one client at a time trains with the server. With `average_every=None` a client takes over
              the head and tail that the one before it trained; otherwise each goes on with its own until they are
              averaged.
            - `"client_batch"`: all clients take a step together; their hidden states go through one server body as one
              batch.
            - `"server_hierarchical"`: all clients take a step at once, each with a server body of its own; heads,
              tails and bodies are averaged.
        average_every (`int`, *optional*): Optimizer steps after which clients' parts, and the bodies of
            `"server_hierarchical"`, become their mean, weighted by the rows trained since the last time. By default
            never: what is evaluated and saved is their mean, with which nobody goes on.
        steps_per_turn (`int`, *optional*): For `"serial"`: optimizer steps of a client before it is the next one's
            turn. By default a client's whole epoch.
        head_blocks (`int`, *optional*, defaults to `1`): First blocks, which a client keeps.
        tail_blocks (`int`, *optional*, defaults to `1`): Last blocks, which a client keeps.
        wire_dtype (`str`, *optional*, defaults to `"auto"`): As in [`SplitModel.from_model`].
        encryption (`bool`, *optional*, defaults to `False`): Seal what crosses, as between two machines.
        rotate_keys_every (`int`, *optional*, defaults to `100`): Optimizer steps of a client for which keys last.
        split_seed (`int`, *optional*): Of what parties draw, such as dropout; by default `seed` of the training
            arguments. The order of rows is by `data_seed` or `seed`, as in `Trainer`.

    Example:

    ```python
    >>> from hf_federated import SplitConfig

    >>> SplitConfig(strategy="client_batch", average_every=50).average_every
    50
    ```
    """

    file_name: ClassVar[str] = "split_config.json"

    strategy: str = field(default="serial", metadata={"help": "Who trains when.", "choices": list(STRATEGIES)})
    average_every: int | None = field(
        default=None, metadata={"help": "Optimizer steps after which clients' parts are averaged (default: never)."}
    )
    steps_per_turn: int | None = field(
        default=None, metadata={"help": "For serial: steps of a client before the next one's (default: an epoch)."}
    )
    head_blocks: int = field(default=1, metadata={"help": "First blocks, which a client keeps."})
    tail_blocks: int = field(default=1, metadata={"help": "Last blocks, which a client keeps."})
    wire_dtype: str = field(
        default="auto", metadata={"help": "How hidden states travel.", "choices": ["auto", *TRAVEL_DTYPES]}
    )
    encryption: bool = field(default=False, metadata={"help": "Seal what crosses (extra: split)."})
    rotate_keys_every: int = field(default=100, metadata={"help": "Steps of a client for which keys last."})
    split_seed: int | None = field(
        default=None, metadata={"help": "Seed of what parties draw, such as dropout (default: seed)."}
    )

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", STRATEGIES), ("wire_dtype", ("auto", *TRAVEL_DTYPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; choose one of {', '.join(allowed)}.")
        for name in ("average_every", "steps_per_turn", "rotate_keys_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"`{name}` is {value!r}; it is a number of optimizer steps, at least 1.")
        if self.steps_per_turn is not None and self.strategy != "serial":
            raise ValueError(f"`steps_per_turn` is for strategy='serial'; with {self.strategy!r} nobody waits.")
        if type(self.head_blocks) is not int or self.head_blocks < 0:
            raise ValueError(f"`head_blocks` is {self.head_blocks!r}; it is a number of blocks.")
        if type(self.tail_blocks) is not int or self.tail_blocks < 1:
            raise ValueError(f"`tail_blocks` is {self.tail_blocks!r}; a client keeps at least the last block.")

    def seed_of(self, args: TrainingArguments) -> int:
        """What parties draw by."""
        return args.seed if self.split_seed is None else self.split_seed

    @property
    def hands_over(self) -> bool:
        """Whether a client takes over what the one before it trained."""
        return self.strategy == "serial" and self.average_every is None


def run_settings(split: SplitConfig, args: TrainingArguments) -> dict[str, object]:
    """
    What parties compare by value when they connect, so that an error names what differs.

    Args:
        split ([`SplitConfig`]): Strategy and cut.
        args (`TrainingArguments`): Of these what decides the steps.
    """
    return {"split": split.to_dict(), "training": {name: getattr(args, name) for name in ARGUMENTS}}


def run_digest(
    config: PretrainedConfig, split: SplitConfig, args: TrainingArguments, adapter: PeftConfig | None
) -> str:
    """
    A digest that is the same for parties with the same settings.

    It says nothing of the weights, which the parties compare when they connect.

    Args:
        config (`PretrainedConfig`): The whole model's.
        split ([`SplitConfig`]): Strategy and cut.
        args (`TrainingArguments`): Of these what decides the steps.
        adapter (`PeftConfig`, *optional*): What all parts' adapters were made from.

    Returns:
        `str`: SHA-256, in hexadecimal.
    """
    settings = {
        "model": _lasting(config.to_dict()),
        **run_settings(split, args),
        "adapter": None if adapter is None else _lasting(adapter.to_dict()),
    }
    # Enums and sets are written as text; the latter in one order.
    text = json.dumps(settings, sort_keys=True, default=lambda own: sorted(own) if isinstance(own, set) else str(own))
    return hashlib.sha256(text.encode()).hexdigest()


def run_and_step(
    config: PretrainedConfig, split: SplitConfig, args: TrainingArguments, adapter: PeftConfig | None, step: int
) -> dict[str, object]:
    """Of which run a party's saved parts are, and after which step: what `merge_parts` compares."""
    return {"digest": run_digest(config, split, args, adapter), "step": step}


def _lasting(values: dict[str, object]) -> dict[str, object]:
    return {str(name): value for name, value in values.items() if name not in _VOLATILE}
