"""What is refused when a split trainer is built or joins a networked run, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SchedulerType

from ..data import FederatedDataset
from ..split.model import SplitModel
from .config import SplitConfig
from .control import Join


# Their learning rate depends on evaluations.
_METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
# Steps of a client in an epoch, beyond which it does not say how many it has.
MAX_STEPS = 10_000_000


def as_split_model(model: Any, config: SplitConfig) -> SplitModel:
    """
    The model, cut as the config says.

    Raises:
        ValueError: If there is none, it cannot be cut, or it is cut otherwise already.
    """
    if isinstance(model, SplitModel):
        for name in ("head_blocks", "tail_blocks"):
            given, said = getattr(model.cut, name), getattr(config, name)
            if given != said:
                raise ValueError(
                    f"The SplitModel has {name}={given}, SplitConfig {said}: write the same in both, or pass the "
                    "whole model."
                )
        if config.wire_dtype not in ("auto", model.boundary.wire.dtype):
            raise ValueError(
                f"The SplitModel sends {model.boundary.wire.dtype}, SplitConfig says {config.wire_dtype}: write the "
                "same in both, or pass the whole model."
            )
        return model
    if not isinstance(model, (PreTrainedModel, PeftModel)):
        raise ValueError(f"`model` is a SplitModel, or a model to be split, got {type(model).__name__}.")
    return SplitModel.from_model(model, config.head_blocks, config.tail_blocks, wire_dtype=config.wire_dtype)


def check_split_arguments(
    args: TrainingArguments | None, config: SplitConfig, clients: FederatedDataset | None, others: Mapping[str, Any]
) -> None:
    """
    Refuse arguments that cannot mean anything for several parties, or that were never tried.

    Raises:
        ValueError: The message names the alternative.
    """
    if others.get("model_init") is not None:
        raise ValueError("`model_init` is not supported in a split: pass the `model`.")
    if any(part is not None for part in others.get("optimizers") or ()):
        raise ValueError(
            "`optimizers=` holds one optimizer, and every party needs its own: use `optim` and `learning_rate` of the "
            "arguments, or `optimizer_cls_and_kwargs`."
        )
    if others.get("compute_loss_func") is not None and config.strategy == "client_batch":
        raise ValueError(
            "`compute_loss_func` is not supported with strategy='client_batch', whose clients' models count target "
            "tokens: override `compute_loss` and hand the labels to the model, or use another strategy."
        )
    for client_id, num_rows in ({} if clients is None else clients.num_rows).items():
        if num_rows is None:
            raise ValueError(f"The rows of client {client_id!r} are a stream, whose steps cannot be planned.")
    if args is None:
        return
    refused = [
        (args.world_size > 1 or args.n_gpu > 1, "several processes or GPUs", "one process with one GPU"),
        (args.fp16, "fp16=True", "bf16=True: gradients of several parties cannot share one loss scale"),
        (bool(args.deepspeed or args.fsdp), "deepspeed and fsdp", "one process: parts have several owners"),
        (args.auto_find_batch_size, "auto_find_batch_size", "a per_device_train_batch_size that fits"),
        (args.torch_compile, "torch_compile", "no compilation: a boundary of bytes ends every graph"),
        (args.lr_scheduler_type in _METRIC_SCHEDULES, f"lr_scheduler_type={args.lr_scheduler_type}", "another one"),
        (
            args.train_sampling_strategy not in ("random", "sequential"),
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "'random' or 'sequential'",
        ),
        (
            bool(args.label_smoothing_factor) and config.strategy == "client_batch",
            "label_smoothing_factor with strategy='client_batch'",
            "no smoothing: the server weighs clients by their target tokens",
        ),
    ]
    for wrong, what, instead in refused:
        if wrong:
            raise ValueError(f"{what} is not supported in a split: use {instead}.")


def own_rows(client_id: str, rows: Any) -> dict[str, Any]:
    """
    The rows of a client whose server is elsewhere.

    Raises:
        ValueError: If others' rows are among them.
    """
    if not isinstance(rows, Mapping):
        return {client_id: rows}
    if list(rows) != [client_id]:
        raise ValueError(
            f"This is client {client_id!r} of a networked run, and train_dataset has the rows of {sorted(rows)}: a "
            "client has its own."
        )
    return {client_id: rows[client_id]}


def check_networked_evaluation(
    args: TrainingArguments, config: SplitConfig, steps_of: Mapping[str, int] | None = None
) -> None:
    """
    Refuse evaluations inside a networked run in which the server's body would not be of one step: nobody waits for
    a client that evaluates, but those whose next step it takes part in.

    Args:
        args (`transformers.TrainingArguments`): The client's.
        config ([`SplitConfig`]): The cut and the strategy.
        steps_of (`Mapping[str, int]`, *optional*): Steps of every client in an epoch, once they are known.

    Raises:
        ValueError: If so.
    """
    if args.load_best_model_at_end:
        raise ValueError("Every client of a networked run has results of its own: set load_best_model_at_end=False.")
    if config.strategy == "serial" and args.eval_strategy != IntervalStrategy.NO:
        raise ValueError(
            "While a client of a networked run with strategy='serial' evaluates, another one trains the server's "
            "body: set eval_strategy='no', and evaluate when training is over."
        )
    if args.eval_strategy == IntervalStrategy.STEPS and len(set((steps_of or {}).values())) > 1:
        raise ValueError(
            f"Clients have {', '.join(f'{own}: {steps}' for own, steps in (steps_of or {}).items())} steps in an "
            "epoch. While one that has no more evaluates, others train the server's body: set eval_strategy='epoch', "
            "after which all go on together, or 'no'."
        )


def check_join(message: Join, digest: str) -> None:
    """
    Refuse a client that cannot take part in a run.

    Args:
        message ([`Join`]): What it says.
        digest (`str`): Of the settings that parties must have in common.

    Raises:
        ValueError: If its settings are others, or its rows make no step or more than can be.
    """
    if message.digest != digest:
        raise ValueError(
            "The settings of client and server differ (model, split, training or adapter): give both the same "
            f"recipe. The server's digest is {digest[:12]}, the client's {message.digest[:12]}."
        )
    if not message.num_steps:
        raise ValueError(f"Client {message.client_id!r} has too few rows for a step: give more, or smaller batches.")
    if message.num_steps > MAX_STEPS:
        raise ValueError(
            f"Client {message.client_id!r} says that its rows make {message.num_steps} steps in an epoch; at most "
            f"{MAX_STEPS} are planned."
        )
