"""What the parties of a networked run must have in common, as one number."""

from __future__ import annotations

import hashlib
import json

from peft import PeftConfig
from transformers import PretrainedConfig, TrainingArguments

from .config import SplitConfig


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
