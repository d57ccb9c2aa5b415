"""The lines at INFO that announce the training of a federation. They replace the lines of `Trainer`.

`Trainer` would announce the loop over rounds, in which a step is a round without gradient accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_model_param_count
from transformers.utils import logging

from ..clients import RowLimit
from ..clients.sampling import limit_examples
from .setup import FederationSetup


# A child of the logger of transformers, as for the lines about clients (`server/progress.py`).
logger = logging.get_logger("transformers.hf_federated")


def announce(setup: FederationSetup, args: TrainingArguments, round: int, row_limit: RowLimit) -> None:
    """
    Announce a training.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
        round (`int`): The next round, from 0. It is not 0 if the training resumes from a checkpoint.
        row_limit ([`RowLimit`]): Limits the number of examples that a client trains on.
    """
    if logger.isEnabledFor(logging.INFO):
        for line in _lines(setup, args, round, row_limit):
            logger.info(line)


def _lines(setup: FederationSetup, args: TrainingArguments, round: int, row_limit: RowLimit) -> Iterator[str]:
    config, trainer = setup.config, setup.trainer
    next_round = min(round, setup.num_rounds - 1)  # The checkpoint of the last round may be resumed.
    cohort = setup.sampler(next_round)
    yield "***** Running federated training *****"
    if round:
        yield f"  Resuming after round {round}"
    yield f"  Num rounds = {setup.num_rounds:,}"
    yield f"  Num clients = {len(setup.clients):,}"
    yield f"  Num clients per round = {len(cohort):,}"
    num_rows, limit = setup.clients.num_rows, row_limit(cohort)
    unknown = "unknown (hidden)" if setup.hides_counts else "unknown (streams)"
    yield f"  Num examples of all clients = {_total(list(num_rows.values()), unknown)}"
    rows = [num_rows[client_id] for client_id in cohort]
    trained = [None if number is None else limit_examples(number, limit) for number in rows]
    yield f"  Num examples of the clients of round {next_round + 1} = {_total(trained, unknown)}"
    total_batch_size = trainer.get_total_train_batch_size(args)
    if config.local_steps is None:
        yield f"  Num local epochs = {config.local_epochs:,}"
        hides_steps = setup.hides_counts and None in trained
        steps = unknown if hides_steps else _num_steps(trained, config.local_epochs, args, total_batch_size)
        yield f"  Num local steps = {steps}"
    else:
        yield f"  Num local steps = {config.local_steps:,}"
    yield f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}"
    yield f"  Total train batch size of a client (w. parallel, distributed & accumulation) = {total_batch_size:,}"
    yield f"  Gradient Accumulation steps = {args.gradient_accumulation_steps:,}"
    own_arguments = sum(spec.args is not None for spec in setup.participants.clients.values())
    if own_arguments:
        yield f"  Num clients with their own training arguments = {own_arguments:,}"
    yield f"  Number of trainable parameters = {get_model_param_count(trainer.model, trainable_only=True):,}"
    if setup.aggregation.exchanges_parameters:
        yield f"  Number of exchanged values = {setup.exchange.num_values:,}"
    if setup.exchange.has_local:
        yield f"  Number of trained values that each client keeps = {setup.exchange.num_local_values:,}"


def _total(numbers: Sequence[int | None], unknown: str) -> str:
    known = [number for number in numbers if number is not None]
    return f"{sum(known):,}" if len(known) == len(numbers) else unknown


def _num_steps(
    num_rows: Sequence[int | None], local_epochs: int, args: TrainingArguments, total_batch_size: int
) -> str:
    """Smallest and largest number of optimizer steps of a client, as `Trainer` counts them."""
    batch_size = total_batch_size // args.gradient_accumulation_steps
    rounded = math.floor if args.dataloader_drop_last else math.ceil
    num_batches = [rounded((number or 0) / batch_size) for number in num_rows]
    steps = {local_epochs * max(math.ceil(number / args.gradient_accumulation_steps), 1) for number in num_batches}
    return f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
