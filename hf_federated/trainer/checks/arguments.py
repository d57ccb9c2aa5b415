"""Checks of the training arguments and of the configuration of a federation."""

from __future__ import annotations

import dataclasses

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from ...aggregation import Aggregation, FedAvg, LocalOnly
from ...config import FederatedConfig
from ...distillation import Distillation


# Their learning rate depends on evaluations that happen between rounds, outside any client.
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def resolve_federation(federation: FederatedConfig | None, args: TrainingArguments) -> FederatedConfig:
    """The configuration with `num_rounds` and `federation_seed` filled in from the training arguments."""
    federation = FederatedConfig() if federation is None else federation
    rounds, seed = federation.num_rounds, federation.federation_seed
    return dataclasses.replace(
        federation,
        num_rounds=max(int(-(-args.num_train_epochs // 1)), 1) if rounds is None else rounds,
        federation_seed=args.seed if seed is None else seed,
    )


def check_arguments(trainer: Trainer, federation: FederatedConfig, algorithm: Aggregation) -> None:
    """
    Refuse training arguments, and ways to launch, that cannot mean anything in a federation or that were never tried.

    Raises:
        ValueError: It names the argument and the alternative.
    """
    args = trainer.args
    launched_as = trainer.accelerator.distributed_type.value
    unsharded = "launch with plain data parallelism; LoRA, also over a quantized base, makes a model fit"
    refused = {
        f"max_steps={args.max_steps}": (args.max_steps > 0, "give `num_rounds` and `local_steps` of FederatedConfig"),
        **_unfit_for_clients(args),
        "sync_ref_model=True": (
            bool(getattr(args, "sync_ref_model", False)),
            "leave the reference model as it is; one client's would reach the next",
        ),
        "DeepSpeed": (bool(args.deepspeed) or trainer.is_deepspeed_enabled, unsharded),
        "FSDP": (bool(args.fsdp) or trainer.is_fsdp_enabled, unsharded),
        f"a launch as {launched_as}": (launched_as != "NO" and not launched_as.startswith("MULTI_"), unsharded),
        "tensor, context or sequence parallelism": (
            getattr(trainer.accelerator, "parallelism_config", None) is not None,
            unsharded,
        ),
        f"{args.n_gpu} GPUs in one process": (args.n_gpu > 1, "set CUDA_VISIBLE_DEVICES to one of them"),
        f"optim={OptimizerNames(args.optim).value!r} with {algorithm.name}": (
            algorithm.needs_gradients and args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO),
            "use an optimizer that keeps gradients until its step, such as 'adamw_torch'",
        ),
    }
    for what, (is_refused, alternative) in refused.items():
        if is_refused:
            raise ValueError(f"{what} does not work in a federation: {alternative}.")
    algorithm.check_setup(args, federation)


def _unfit_for_clients(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Arguments with which no client can train: whether they are set, and what to do instead."""
    return {
        f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r}": (
            args.lr_scheduler_type in METRIC_SCHEDULES,
            "use a schedule of steps such as 'linear' or 'cosine'; the server's may be set in FedOpt",
        ),
        "auto_find_batch_size=True": (
            bool(args.auto_find_batch_size),
            "set `per_device_train_batch_size`; a client that runs out of memory would go on from a changed model",
        ),
        "fp16=True": (bool(args.fp16), "use bf16=True; the loss scale would carry from client to client"),
    }


def check_not_averaged(aggregation: Aggregation, distillation: Distillation) -> None:
    """
    Refuse an average of parameters beside a distillation in which they do not travel.

    Raises:
        ValueError: If one was asked for.
    """
    if aggregation.name not in (FedAvg.name, LocalOnly.name) or aggregation.non_default_settings():
        raise ValueError(
            f"aggregation={aggregation.name!r} has nothing to average: with distillation={distillation.name!r} "
            "clients send predictions, and keep their parameters. Leave `aggregation` out."
        )
