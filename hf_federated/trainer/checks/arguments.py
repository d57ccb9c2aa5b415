"""Checks of the training arguments and of the configuration of a federation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from ...aggregation import Aggregation, FedAvg, LocalOnly
from ...config import FederatedConfig
from ...distillation import Distillation


# The learning rate of these schedules depends on evaluations, which take place between rounds and not inside clients.
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def resolve_federation(federation: FederatedConfig | None, args: TrainingArguments) -> FederatedConfig:
    """Fill in `num_rounds` and `federation_seed` of the configuration from the training arguments."""
    federation = FederatedConfig() if federation is None else federation
    num_rounds, seed = federation.num_rounds, federation.federation_seed
    return dataclasses.replace(
        federation,
        num_rounds=max(int(-(-args.num_train_epochs // 1)), 1) if num_rounds is None else num_rounds,
        federation_seed=args.seed if seed is None else seed,
    )


def check_arguments(trainer: Trainer, federation: FederatedConfig, algorithm: Aggregation) -> None:
    """
    Refuse training arguments and launches that a federation does not support.

    Raises:
        ValueError: If an argument or the launch is not supported. The message names the alternative.
    """
    args = trainer.args
    launch_type = trainer.accelerator.distributed_type.value
    alternative_to_sharding = (
        "launch with plain data parallelism; LoRA, optionally on a quantized base model, reduces the memory"
    )
    refused = {
        f"max_steps={args.max_steps}": (args.max_steps > 0, "set `num_rounds` and `local_steps` of FederatedConfig"),
        **unsupported_client_arguments(args),
        "sync_ref_model=True": (
            bool(getattr(args, "sync_ref_model", False)),
            "set it to False; the reference model of one client would reach the next client",
        ),
        "DeepSpeed": (bool(args.deepspeed) or trainer.is_deepspeed_enabled, alternative_to_sharding),
        "FSDP": (bool(args.fsdp) or trainer.is_fsdp_enabled, alternative_to_sharding),
        f"a launch of type {launch_type}": (
            launch_type != "NO" and not launch_type.startswith("MULTI_"),
            alternative_to_sharding,
        ),
        "tensor, context or sequence parallelism": (
            getattr(trainer.accelerator, "parallelism_config", None) is not None,
            alternative_to_sharding,
        ),
        f"{args.n_gpu} GPUs in one process": (args.n_gpu > 1, "set CUDA_VISIBLE_DEVICES to one GPU"),
        f"optim={OptimizerNames(args.optim).value!r} with {algorithm.name}": (
            algorithm.needs_gradients and args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO),
            "use an optimizer that keeps the gradients until its step, such as 'adamw_torch'",
        ),
    }
    refuse_settings(refused)
    algorithm.check_setup(args, federation)


def refuse_settings(settings: Mapping[str, tuple[bool, str]], owner: str = "") -> None:
    """
    Raise an error for the first unsupported setting that is set.

    Args:
        settings (`Mapping[str, tuple[bool, str]]`): Whether each unsupported setting is set, and its alternative.
        owner (`str`, *optional*, defaults to `""`): Words after the setting in the error, such as `" of client 'a'"`.

    Raises:
        ValueError: If a setting is set. The message names the alternative.
    """
    for setting, (is_set, alternative) in settings.items():
        if is_set:
            raise ValueError(f"{setting}{owner} does not work in a federation: {alternative}.")


def unsupported_client_arguments(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Map each argument that clients do not support to whether it is set and to its alternative."""
    return {
        f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r}": (
            args.lr_scheduler_type in METRIC_SCHEDULES,
            "use a schedule of steps such as 'linear' or 'cosine'; FedOpt has a schedule for the server",
        ),
        "auto_find_batch_size=True": (
            bool(args.auto_find_batch_size),
            "set `per_device_train_batch_size`; a client that runs out of memory would continue with a changed model",
        ),
        "fp16=True": (bool(args.fp16), "use bf16=True; the loss scale would be shared by all clients"),
    }


def check_not_averaged(aggregation: Aggregation, distillation: Distillation) -> None:
    """
    Refuse an averaging algorithm together with a distillation that does not exchange parameters.

    Raises:
        ValueError: If the user set an averaging algorithm.
    """
    if type(aggregation) not in (FedAvg, LocalOnly) or aggregation.non_default_settings():
        raise ValueError(
            f"aggregation={aggregation.name!r} has nothing to average: with distillation={distillation.name!r} "
            "clients send predictions and no parameters. Leave `aggregation` out."
        )
