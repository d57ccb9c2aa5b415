"""Checks of the clients of a networked run. The errors name alternatives."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from .checks import find_overrides
from .config import SplitConfig
from .messages import Join


# Methods of `Trainer` that create optimizers.
_OPTIMIZER_METHODS = (
    "create_optimizer",
    "create_scheduler",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
)
# Largest number of steps in an epoch that a client may report.
MAX_STEPS_PER_EPOCH = 10_000_000


def check_networked_evaluation(
    args: TrainingArguments, config: SplitConfig, steps_per_client: Mapping[str, int] | None = None
) -> None:
    """
    Reject evaluations during a networked run in which other clients could update the server's body.

    An evaluation of a client delays the steps in which this client takes part. It does not delay other steps.

    Args:
        args (`transformers.TrainingArguments`): Training arguments of the client.
        config ([`SplitConfig`]): The configuration.
        steps_per_client (`Mapping[str, int]`, *optional*): Steps of every client in an epoch, if they are known.

    Raises:
        ValueError: If the training arguments request such evaluations.
    """
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end=True is not supported in a networked run, because the clients have different "
            "results. Set it to False."
        )
    if config.strategy == "serial" and args.eval_strategy != IntervalStrategy.NO:
        raise ValueError(
            "A client of a networked run with strategy='serial' cannot evaluate during training, because another "
            "client updates the server's body meanwhile. Set eval_strategy='no', and evaluate after training."
        )
    if args.eval_strategy == IntervalStrategy.STEPS and len(set((steps_per_client or {}).values())) > 1:
        raise ValueError(
            "The clients have different numbers of steps in an epoch "
            f"({', '.join(f'{name}: {steps}' for name, steps in (steps_per_client or {}).items())}). While a client "
            "without remaining steps evaluates, other clients update the server's body. Set eval_strategy='epoch' or "
            "'no'."
        )


def check_networked_optimizer(trainer: Trainer, mixin: type) -> None:
    """
    Reject a custom optimizer of a client. The server of a networked run could not use the same optimizer for its body.

    Args:
        trainer (`transformers.Trainer`): A split trainer.
        mixin (`type`): The mixin that split trainers derive from.

    Raises:
        ValueError: If the trainer has `optimizer_cls_and_kwargs` or overrides a method that creates optimizers.
    """
    overrides = find_overrides(type(trainer), mixin, _OPTIMIZER_METHODS)
    if trainer.optimizer_cls_and_kwargs is not None:
        overrides.append("optimizer_cls_and_kwargs")
    if overrides:
        raise ValueError(
            f"{overrides[0]} of a client is not supported in a networked run, because the server creates its "
            "optimizer from the training arguments. Use `optim`, `optim_args` and `lr_scheduler_type`."
        )


def check_join(message: Join, digest: str) -> None:
    """
    Reject a client that cannot take part in a run.

    Args:
        message ([`Join`]): The message of the client.
        digest (`str`): Digest of the settings that all parties share.

    Raises:
        ValueError: If the settings differ, or the number of steps in an epoch is 0 or too large.
    """
    if message.digest != digest:
        raise ValueError(
            "The settings of client and server differ (model, split, training or adapter). Their digests are "
            f"{message.digest[:12]!r} and {digest[:12]!r}. Use the same recipe on both."
        )
    if not message.num_steps:
        raise ValueError(
            f"Client {message.client_id!r} has 0 steps in an epoch, because it has too few examples for a step. Add "
            "examples, or lower the batch size."
        )
    if message.num_steps > MAX_STEPS_PER_EPOCH:
        raise ValueError(
            f"Client {message.client_id!r} reports {message.num_steps} steps in an epoch, but at most "
            f"{MAX_STEPS_PER_EPOCH} are supported."
        )
