"""Checks of the training arguments and of the configuration of a federation."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Mapping

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType

from ..._compat import completions_per_generation, micro_steps_per_generation, refusal_of_trainer
from ...adapters.shards import is_divided_when_loaded
from ...aggregation import Aggregation
from ...clients import UnsupportedTrainerError
from ...config import FederatedConfig


# The learning rate of these schedules depends on evaluations, which take place between rounds and not inside clients.
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def resolve_federation(federation: FederatedConfig | None, args: TrainingArguments) -> FederatedConfig:
    """
    Fill in `num_rounds` and `federation_seed` of the configuration from the training arguments.

    As in `Trainer`, `max_steps` replaces `num_train_epochs`.

    Raises:
        ValueError: If `max_steps` does not determine the number of rounds, or contradicts `num_rounds`.
    """
    federation = FederatedConfig() if federation is None else federation
    num_rounds, seed = federation.num_rounds, federation.federation_seed
    if args.max_steps > 0:
        num_rounds = rounds_of_max_steps(args.max_steps, federation)
    elif num_rounds is None:
        num_rounds = max(math.ceil(args.num_train_epochs), 1)
    return dataclasses.replace(federation, num_rounds=num_rounds, federation_seed=args.seed if seed is None else seed)


def rounds_of_max_steps(max_steps: int, federation: FederatedConfig) -> int:
    """
    Return the number of rounds in which a client takes `max_steps` optimizer steps.

    Args:
        max_steps (`int`): `max_steps` of the training arguments, positive.
        federation ([`FederatedConfig`]): The user's configuration.

    Raises:
        ValueError: If `local_steps` is not set or does not divide `max_steps`, or if `num_rounds` is another number.
    """
    local_steps = federation.local_steps
    if local_steps is None:
        raise ValueError(
            f"max_steps={max_steps} counts optimizer steps, but a round has local_epochs={federation.local_epochs} of "
            "each client, which can be a different number of steps for each client. Set `local_steps` of "
            "FederatedConfig, so that max_steps / local_steps is the number of rounds. Or remove `max_steps` and set "
            "`num_rounds`."
        )
    num_rounds, remainder = divmod(max_steps, local_steps)
    if remainder:
        choices = " or ".join(
            f"{number * local_steps} ({number} round{'s' if number > 1 else ''})"
            for number in (num_rounds, num_rounds + 1)
            if number
        )
        raise ValueError(
            f"max_steps={max_steps} is not a multiple of local_steps={local_steps}. Set `max_steps` to {choices}, or "
            "change `local_steps`."
        )
    if federation.num_rounds not in (None, num_rounds):
        raise ValueError(
            f"max_steps={max_steps} and local_steps={local_steps} make {num_rounds} rounds, but "
            f"num_rounds={federation.num_rounds}. Remove `max_steps` or `num_rounds`."
        )
    return num_rounds


def check_arguments(trainer: Trainer, federation: FederatedConfig, algorithm: Aggregation) -> None:
    """
    Refuse training arguments and launches that a federation does not support.

    Args:
        trainer (`transformers.Trainer`): The federated trainer, constructed as its parent class.
        federation ([`FederatedConfig`]): The configuration.
        algorithm ([`Aggregation`]): The averaging algorithm.

    Raises:
        ValueError: If an argument or the launch is not supported. The message names the alternative.
    """
    args = trainer.args
    refused = {
        **unsupported_client_arguments(args),
        "sync_ref_model=True": (
            bool(getattr(args, "sync_ref_model", False)),
            "set it to False; the reference model of one client would reach the next client",
        ),
        "teacher_model_kind='ema'": (
            getattr(args, "teacher_model_kind", None) == "ema",
            "set it to 'base' or 'live'; the teacher of one client would reach the next client",
        ),
        "vllm_mode='server'": (
            bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "server",
            "set vllm_mode='colocate'; the server has one set of weights for all clients",
        ),
        **unsupported_sharding(trainer),
        f"A process with {args.n_gpu} GPUs": (args.n_gpu > 1, launch_advice(args.n_gpu)),
        **unsupported_float16(trainer),
    }
    refuse_settings(refused)
    check_generations(args, federation)
    algorithm.check_setup(args, federation)


def check_trainer_class(trainer_class: type) -> None:
    """
    Refuse a trainer that cannot train each client separately, before it is constructed.

    Raises:
        UnsupportedTrainerError: If the trainer is not supported. The message names the alternative.
    """
    if reason := refusal_of_trainer(trainer_class):
        raise UnsupportedTrainerError(f"{trainer_class.__name__} does not work in a federation: {reason}.")


def check_generations(args: TrainingArguments, federation: FederatedConfig) -> None:
    """
    Refuse a round that ends before a trainer of TRL has used all completions that it generated.

    The trainer would discard these completions. A client starts each round with a new generation, from the new model.

    Args:
        args (`TrainingArguments`): The training arguments.
        federation ([`FederatedConfig`]): The configuration.

    Raises:
        ValueError: If `local_steps` does not end a generation, with the nearest two values that do. If one process
            generates a part of the completions of a prompt, but trains whole clients.
    """
    completions, num_generations = completions_per_generation(args), vars(args).get("num_generations")
    if federation.parallelism == "clients" and completions and num_generations and completions % num_generations:
        raise ValueError(
            f"parallelism='clients' trains a client in one process, which generates per_device_train_batch_size * "
            f"steps_per_generation = {completions} completions at a time. This is not a multiple of "
            f"{num_generations=}. Set `per_device_train_batch_size` to a multiple of {num_generations}."
        )
    period, accumulation = micro_steps_per_generation(args), args.gradient_accumulation_steps
    local_steps = federation.local_steps
    if local_steps is None or local_steps * accumulation % period == 0:
        return
    unit = period // math.gcd(period, accumulation)
    below = local_steps // unit * unit
    first, second = (below or unit, (below or unit) + unit)
    raise ValueError(
        f"local_steps={local_steps} with gradient_accumulation_steps={accumulation} are {local_steps * accumulation} "
        f"micro-batches, but the trainer uses its completions for steps_per_generation * num_iterations = {period} "
        f"micro-batches. The client would discard completions. Set `local_steps` to {first} or {second}."
    )


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
            "the batch size would depend on the free memory at the time of the round, and with the batch size the "
            "number of steps of a client and its learning rates, so that a resumed run would differ. Find the batch "
            "size with a plain Trainer on the client with the longest examples, and set `per_device_train_batch_size`",
        ),
    }


def unsupported_float16(trainer: Trainer) -> dict[str, tuple[bool, str]]:
    """Map a trained parameter in float16 to whether `fp16=True` is set and to the alternative."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            alternative = (
                "the gradients of such parameters cannot be scaled. Load the model with dtype=torch.float32, which "
                "fp16=True trains with computations in float16, or train a LoRA adapter"
            )
            is_scaled = trainer.accelerator.scaler is not None
            return {f"fp16=True with parameters in float16 ({name!r})": (is_scaled, alternative)}
    return {}


def is_sharded(trainer: Trainer) -> bool:
    """Whether accelerate divides the parameters of the model over the processes with FSDP2."""
    return trainer.accelerator.is_fsdp2


def unsupported_sharding(trainer: Trainer) -> dict[str, tuple[bool, str]]:
    """Map each unsupported way to divide a model over processes to whether it is set and to its alternative."""
    args, accelerator = trainer.args, trainer.accelerator
    launch_type = accelerator.distributed_type.value
    alternative = (
        "use FSDP with `fsdp_version: 2`, or plain data parallelism, for example with LoRA on a quantized model"
    )
    asked = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return {
        "DeepSpeed": (bool(args.deepspeed) or trainer.is_deepspeed_enabled, alternative),
        "FSDP with `fsdp_version: 1`": (trainer.is_fsdp_enabled and not is_sharded(trainer), alternative),
        f"FSDP in a launch of type {launch_type}": (
            asked and not trainer.is_fsdp_enabled and accelerator.num_processes > 1,
            "accelerate shards models on accelerators only, so each process would hold the whole model. Launch one "
            "process for each accelerator, or leave FSDP out of the launch and of the training arguments",
        ),
        f"a launch of type {launch_type}": (
            launch_type not in ("NO", "FSDP") and not launch_type.startswith("MULTI_"),
            alternative,
        ),
        "tensor, context or sequence parallelism": (
            getattr(accelerator, "parallelism_config", None) is not None or is_divided_when_loaded(trainer.model),
            alternative,
        ),
    }


def launch_advice(num_gpus: int) -> str:
    """Return the command that starts the current script with one process per GPU, and the command for one GPU."""
    # Without a script (in a notebook or with `python -c`), the command line has no file name.
    script = shlex.quote(sys.argv[0] if os.path.isfile(sys.argv[0]) else "script.py")
    return (
        "torch.nn.DataParallel would split the batches of a client. Start one process for each GPU with "
        f"`accelerate launch --num_processes {num_gpus} {script}`, or use one GPU with "
        f"`CUDA_VISIBLE_DEVICES=0 python {script}`"
    )
