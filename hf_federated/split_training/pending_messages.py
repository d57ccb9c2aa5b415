"""State of the pending messages on the server of a networked run.

- [`StepProgress`]: The micro-batches that each client announced for a step, and which of them arrived.
- [`RequestBatch`]: Requests of several clients that the server answers together.

For each micro-batch a client sends hidden states and then their gradient. After the last micro-batch it ends the
step. The server rejects any other order at once. With `"client_batch"` all clients would otherwise wait for a client
that skips a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..split.messages import Backward, Forward
from .config import SplitConfig
from .messages import BeginStep, EndStep


# Answers the requests of several clients, in their order.
BatchHandler = Callable[[Sequence[Any]], Sequence[Any]]


class StepProgress:
    """
    Progress of the clients within one optimizer step.

    Args:
        config ([`SplitConfig`]): The strategy, and the number of micro-batches in flight: the server keeps the
            activations of as many micro-batches of a client. With `"client_batch"`, all clients send the messages of a
            step in one order: the hidden states of a window of micro-batches, their gradients, and then the next
            window.
        max_batches (`int`): Largest number of micro-batches of a client in a step.
    """

    def __init__(self, config: SplitConfig, max_batches: int) -> None:
        self._window = config.micro_batches_in_flight
        self._is_batched = config.strategy == "client_batch"
        self._max_batches = max_batches
        self._announced: dict[str, BeginStep] = {}
        # For each client: the examples of its micro-batches in order, and the micro-batches with a gradient.
        self._num_examples: dict[str, list[int]] = {}
        self._with_gradient: dict[str, set[int]] = {}

    def begin(self, message: BeginStep) -> None:
        """
        Record that a client takes part in the step.

        Raises:
            ValueError: If the client began this step before, or announces more micro-batches than a step has.
        """
        if message.client_id in self._announced:
            raise ValueError(f"Client {message.client_id!r} began step {message.step} twice.")
        if message.num_batches > self._max_batches:
            raise ValueError(
                f"Client {message.client_id!r} began step {message.step} with {message.num_batches} micro-batches, "
                f"but gradient_accumulation_steps is {self._max_batches}."
            )
        self._announced[message.client_id] = message

    def may_send(self, client_id: str, micro_step: int) -> bool:
        """Whether a client may send a micro-batch: it announced the micro-batch, or did not begin the step yet."""
        return client_id not in self._announced or self._announced[client_id].num_batches > micro_step

    def num_examples(self, client_id: str) -> int:
        """Number of examples of a client in the step."""
        return self._announced[client_id].num_rows

    def check(self, message: Forward | Backward | EndStep) -> None:
        """
        Reject a message that does not follow the announced sequence.

        Raises:
            ValueError: If the client did not begin the step, or sends more messages than announced, fewer messages, or
                messages in another order.
        """
        client_id, announced = message.client_id, self._announced.get(message.client_id)
        if announced is None:
            raise ValueError(
                f"Client {client_id!r} sent a message of step {message.step}, but did not begin this step."
            )
        announcement = f"Client {client_id!r} began step {message.step} with"
        num_examples, with_gradient = self._num_examples.get(client_id, []), self._with_gradient.get(client_id, set())
        if isinstance(message, EndStep):
            if not len(num_examples) == len(with_gradient) == announced.num_batches:
                raise ValueError(
                    f"{announcement} {announced.num_batches} micro-batches, but ended it after {len(num_examples)}, "
                    f"{len(with_gradient)} of them with a gradient. Compute the loss of every batch from the output "
                    "of the model, and run its backward pass."
                )
            if announced.num_rows > sum(num_examples):
                raise ValueError(
                    f"{announcement} {announced.num_rows} examples, but sent {sum(num_examples)}. The loss must call "
                    "the model on all examples of a batch."
                )
        elif message.micro_step >= announced.num_batches:
            raise ValueError(
                f"{announcement} {announced.num_batches} micro-batches, but sent another one. The loss must call the "
                "model once per batch."
            )
        elif isinstance(message, Forward):
            if message.micro_step != len(num_examples):
                raise ValueError(
                    f"Client {client_id!r} sent micro-batch {message.micro_step} at step {message.step}, but "
                    f"micro-batch {len(num_examples)} is next."
                )
            num_required = message.micro_step - self._window + 1
            if self._is_batched:
                num_required = message.micro_step // self._window * self._window
            if len(with_gradient) < num_required:
                raise ValueError(
                    f"Client {client_id!r} sent micro-batch {message.micro_step} at step {message.step} before the "
                    f"gradients of the previous micro-batches. At most {self._window} micro-batches are in flight."
                )
        elif message.micro_step >= len(num_examples) or message.micro_step in with_gradient:
            raise ValueError(
                f"Client {client_id!r} sent a gradient of micro-batch {message.micro_step} at step {message.step}, "
                "but no such micro-batch waits for a gradient."
            )
        elif self._is_batched:
            first = message.micro_step // self._window * self._window
            expected = min(first + self._window, announced.num_batches)
            if message.micro_step != len(with_gradient) or len(num_examples) < expected:
                raise ValueError(
                    f"Client {client_id!r} sent the gradient of micro-batch {message.micro_step} at step "
                    f"{message.step}, but must first send the micro-batches before {expected} and the gradients of "
                    "the earlier ones."
                )

    def has_all_gradients(self, client_id: str) -> bool:
        """Whether the gradients of all announced micro-batches of a client were answered."""
        announced = self._announced.get(client_id)
        # The step may have ended without the client during the computation.
        return announced is not None and len(self._with_gradient.get(client_id, ())) == announced.num_batches

    def record(self, message: Forward | Backward) -> None:
        """Record a message that was answered."""
        if isinstance(message, Forward):
            self._num_examples.setdefault(message.client_id, []).append(message.num_sequences)
        else:
            self._with_gradient.setdefault(message.client_id, set()).add(message.micro_step)


@dataclass
class RequestBatch:
    """
    Requests of one kind, at most one per client, that the server answers together.

    Args:
        started_at (`float`, *optional*): Time from which the deadline counts, in seconds of `time.monotonic()`.
        messages (`dict[str, Any]`, *optional*): The requests, by client id.
        is_running (`bool`, *optional*, defaults to `False`): Whether a thread computes the answers.
        answers (`dict[str, Any]`, *optional*): The answers, by client id, or the error that each client receives.
            `None` until they are computed. Without the clients that are late or were removed.
    """

    started_at: float = field(default_factory=time.monotonic)
    messages: dict[str, Any] = field(default_factory=dict)
    is_running: bool = False
    answers: dict[str, Any] | None = None


def repeated_error(client_id: str, kind: str, message: Any) -> ValueError:
    """Return the error of a client that sends a message again, whose kind is `kind`."""
    number = getattr(message, "micro_step", 0)
    return ValueError(f"Client {client_id!r} sent {kind} {number} of step {message.step} twice.")
