"""`ClaimLimits`: limits of what the updates of each client may claim."""

from __future__ import annotations

import dataclasses

from transformers import TrainingArguments

from .._compat import num_repeats, train_tokens
from ..clients.limits import examples_per_step, max_input_length, update_limits
from ..clients.sampling import limit_examples
from ..messages import Announcement
from ..messages.validation import InvalidUpdateError, UpdateLimits
from .setup import FederationSetup


class ClaimLimits:
    """
    Limits of what an update of a client may claim, from its number of examples and the training arguments.

    With `secure_aggregation` there are none: the server sees no update, and `max_weight` limits the weights.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
        num_examples (`dict[str, int | None]`): Number of examples of each client. The number of a client on another
            machine that joins after the start of the run is added.
    """

    def __init__(self, setup: FederationSetup, args: TrainingArguments, num_examples: dict[str, int | None]) -> None:
        self._setup, self._args, self._num_examples = setup, args, num_examples
        self._num_repeats = num_repeats(args)

    def __call__(self, client_id: str, max_rows: int | None) -> UpdateLimits:
        """
        Return the limits of a client in a round.

        Args:
            client_id (`str`): Id of the client.
            max_rows (`int`, *optional*): Number of examples that the client trains on in the round at most.

        Raises:
            InvalidUpdateError: If the client announced a stream, and the settings do not bound its training.
        """
        setup = self._setup
        if setup.hides_counts:
            return UpdateLimits()
        if (announced := setup.engine.announcement(client_id)) is not None:
            return self._of_announcement(client_id, announced, max_rows)
        num_examples = self._num_examples[client_id]
        if setup.train_datasets is not setup.clients and num_examples is not None:
            # A preparation may pack examples or cut them in parts.
            num_examples = len(setup.train_datasets[client_id])
        spec = setup.participants.clients.get(client_id)
        args = self._args if spec is None or spec.args is None else spec.args
        return self._limits(num_examples, max_rows, examples_per_step(args, setup.processes.world_size))

    def _of_announcement(self, client_id: str, announced: Announcement, max_rows: int | None) -> UpdateLimits:
        distillation = self._setup.distillation
        if self._num_examples[client_id] is None:
            self._num_examples[client_id] = announced.num_examples
        if announced.num_examples is None and self._setup.config.local_steps is None:
            raise InvalidUpdateError(
                f"Client {client_id!r}: it announced a stream, whose epoch has no length. Set `local_steps`, or leave "
                "this client out."
            )
        limits = self._limits(announced.num_encoded_examples, max_rows, announced.examples_per_step)
        if distillation is None or not distillation.reports_class_counts:
            return limits
        return dataclasses.replace(limits, class_counts=tuple(announced.class_counts or ()))

    def _limits(self, num_examples: int | None, max_rows: int | None, step_size: int) -> UpdateLimits:
        config, trainer = self._setup.config, self._setup.trainer
        # A trainer of TRL counts the tokens of all sequences that it generates for an example.
        has_own_count = train_tokens(trainer) is not None and self._setup.aggregation.weighting != "tokens"
        return update_limits(
            None if num_examples is None else limit_examples(num_examples, max_rows),
            config.local_epochs,
            config.local_steps,
            step_size,
            None if has_own_count else max_input_length(trainer),
            self._num_repeats,
        )
