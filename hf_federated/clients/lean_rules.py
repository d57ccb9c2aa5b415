"""`reason_for_trainer`: whether a local training needs the loop of `Trainer`.

The loop of [`~hf_federated.clients.lean_training.train_lean`] computes the same bits as `Trainer.train()` if nothing
in between is customized. Everything that this module does not know goes to the loop of `Trainer`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from accelerate.utils import DistributedType
from datasets import Dataset
from torch.optim import SGD, Adam, AdamW
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments

from .._compat import is_prepared
from ..methods import ClientPart


# Attributes of a class that say nothing about how its instances train.
_DESCRIPTIONS = {
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__orig_bases__",
    "__parameters__",
    "__qualname__",
    "__static_attributes__",
    "__weakref__",
}
# Arguments with the only value that the lean loop knows.
_ARGUMENTS = {
    "auto_find_batch_size": False,
    "dataloader_num_workers": 0,
    "full_determinism": False,
    "gradient_checkpointing": False,
    "activation_checkpointing": False,
    "neftune_noise_alpha": None,
    "torch_compile": False,
    "torch_empty_cache_steps": None,
    "use_liger_kernel": False,
}
_SAMPLERS = ("random", "sequential")
_OPTIMIZERS = (Adam, AdamW, SGD)
_SETTINGS = (bool, int, float, tuple, type(None))
_OPTIMIZER_NAMES = ("adamw_torch", "adamw_torch_fused", "sgd")
_SCHEDULES_OF_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")
# `Seq2SeqTrainer` changes the evaluation only.
_KNOWN_CLASSES = (Trainer, Seq2SeqTrainer, object)
_OURS = "hf_federated"
# Methods of the accelerator that the lean loop replaces.
_ACCELERATOR_METHODS = {"backward", "clip_grad_norm_", "prepare"}


def reason_for_trainer(
    trainer: Any,
    args: TrainingArguments,
    parts: Sequence[ClientPart],
    callbacks: Sequence[TrainerCallback],
    classes: dict[type, str | None] | None = None,
) -> str | None:
    """
    Return why a local training needs the loop of `Trainer`.

    Args:
        trainer (`transformers.Trainer`): The trainer of the client, before the training.
        args (`TrainingArguments`): The arguments of the client.
        parts (`Sequence[ClientPart]`): The client halves of the methods.
        callbacks (`Sequence[TrainerCallback]`): The callbacks of the local training, except the ones that every local
            training has.
        classes (`dict[type, str | None]`, *optional*): The reasons of the classes that were examined in this run. A
            new class is added.

    Returns:
        `str`: The reason; `None` if the lean loop gives the same bits.
    """
    kind, known = type(trainer), {} if classes is None else classes
    if kind not in known:
        known[kind] = _reason_of_class(kind)
    return (
        known[kind]
        or _reason_of_attributes(trainer)
        or _reason_of_callbacks(callbacks)
        or _reason_of_parts(parts)
        or _reason_of_arguments(args)
        or _reason_of_optimizer(trainer, args)
        or _reason_of_process(trainer)
        or _reason_of_examples(trainer)
    )


def _reason_of_class(kind: type) -> str | None:
    """Return why the class of a trainer needs the loop of `Trainer`. A class can change while a process runs."""
    for base in kind.__mro__:
        package = _package(base.__module__)
        if base not in _KNOWN_CLASSES and package != _OURS and (own := sorted(vars(base).keys() - _DESCRIPTIONS)):
            return f"the class {base.__name__} has its own {own[0]!r}"
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and _package(value.__module__) != package:
                return f"{base.__name__}.{name} was replaced by a function of {value.__module__}"
    return None


def _reason_of_attributes(trainer: Any) -> str | None:
    kind: Any = type(trainer)
    methods = _names_of_methods(kind)
    if replaced := sorted(name for name in vars(trainer) if name in methods):
        return f"the trainer has its own attribute {replaced[0]!r}, which is a method of its class"
    return None


@functools.cache
def _names_of_methods(kind: type) -> frozenset[str]:
    return frozenset(name for base in kind.__mro__ for name, value in vars(base).items() if callable(value))


@functools.cache
def _is_ours(kind: Any) -> bool:
    return all(base is object or _package(base.__module__) == _OURS for base in kind.__mro__)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _reason_of_callbacks(callbacks: Sequence[TrainerCallback]) -> str | None:
    for callback in callbacks:
        kind: Any = type(callback)
        if (reason := _reason_of_callback(kind)) is not None:
            return reason
    return None


@functools.cache
def _reason_of_callback(kind: Any) -> str | None:
    events = (name for name in dir(TrainerCallback) if name.startswith("on_"))
    changed = {name for name in events if getattr(kind, name) is not getattr(TrainerCallback, name)}
    if kind.__module__.partition(".")[0] == _OURS and changed <= {"on_step_end"}:
        return None
    return f"the callback {kind.__name__} receives the events of local training"


def _reason_of_parts(parts: Sequence[ClientPart]) -> str | None:
    for part in parts:
        kind: Any = type(part)
        if not _is_ours(kind):
            return f"the client half {kind.__name__} is not a part of hf_federated"
        if part.callbacks:
            return f"the client half {kind.__name__} has callbacks"
    return None


def _reason_of_arguments(args: TrainingArguments) -> str | None:
    for name, known in _ARGUMENTS.items():
        if (value := getattr(args, name, known)) != known:
            return f"{name}={value!r}"
    if args.debug:
        return f"debug={args.debug!r}"
    if args.train_sampling_strategy not in _SAMPLERS:
        return f"train_sampling_strategy={args.train_sampling_strategy!r}"
    if args.lr_scheduler_type in _SCHEDULES_OF_EVALUATIONS:
        return f"lr_scheduler_type={args.lr_scheduler_type!r}"
    return None


def _reason_of_optimizer(trainer: Any, args: TrainingArguments) -> str | None:
    if trainer.has_optimizer_functions:
        return "`optimizers` has functions"
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, settings = trainer.optimizer_cls_and_kwargs
        if kind not in _OPTIMIZERS or not all(isinstance(value, _SETTINGS) for value in settings.values()):
            return f"`optimizer_cls_and_kwargs` with the class {kind.__name__}"
        return None
    return None if args.optim in _OPTIMIZER_NAMES else f"optim={args.optim.value!r}"


def _reason_of_process(trainer: Any) -> str | None:
    accelerator = trainer.accelerator
    settings = accelerator.dataloader_config
    if accelerator.distributed_type != DistributedType.NO or trainer.args.n_gpu > 1:
        return "a client trains in several processes or on several devices"
    if replaced := sorted(_ACCELERATOR_METHODS & vars(accelerator).keys()):
        return f"`accelerator.{replaced[0]}` was replaced"
    if accelerator.mixed_precision not in ("no", "bf16"):
        return f"the precision {accelerator.mixed_precision!r} scales the loss"
    if settings.split_batches or settings.dispatch_batches or not settings.use_seedable_sampler:
        return "`accelerator_config` changes the order of the examples"
    if not is_prepared(trainer.model) or trainer.model_wrapped is not trainer.model:
        return "accelerate has not prepared the model yet"
    return None


def _reason_of_examples(trainer: Any) -> str | None:
    if not isinstance(trainer.train_dataset, Dataset):
        return f"the examples are a {type(trainer.train_dataset).__name__}, not a datasets.Dataset"
    collator = trainer.data_collator
    if not isinstance(collator, FunctionType) and _package(type(collator).__module__) not in ("transformers", _OURS):
        return f"the collator {type(collator).__name__} may keep a state"
    return None
