"""The evaluation of a client with the trainer of the federation."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from ..messages import Evaluate, Metrics
from ..utils.random import preserved_generators
from .local_training import LocalTraining, local_trainer, preserved_process_state


def evaluate(outer: Trainer, args: TrainingArguments, message: Evaluate, dataset: Any, has_own_model: bool) -> Metrics:
    """
    Evaluate the model of a trainer on the examples of a client.

    Args:
        outer (`transformers.Trainer`): The trainer, whose model has the state to evaluate.
        args (`TrainingArguments`): Arguments of the client.
        message ([`Evaluate`]): The request.
        dataset (`datasets.Dataset`): The examples.
        has_own_model (`bool`): Whether the model belongs to the client alone.
    """
    local = LocalTraining(message.round, num_rounds=1, global_schedule=False, parameters={})
    trainer: Any = local_trainer(outer, args, None, local, [])
    # `bf16_full_eval` permanently casts the model unless the trainer is in training.
    trainer.is_in_train = trainer.is_in_train or has_own_model
    with preserved_process_state(outer), preserved_generators():
        metrics = trainer.evaluate(dataset)
    # TRL reports the number of training tokens of the run as `eval_num_tokens`, which a client does not know.
    metrics.pop("eval_num_tokens", None)
    values = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return Metrics(message.round, message.client_id, num_examples=len(dataset), metrics=values)
