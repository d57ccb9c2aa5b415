"""The algorithms of a federated trainer: those of the user's callbacks, else those that its configuration names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Trainer, TrainerCallback

from ..aggregation import Aggregation, LocalOnly, build_aggregation
from ..config import FederatedConfig
from ..distillation import Distillation, build_distillation
from ..postprocessing import Postprocessor, SendChanges
from ..server.callbacks import AggregationCallback, DistillationCallback
from .checks import check_not_averaged


def install_distillation(
    trainer: Trainer, users_callbacks: Sequence[TrainerCallback], config: FederatedConfig
) -> DistillationCallback | None:
    """
    The callback that runs the distillation, which the trainer then has.

    Args:
        trainer (`transformers.Trainer`): With the user's callbacks already.
        users_callbacks (`Sequence[TrainerCallback]`): As the user gave them.
        config ([`FederatedConfig`]): Names the algorithm if no callback brings one.

    Returns:
        [`DistillationCallback`], *optional*: `None` where nothing is distilled.
    """
    for callback in users_callbacks:
        if isinstance(callback, DistillationCallback):
            return callback
    algorithm = build_distillation(config.distillation, config.distillation_kwargs)
    if algorithm is None:
        return None
    callback = DistillationCallback(algorithm)
    trainer.add_callback(callback)
    return callback


def install_aggregation(
    trainer: Trainer,
    users_callbacks: Sequence[TrainerCallback],
    config: FederatedConfig,
    distillation: Distillation | None,
) -> Aggregation:
    """
    The algorithm that averages parameters, for which the trainer then has a callback.

    Args:
        trainer (`transformers.Trainer`): With the user's callbacks already.
        users_callbacks (`Sequence[TrainerCallback]`): As the user gave them.
        config ([`FederatedConfig`]): Names the algorithm if no callback brings one.
        distillation ([`Distillation`], *optional*): Beside it. Where no parameters come back, none are averaged.

    Raises:
        ValueError: If the configuration asks for an average of parameters that do not travel.
    """
    for callback in users_callbacks:
        if isinstance(callback, AggregationCallback):
            return callback.algorithm
    algorithm = build_aggregation(config.aggregation, config.aggregation_kwargs)
    if distillation is not None and not distillation.returns_parameters:
        check_not_averaged(algorithm, distillation)
        algorithm = LocalOnly()
    trainer.add_callback(AggregationCallback(algorithm))
    return algorithm


def exchange_dtype(config: FederatedConfig) -> torch.dtype | None:
    """The dtype in which parameters travel; `None` for their own."""
    return None if config.exchange_dtype is None else getattr(torch, config.exchange_dtype)


def algorithms_postprocessors(algorithm: Aggregation, config: FederatedConfig) -> list[Postprocessor]:
    """
    What the algorithm does between a client's training and the aggregate, behind the user's own steps.

    Args:
        algorithm ([`Aggregation`]): The algorithm that averages.
        config ([`FederatedConfig`]): Says in which dtype parameters travel.

    Raises:
        ValueError: If a dtype is asked for, and the algorithm packs what travels itself.
    """
    steps = algorithm.postprocessors()
    dtype = exchange_dtype(config)
    if dtype is None:
        return steps
    if steps:
        raise ValueError(
            f"exchange_dtype={config.exchange_dtype!r} does not work with {algorithm.name!r}, "
            "which packs what travels itself: leave it out."
        )
    return [SendChanges(dtype)]
