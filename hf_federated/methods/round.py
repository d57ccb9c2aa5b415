"""`Round`: the values of a round on the server, and the messages to its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse

from transformers.utils import logging

from ..messages import Message
from ..utils.errors import RoundFailedError
from ..utils.weighted_mean import State
from .accumulator import Accumulator


logger = logging.get_logger(__name__)

MessageFor = Callable[[str], Message]
# `exchange(phase, clients, message_for)` sends each client its message and returns the replies by client id.
ExchangeMessages = Callable[[str, Sequence[str], MessageFor], dict[str, Message]]


def _no_engine(phase: str, clients: Sequence[str], message_for: MessageFor) -> dict[str, Message]:
    raise RuntimeError(f"The {phase} phase needs an engine, but this Round was built without one.")


@dataclass
class Round:
    """
    A round on the server. The server half of a method and callbacks receive it.

    Use it to read which clients take part and which were rejected, and to add values to the log of the round.

    Args:
        number (`int`): Number of the round, from 0.
        cohort (`tuple[str, ...]`): Ids of the clients that are sampled in this round, in order.
        state (`dict[str, torch.Tensor]`): The global state. Before [`Method.finish`], it is the state that the clients
            receive, and afterwards the aggregated state. A distillation replaces it in [`Method.after`].
        min_clients (`int`, *optional*, defaults to `1`): Smallest number of clients with which the round succeeds.
        sums ([`Accumulator`], *optional*): In [`Method.accept`], the sums to add the update to. They contain only
            some of the updates. After the updates are collected, the sums of all accepted updates of all processes.
        metrics (`dict[str, dict[str, float]]`): Metrics of each accepted client, including `num_examples`,
            `num_tokens` and `num_steps`. Empty until the updates are collected.
        rejected (`dict[str, str]`): Clients that failed or whose update was rejected, with the reason.
        logs (`dict[str, float]`): Values for the log of the round.
        exchange (`Callable`, *optional*): Sends messages to clients and returns their replies.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import Round

    >>> round = Round(0, ("north", "south"), {"w": torch.zeros(1)})
    >>> round.exclude("south", "no reply")
    >>> round.clients
    ('north',)
    ```
    """

    number: int
    cohort: tuple[str, ...]
    state: State
    min_clients: int = 1
    sums: Accumulator | None = None
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    exchange: ExchangeMessages = field(default_factory=lambda: _no_engine)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients of the cohort that are not rejected, in order."""
        return tuple(filterfalse(self.rejected.__contains__, self.cohort))

    @property
    def collected(self) -> Accumulator:
        """
        The sums of all accepted updates.

        Raises:
            RuntimeError: If the updates are not collected yet.
        """
        if self.sums is None:
            raise RuntimeError(f"Round {self.number + 1}: the updates of the clients are not collected yet.")
        return self.sums

    def ask(self, phase: str, message_for: MessageFor, clients: Sequence[str] | None = None) -> dict[str, Message]:
        """
        Send a message to each client, and wait for the replies.

        Args:
            phase (`str`): Name of the phase, for the log and for errors.
            message_for (`Callable[[str], Message]`): Returns the message of a client. Its class is one of `messages`
                of the method.
            clients (`Sequence[str]`, *optional*): Ids of the clients. Defaults to [`~Round.clients`].

        Returns:
            `dict[str, Message]`: The replies by client id, in the order of the clients. A client that fails has a
            [`ClientFailure`]. When fewer than `min_clients` clients can still reply, the server sends no further
            messages, and the remaining clients have no entry.
        """
        return self.exchange(phase, self.clients if clients is None else clients, message_for)

    def exclude(self, client_id: str, reason: str) -> None:
        """
        Exclude a client from the rest of the round.

        Args:
            client_id (`str`): Id of the client.
            reason (`str`): The reason, for the log and for callbacks.
        """
        logger.warning(f"Excluded from the round: {reason}")
        self.rejected[client_id] = reason
        self.metrics.pop(client_id, None)

    def check_enough(self) -> None:
        """
        Check that enough clients are left.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients are left.
        """
        if len(self.clients) < self.min_clients:
            reason = next(reversed(self.rejected.values()), "the cohort is too small")
            raise RoundFailedError(
                f"Round {self.number + 1}: {len(self.clients)} of {len(self.cohort)} clients are left, and "
                f"min_clients={self.min_clients}. The last failure: {reason}"
            )
