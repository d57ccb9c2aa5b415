"""The contract between the round and whatever runs the clients.

A [`Plan`] says which client gets which message; an engine delivers them, yields the replies in whatever order they
come, and counts the bytes of both directions. Sampling, seeds and everything else that an algorithm could depend on
are in the plan, so the same plan means the same result on every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..aggregation import Accumulator
from ..messages import Message
from ..messages.ledger import Ledger


T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """
    The work of one phase of one round.

    Args:
        round (`int`): Round number, from 0.
        cohort (`tuple[str, ...]`): Clients asked, in order.
        message_for (`Callable[[str], Message]`): Builds the message of a client when it is about to be sent, so that a
            large cohort does not mean as many messages in memory.
        phase (`str`, *optional*, defaults to `"training"`): What clients are asked to do, as it stands in an error.
    """

    round: int
    cohort: tuple[str, ...]
    message_for: Callable[[str], Message]
    phase: str = "training"


class Engine(ABC):
    """Delivers the messages of a plan and yields the replies."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        # The last exception behind a `ClientFailure`, where the engine has it, so that a failed round can show it.
        self.last_error: Exception | None = None

    def run(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> Iterator[Message]:
        """
        Execute a plan.

        Args:
            plan ([`Plan`]): The work.
            on_dispatch (`Callable[[str], None]`, *optional*): Called with a client's id when its message goes out.

        Yields:
            [`Message`]: A reply a client, in any order; a [`ClientFailure`] of those that failed. Clients that never
            answer are not waited for forever and yield nothing. Of an engine of several processes each yields some of
            the replies; [`~Engine.gather`] and [`~Engine.reduce`] bring together what was made of them.
        """

        def dispatch(client_id: str) -> Message:
            message = plan.message_for(client_id)
            self.ledger.record(plan.round, client_id, bytes_down=message.num_bytes)
            if on_dispatch is not None:
                on_dispatch(client_id)
            return message

        for client_id, reply in self._execute(plan, dispatch):
            self.ledger.record(plan.round, client_id, bytes_up=reply.num_bytes)
            yield reply
            del reply  # The next client trains before another takes its place.

    def collect(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> dict[str, Message]:
        """
        All replies to a plan, in every process.

        Args:
            plan ([`Plan`]): The work.
            on_dispatch (`Callable[[str], None]`, *optional*): As in [`~Engine.run`].

        Returns:
            `dict[str, Message]`: By client, in the order of the plan; without those that never answered.
        """
        replies = {reply.client_id: reply for reply in self.run(plan, on_dispatch)}
        return {client_id: replies[client_id] for client_id in plan.cohort if client_id in replies}

    def gather(self, plan: Plan, found: Mapping[str, T]) -> dict[str, T]:
        """
        What all processes found out about the clients of a plan, once its replies are through; the ledger then knows
        all of them too.

        Args:
            plan ([`Plan`]): What was run.
            found (`Mapping[str, T]`): By client; scalars and containers of them.

        Returns:
            `dict[str, T]`: By client, in the order of the plan.
        """
        return {client_id: found[client_id] for client_id in plan.cohort if client_id in found}

    def reduce(  # noqa: B027 - one process has nothing to do
        self,
        plan: Plan,
        accumulator: Accumulator,
        state: Mapping[str, torch.Tensor],
        extra: Mapping[str, torch.Tensor],
    ) -> None:
        """
        Let an accumulator hold what those of all processes hold together.

        Args:
            plan ([`Plan`]): Whose updates were added.
            accumulator ([`Accumulator`]): This process's.
            state (`Mapping[str, torch.Tensor]`): What an update's state looks like.
            extra (`Mapping[str, torch.Tensor]`): What an update's `extra` looks like.
        """

    @abstractmethod
    def _execute(self, plan: Plan, dispatch: Callable[[str], Message]) -> Iterator[tuple[str, Message]]:
        """Yield each client's reply; call `dispatch` for a client's message exactly when it is sent."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what clients keep and what was counted: a new run begins."""

    @abstractmethod
    def save(self, directory: Path) -> dict[str, str]:
        """
        Write into a checkpoint what clients keep. The directory exists and is empty of this engine's files.

        Returns:
            `dict[str, str]`: The digest of each client's file that this process wrote.
        """

    @abstractmethod
    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """
        Read back what `save` wrote.

        Args:
            directory (`pathlib.Path`): Of the checkpoint.
            digests (`Mapping[str, str]`): What `save` returned, of all processes.

        Raises:
            ValueError: If a client's file is missing or another than was saved.
        """
