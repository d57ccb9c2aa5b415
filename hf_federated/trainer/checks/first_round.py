"""Checks of what would otherwise fail, or have no effect, in the first round: before any client trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from ...clients.failures import read_columns
from ...config import FederatedConfig
from ...data import FederatedDataset
from ...tasks import Task
from ...utils.due_steps import DEFAULT_STEPS, describe_undue_steps, warn_once
from ...utils.optimizer_packages import check_optimizer_package
from ...utils.storage import check_free_space, size_of_folder
from ..checkpoint import list_checkpoints, size_of_trained


# Packages whose trainers and callbacks add no metrics to an evaluation.
KNOWN_PACKAGES = ("transformers", "hf_federated")
# Names of the metrics of `Trainer.evaluate` without `compute_metrics`, after the prefix `eval_`.
PLAIN_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second")
_FURTHER_METRICS = ("model_preparation_time", "jit_compilation_time", "mem_")


def check_first_round(trainer: Any, config: FederatedConfig, clients: FederatedDataset, task: Task | None) -> None:
    """
    Check arguments of a trainer that only the first round or a later round reads.

    Args:
        trainer (`transformers.Trainer`): The federated trainer, constructed as its parent class.
        config ([`FederatedConfig`]): The configuration, with the number of rounds.
        clients ([`FederatedDataset`]): Training examples by client.
        task ([`Task`], *optional*): The task that encodes raw examples later.

    Raises:
        ImportError: If the package of the optimizer is not installed.
        ValueError: If no metric is `metric_for_best_model`, if the examples have no column that the task reads, or if
            the model reads no column of the examples.
    """
    if (text := describe_undue_steps(trainer.args, config.num_rounds or 1)) is not None:
        warn_once(text)
    check_best_metric(trainer)
    if clients.is_remote:
        return  # Each client checks its own optimizer and examples.
    if not _overrides(trainer, "create_optimizer", "get_optimizer_cls_and_kwargs") and not _has_optimizer(trainer):
        check_optimizer_package(OptimizerNames(trainer.args.optim).value)
    if task is not None:
        check_task_columns(task, clients)
    elif not trainer.prepares_data():
        check_read_columns(trainer, clients)


def check_best_metric(trainer: Trainer) -> None:
    """
    Refuse a `metric_for_best_model` that no evaluation of the trainer can have.

    With `compute_metrics`, or with a trainer or a callback that can add metrics, the names are known after the first
    evaluation only.

    Raises:
        ValueError: If there is no such metric. The message lists the metrics.
    """
    args, dataset = trainer.args, trainer.eval_dataset
    if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO:
        return
    can_add = trainer.compute_metrics is not None or _overrides(trainer, "evaluate", "evaluation_loop", "log")
    if can_add or any(map(_is_own, map(type, trainer.callback_handler.callbacks))):
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    prefixes = [f"{split}_" for split in dataset] if isinstance(dataset, Mapping) else [""]
    known = [f"{prefix}{metric}" for prefix in prefixes for metric in PLAIN_METRICS]
    if name in known or any(
        name.startswith(f"{prefix}{metric}") for prefix in prefixes for metric in _FURTHER_METRICS
    ):
        return
    raise ValueError(
        f"metric_for_best_model={args.metric_for_best_model!r}, but without `compute_metrics` an evaluation has the "
        f"metrics {', '.join(known)}. Pass `compute_metrics`, or set `metric_for_best_model` to one of these."
    )


def check_task_columns(task: Task, clients: FederatedDataset) -> None:
    """
    Refuse raw examples without a column that the task reads. The first round would encode them.

    Raises:
        ValueError: If a column is missing. The message lists the columns.
    """
    columns = clients.column_names
    for column in task.columns if columns else ():
        if column not in columns:
            raise ValueError(
                f"The clients' data has the columns {', '.join(columns)}, but {type(task).__name__} reads the column "
                f"{column!r}. Set the name of the column in the task, or call "
                f"`clients.rename_column({columns[0]!r}, {column!r})`."
            )


def check_read_columns(trainer: Trainer, clients: FederatedDataset) -> None:
    """
    Refuse examples of which the trainer would remove all columns, because the model reads none of them.

    Raises:
        ValueError: If the model reads no column.
    """
    columns = clients.column_names  # empty if a client has a dataset of torch, or a stream of unknown columns
    if not columns or not trainer.args.remove_unused_columns:
        return
    if _overrides(trainer, "_remove_unused_columns", "get_train_dataloader"):
        return
    read = read_columns(trainer)
    if read and set(read).isdisjoint(columns):
        raise ValueError(
            f"The clients' data has the columns {', '.join(columns)}, of which {type(trainer.model).__name__} reads "
            f"none: its `forward` has the arguments {', '.join(read)}. Rename the columns, or pass encoded examples. "
            "If the data collator reads the columns, set remove_unused_columns=False in the training arguments."
        )


def check_checkpoint_space(trainer: Trainer, num_rounds: int) -> None:
    """
    Check the free disk space before the first round.

    A checkpoint has at least the trained parameters. A new checkpoint is complete before an old one is deleted.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        num_rounds (`int`): Number of rounds of the run.

    Raises:
        StorageError: If the disk has no space for one checkpoint. A warning is logged if it has no space for the
            checkpoints of `save_total_limit`.
    """
    args = trainer.args
    if not args.should_save or args.save_strategy == SaveStrategy.NO:
        return
    num_saves = num_checkpoints(args, num_rounds)
    limit = args.save_total_limit or 0
    kept = min(num_saves, limit + 1) if limit > 0 else num_saves
    folder = args.output_dir or ""
    # The checkpoints of an earlier run are deleted, or belong to the resumed run.
    existing = sum(map(size_of_folder, list_checkpoints(folder)))
    warning = check_free_space(folder, size_of_trained(trainer.model), kept, limit, existing)
    if warning is not None:
        warn_once(warning)


def num_checkpoints(args: TrainingArguments, num_rounds: int) -> int:
    """Return the number of checkpoints that a run saves at least, without `save_total_limit`."""
    if args.save_strategy == SaveStrategy.EPOCH:
        return num_rounds
    if args.save_strategy != SaveStrategy.STEPS:
        return 1
    steps = 1 if args.save_steps == DEFAULT_STEPS else args.save_steps
    if steps < 1:
        steps = max(round(num_rounds * steps), 1)
    return -(-num_rounds // int(steps))  # The last round is always saved.


def _overrides(trainer: Trainer, *methods: str) -> bool:
    """Whether a class of another package than transformers and this one defines one of the methods."""
    return any(method in vars(base) for base in type(trainer).__mro__ if _is_own(base) for method in methods)


def _is_own(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] not in (*KNOWN_PACKAGES, "builtins", "abc", "typing", "accelerate")


def _has_optimizer(trainer: Any) -> bool:
    """Whether the user passed functions or a class that build the optimizer."""
    return not trainer._optimizer_factories.is_empty or trainer.optimizer_cls_and_kwargs is not None
