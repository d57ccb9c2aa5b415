"""What is refused when a split trainer is built or joins a networked run, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import IntervalStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from ..data import FederatedDataset
from ..split.model import SplitModel
from .config import SplitConfig
from .messages import Join


# Their learning rate depends on evaluations.
_METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
# Methods of a trainer in whose place the clients' rows are planned for everybody at once.
_SAMPLING = ("get_train_dataloader", "_get_train_sampler")
# Methods of a trainer by which an optimizer is made.
_OPTIMIZERS = ("create_optimizer", "create_scheduler", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs")
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
        raise ValueError(
            f"`model` is a SplitModel, or a model to be split, got {type(model).__name__}. SplitModel.from_model cuts "
            "a checkpoint by its name."
        )
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
    if others.get("optimizer_cls_and_kwargs") is not None:
        check_optimizer_class(*others["optimizer_cls_and_kwargs"])
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
            _steps_by_itself(OptimizerNames(args.optim).value),
            f"optim={OptimizerNames(args.optim).value!r}",
            "one that steps when all parties do and has no mode of its own, as 'adamw_torch'",
        ),
        (
            (getattr(args, "generation_num_beams", None) or 1) > 1,
            "generation_num_beams",
            "1: a split model generates greedily or by sampling",
        ),
        (
            not args.accelerator_config.use_seedable_sampler,
            "use_seedable_sampler=False",
            "True: the order of every client's rows follows from the seed",
        ),
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


def check_sampling(trainer_class: type, mixin: type) -> None:
    """
    Refuse a class that draws rows in its own way.

    Args:
        trainer_class (`type`): The class of a split trainer.
        mixin (`type`): What makes it one.

    Raises:
        TypeError: If so.
    """
    overridden = _overridden(trainer_class, mixin, _SAMPLING)
    if overridden:
        raise TypeError(
            f"{overridden[0]} draws rows in its own way, and a split plans those of all clients at once: use "
            "train_sampling_strategy, or order each client's rows beforehand."
        )


def _overridden(trainer_class: type, mixin: type, names: Iterable[str]) -> list[str]:
    """Which of these methods of `Trainer` a user's class has of its own."""
    owners = [owner for owner in trainer_class.__mro__ if owner not in (mixin, Trainer)]
    return [f"{owner.__name__}.{name}" for owner in owners for name in names if name in vars(owner)]


def check_trainer_class(trainer_class: type) -> None:
    """
    Refuse trainers of TRL that do more with a model than to predict the next token.

    Raises:
        TypeError: If it is one.
    """
    of_trl = _of_trl(trainer_class)
    if of_trl and of_trl[0].__name__ != "SFTTrainer":
        raise TypeError(
            f"{of_trl[0].__name__} is not supported in a split, whose clients have no reference model and no reward: "
            "use federate() with one of the other families, or SFTTrainer."
        )


def loads_by_name(trainer_class: type) -> bool:
    """Whether a trainer takes the name of a model too: TRL's do."""
    return bool(_of_trl(trainer_class))


def _of_trl(trainer_class: type) -> list[type]:
    return [owner for owner in trainer_class.__mro__ if owner.__module__.partition(".")[0] == "trl"]


def check_forward(trainer_class: type, model: SplitModel) -> None:
    """
    Undo or refuse a forward pass that a constructor gave the model: the models of other clients have none.

    Raises:
        TypeError: If it is not that of TRL's `SFTTrainer`, for which [`SplitModel`] has its own answer.
    """
    if "forward" not in vars(model):
        return
    if not _of_trl(trainer_class):
        raise TypeError(
            f"The constructor of {trainer_class.__name__} gives the model another forward pass, which the models of "
            "other clients would not have: override `compute_loss` instead."
        )
    del model.forward


def check_gradients(trainer_class: type, model: SplitModel) -> None:
    """
    Refuse a loss of another model than the one that it was given: each client has a model of its own.

    Raises:
        ValueError: If the clients' blocks of the whole model, which nobody steps, got gradients.
    """
    parts = (model.client_head, model.client_tail)
    if any(parameter.grad is not None for part in parts for parameter in part.parameters()):
        raise ValueError(
            f"The loss of {trainer_class.__name__} has gradients in `self.model`, which the parties of a split do not "
            "train: compute it from the `model` that compute_loss() is given, the client's own."
        )


def check_revision(args: TrainingArguments | None, others: Mapping[str, Any]) -> None:
    """
    Refuse a revision of a model by name that its tokenizer would not be of: the parent takes that of the main branch.

    Raises:
        ValueError: If so.
    """
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision")
    if revision is not None and others.get("processing_class") is None:
        raise ValueError(f"Of a model's revision {revision!r} give the tokenizer too, as `processing_class`.")


def check_optimizer_class(optimizer_class: type, settings: Mapping[str, Any]) -> None:
    """
    Refuse an optimizer that could not be made for each party, or not step with the others.

    Raises:
        ValueError: If so.
    """
    named = sorted({"params", "model", "optimizer_dict"} & settings.keys())
    if named:
        raise ValueError(f"`optimizer_cls_and_kwargs` has {named[0]!r}: every party's optimizer is given its own.")
    if hasattr(optimizer_class, "train"):
        raise ValueError(
            f"{optimizer_class.__name__} has modes for training and evaluation, which parties that hand over their "
            "parts cannot have: use another optimizer."
        )


def _steps_by_itself(optim: str) -> bool:
    """Whether an optimizer steps inside the backward pass, or has other values for evaluation than for training."""
    return optim in ("lomo", "adalomo") or optim.endswith("_layerwise") or optim.startswith("schedule_free")


def check_loss(model: SplitModel, args: TrainingArguments, config: SplitConfig) -> None:
    """
    Refuse losses of the wrong tokens, or of tokens that the server could not count.

    Raises:
        ValueError: If `Trainer` does not know the model's class for one that predicts the next token, and is to smooth
            its labels; or if clients meet whose model has a loss of its own.
    """
    name = model._get_name()
    if args.label_smoothing_factor and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"label_smoothing_factor: Trainer does not know {name} for a causal language model, and would smooth the "
            "loss of the same token in place of the next: leave it out, or override `compute_loss`."
        )
    if config.strategy == "client_batch" and "_loss_function" in vars(model.client_tail.model):
        raise ValueError(
            "A `loss_function` of the model's own is not supported with strategy='client_batch', whose server weighs "
            "clients by their target tokens: use another strategy."
        )


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


def check_networked_optimizer(trainer: Trainer, mixin: type) -> None:
    """
    Refuse optimizers of a client's own, which the server of a networked run would not have for its body.

    Args:
        trainer (`transformers.Trainer`): A split trainer.
        mixin (`type`): What makes its class one.

    Raises:
        ValueError: If so.
    """
    own = _overridden(type(trainer), mixin, _OPTIMIZERS)
    if trainer.optimizer_cls_and_kwargs is not None:
        own.append("optimizer_cls_and_kwargs")
    if own:
        raise ValueError(
            f"{own[0]} of a client does not reach the server of a networked run, whose body's optimizer is made from "
            "the training arguments: use `optim`, `optim_args` and `lr_scheduler_type`."
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
