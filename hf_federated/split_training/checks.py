"""Checks of the arguments of a split trainer. The errors name alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from .._compat import LOSS_FUNCTION, check_trl_splits_sft_trainer
from ..data import FederatedDataset
from ..split.model import SplitModel
from .config import SplitConfig
from .step_plan import SplitSteps


logger = logging.get_logger(__name__)


# Schedules whose learning rate depends on evaluation metrics.
_METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
# Sampling methods of `Trainer`. A split trainer plans the examples of all clients together instead.
_SAMPLING_METHODS = ("get_train_dataloader", "_get_train_sampler")


def as_split_model(model: Any, config: SplitConfig) -> SplitModel:
    """
    Split the model as the config requires. A [`SplitModel`] is returned unchanged.

    Raises:
        ValueError: If `model` is missing, cannot be split, or is split differently from the config.
    """
    if isinstance(model, SplitModel):
        values = {**vars(model.cut), "wire_dtype": model.boundary.wire.dtype}
        for name in ("head_blocks", "tail_blocks", "wire_dtype"):
            expected = getattr(config, name)
            if expected not in ("auto", values[name]):
                raise ValueError(
                    f"The SplitModel has {name}={values[name]}, but SplitConfig has {name}={expected}. Set equal "
                    "values, or pass the full model."
                )
        return model
    if not isinstance(model, (PreTrainedModel, PeftModel)):
        raise ValueError(
            f"`model` has type {type(model).__name__}, but must be a SplitModel, PreTrainedModel or PeftModel. To "
            "split a checkpoint by its name, use SplitModel.from_model."
        )
    return SplitModel.from_model(model, config.head_blocks, config.tail_blocks, wire_dtype=config.wire_dtype)


def check_split_arguments(
    args: TrainingArguments | None,
    config: SplitConfig,
    clients: FederatedDataset | None,
    trainer_kwargs: Mapping[str, Any],
) -> None:
    """
    Reject arguments that a split trainer does not support.

    Args:
        args (`TrainingArguments`, *optional*): The training arguments.
        config ([`SplitConfig`]): The configuration.
        clients ([`FederatedDataset`], *optional*): The training datasets of the clients.
        trainer_kwargs (`Mapping[str, Any]`): Further arguments of the trainer.

    Raises:
        ValueError: If an argument is not supported. The message names an alternative.
    """
    if trainer_kwargs.get("federation") is not None:
        raise ValueError(
            "`federation` configures rounds, which a split trainer does not have. Pass `split`. Set "
            "`encryption` of SplitConfig in place of secure aggregation."
        )
    if trainer_kwargs.get("model_init") is not None:
        raise ValueError("`model_init` is not supported by a split trainer. Pass `model` instead.")
    if trainer_kwargs.get("optimizer_cls_and_kwargs") is not None:
        check_optimizer_class(*trainer_kwargs["optimizer_cls_and_kwargs"])
    if any(part is not None for part in trainer_kwargs.get("optimizers") or ()):
        raise ValueError(
            "`optimizers` has one optimizer, but every party needs its own optimizer. Use `optim` and `learning_rate` "
            "of the training arguments, or `optimizer_cls_and_kwargs`."
        )
    if trainer_kwargs.get("compute_loss_func") is not None and config.strategy == "client_batch":
        raise ValueError(
            "`compute_loss_func` is not supported with strategy='client_batch', because the clients' models must "
            "count target tokens. Override `compute_loss` and pass the labels to the model, or use another strategy."
        )
    for client_id, num_rows in ({} if clients is None else clients.num_rows).items():
        if num_rows is None:
            raise ValueError(
                f"The dataset of client {client_id!r} is a stream, so the client's number of steps is not known. Pass "
                "a dataset with a length."
            )
    if args is not None:
        _check_training_arguments(args, config)


def _check_training_arguments(args: TrainingArguments, config: SplitConfig) -> None:
    unsupported = [
        (args.world_size > 1 or args.n_gpu > 1, "several processes or GPUs", "one process with one GPU"),
        (args.fp16, "fp16=True", "bf16=True, because several parties cannot share one loss scale"),
        (
            bool(args.deepspeed or args.fsdp),
            "deepspeed and fsdp",
            "one process, because the parts have several owners",
        ),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "a per_device_train_batch_size that fits in memory"),
        (args.torch_compile, "torch_compile=True", "False, because the exchange of messages breaks the graph"),
        (
            args.lr_scheduler_type in _METRIC_SCHEDULES,
            f"lr_scheduler_type={args.lr_scheduler_type}",
            "another schedule",
        ),
        (
            _is_unsupported_optimizer(OptimizerNames(args.optim).value),
            f"optim={OptimizerNames(args.optim).value!r}",
            "an optimizer that steps with all parties and has no evaluation mode, such as 'adamw_torch'",
        ),
        (
            not args.accelerator_config.use_seedable_sampler,
            "use_seedable_sampler=False",
            "True, because the seed determines the order of each client's examples",
        ),
        (
            args.train_sampling_strategy not in ("random", "sequential"),
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "'random' or 'sequential'",
        ),
        (
            bool(args.label_smoothing_factor) and config.strategy == "client_batch",
            "label_smoothing_factor with strategy='client_batch'",
            "no smoothing, because the server weights clients by their target tokens",
        ),
    ]
    for is_unsupported, argument, alternative in unsupported:
        if is_unsupported:
            raise ValueError(f"A split trainer does not support {argument}. Use {alternative}.")


def check_sampling(trainer_class: type, mixin: type) -> None:
    """
    Reject a trainer class that overrides the sampling of training examples.

    Args:
        trainer_class (`type`): The class of a split trainer.
        mixin (`type`): The mixin that split trainers derive from.

    Raises:
        TypeError: If the class overrides a sampling method.
    """
    if overridden := find_overrides(trainer_class, mixin, _SAMPLING_METHODS):
        raise TypeError(
            f"{overridden[0]} overrides the sampling of training examples, which a split trainer plans for all "
            "clients together. Use train_sampling_strategy, or sort each client's dataset beforehand."
        )


def find_overrides(trainer_class: type, mixin: type, names: Iterable[str]) -> list[str]:
    """
    Return the methods that a trainer class overrides.

    Args:
        trainer_class (`type`): The class of a split trainer.
        mixin (`type`): The mixin that split trainers derive from.
        names (`Iterable[str]`): Names of methods of `Trainer`.
    """
    owners = [owner for owner in trainer_class.__mro__ if owner not in (*mixin.__mro__, Trainer)]
    return [f"{owner.__name__}.{name}" for owner in owners for name in names if name in vars(owner)]


def check_trainer_class(trainer_class: type) -> None:
    """
    Reject trainers of TRL other than `SFTTrainer`.

    Raises:
        TypeError: If the class is such a trainer.
        ImportError: If the class is `SFTTrainer` of an old version of TRL.
    """
    trl_classes = _trl_base_classes(trainer_class)
    if trl_classes and trl_classes[0].__name__ != "SFTTrainer":
        raise TypeError(
            f"{trl_classes[0].__name__} cannot be split, because split clients have no reference model and no reward. "
            "Use federate(), or split SFTTrainer."
        )
    if trl_classes:
        check_trl_splits_sft_trainer()


def accepts_model_name(trainer_class: type) -> bool:
    """Whether a trainer accepts the name of a model instead of a model, as the trainers of TRL do."""
    return bool(_trl_base_classes(trainer_class))


def _trl_base_classes(trainer_class: type) -> list[type]:
    return [owner for owner in trainer_class.__mro__ if owner.__module__.partition(".")[0] == "trl"]


def check_forward(trainer_class: type, model: SplitModel) -> None:
    """
    Remove or reject a forward method that the trainer's constructor set on the model.

    The models of other clients lack this method.

    Raises:
        TypeError: If the trainer is not TRL's `SFTTrainer`. [`SplitModel`] implements the outputs that `SFTTrainer`
            needs.
    """
    if "forward" not in vars(model):
        return
    if not _trl_base_classes(trainer_class):
        raise TypeError(
            f"The constructor of {trainer_class.__name__} replaces the forward method of the model. The models of "
            "other clients would lack it. Override `compute_loss` instead."
        )
    del model.forward


def check_gradients(trainer_class: type, model: SplitModel) -> None:
    """
    Reject a loss that is computed from `trainer.model` instead of the client's model.

    Raises:
        ValueError: If the clients' blocks of the full model have gradients. No optimizer updates these blocks.
    """
    parts = (model.client_head, model.client_tail)
    if any(parameter.grad is not None for part in parts for parameter in part.parameters()):
        raise ValueError(
            f"The loss of {trainer_class.__name__} has gradients in `self.model`, which is not trained. Compute the "
            "loss from the `model` argument of compute_loss(), which is the model of the client."
        )


def check_revision(args: TrainingArguments | None, trainer_kwargs: Mapping[str, Any]) -> None:
    """
    Reject a model revision without a tokenizer. The parent class would load the tokenizer of the main branch.

    Raises:
        ValueError: If `model_init_kwargs` has a revision, and `processing_class` is missing.
    """
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision")
    if revision is not None and trainer_kwargs.get("processing_class") is None:
        raise ValueError(
            f"The model has revision {revision!r}, but `processing_class` is missing. Pass the tokenizer of this "
            "revision."
        )


def check_optimizer_class(optimizer_class: type, settings: Mapping[str, Any]) -> None:
    """
    Reject an optimizer class that cannot be created for each party or that cannot step together with other optimizers.

    Raises:
        ValueError: If the arguments name parameters or a model, or the optimizer has training and evaluation modes.
    """
    if reserved := sorted({"params", "model", "optimizer_dict"} & settings.keys()):
        raise ValueError(
            f"`optimizer_cls_and_kwargs` has {reserved[0]!r}, which differs between the parties. Leave it out."
        )
    if hasattr(optimizer_class, "train"):
        raise ValueError(
            f"{optimizer_class.__name__} has training and evaluation modes, which are not supported by a split "
            "trainer. Use another optimizer."
        )


def _is_unsupported_optimizer(optim: str) -> bool:
    """Whether an optimizer steps during the backward pass, or uses different weights in evaluation and training."""
    return optim in ("lomo", "adalomo") or optim.endswith("_layerwise") or optim.startswith("schedule_free")


def check_loss(model: SplitModel, args: TrainingArguments, config: SplitConfig) -> None:
    """
    Reject label smoothing over the wrong tokens, and a loss whose target tokens cannot be counted.

    Raises:
        ValueError: If labels are smoothed, and `Trainer` does not recognize the model as a causal language model. With
            `"client_batch"` also if the model has a custom loss function.
    """
    name = model._get_name()
    if args.label_smoothing_factor and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor}, but Trainer does not recognize {name} as a causal "
            "language model and would not shift the labels by one token. Set it to 0, or override `compute_loss`."
        )
    if config.strategy == "client_batch" and LOSS_FUNCTION in vars(model.client_tail.model):
        raise ValueError(
            "The model has a custom `loss_function`, which is not supported with strategy='client_batch', because the "
            "server weights clients by their target tokens. Use another strategy."
        )


def check_averaging_period(config: SplitConfig, steps: SplitSteps, max_steps: int) -> None:
    """
    Warn if most averages include the parts of a single client only.

    Args:
        config ([`SplitConfig`]): The configuration.
        steps ([`SplitSteps`]): The steps of an epoch.
        max_steps (`int`): Number of optimizer steps of the run.
    """
    if config.average_every is None or steps.num_clients == 1:
        return
    num_single, num_periods = steps.count_single_client_periods(config.average_every, max_steps)
    if num_single > num_periods / 2:
        logger.warning(
            f"With average_every={config.average_every} a single client trains in {num_single} of the {num_periods} "
            "averaging periods of an epoch. All clients then continue with the parts of this client, and nothing is "
            "averaged. Lower steps_per_turn, or raise average_every."
        )


def select_own_dataset(client_id: str, train_dataset: Any) -> dict[str, Any]:
    """
    Return the training dataset of a client of a networked run, by client id.

    Raises:
        ValueError: If `train_dataset` is a mapping with other clients.
    """
    if not isinstance(train_dataset, Mapping):
        return {client_id: train_dataset}
    if list(train_dataset) != [client_id]:
        raise ValueError(
            f"train_dataset has the clients {sorted(train_dataset)}, but this is client {client_id!r} of a networked "
            "run. Pass the dataset of this client only."
        )
    return {client_id: train_dataset[client_id]}


def check_same_run(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """
    Reject a checkpoint of another run.

    Args:
        state (`Mapping[str, Any]`): The state of the run in the checkpoint.
        expected (`Mapping[str, Any]`): The values of this run, by their names in `state`.

    Raises:
        ValueError: If a value differs.
    """
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(
                f"The checkpoint belongs to a run with {name}={state.get(name)}, but this run has {value}. Resume "
                "with the settings of the checkpoint, or start a new run in another output directory."
            )
