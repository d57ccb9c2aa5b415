"""The contract between the round loop and the engine that runs the clients.

A [`Plan`] assigns a message to each client of a cohort. An [`Engine`] delivers the messages, yields the replies in any
order, and counts the bytes in both directions. The plan holds everything that an algorithm could depend on, such as
sampling and seeds, so the same plan gives the same result on every engine.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from transformers.utils import logging

from ..aggregation import Accumulator
from ..clients import ClientWorker
from ..data import FederatedDataset
from ..distributed.process_group import ProcessGroup
from ..messages import Announcement, ClientFailure, Evaluate, Message
from ..messages.ledger import Ledger
from ..messages.validation import ExpectedReply
from ..transport.session_config import SessionConfig


logger = logging.get_logger(__name__)

# Number of bytes of a nonce.
NONCE_LENGTH = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """
    The work of one phase of one round.

    Args:
        round (`int`):
            Round number, from 0.
        cohort (`tuple[str, ...]`):
            Ids of the clients to ask, in order.
        message_for (`Callable[[str], Message]`):
            Builds the message of a client. An engine calls this function when it sends the message, so that the
            messages of a large cohort are never in memory together.
        phase (`str`, *optional*, defaults to `"training"`):
            Name of the phase, for error messages.
        deadline (`float`, *optional*):
            Seconds after which the engine stops waiting for replies, once `min_replies` replies have arrived. By
            default the engine waits for all clients.
        min_replies (`int`, *optional*, defaults to `0`):
            Number of replies that the engine waits for, even beyond the deadline.
        max_failures (`int`, *optional*):
            Number of failed clients after which a further failure ends the plan. With several processes, each process
            counts its own clients. By default every client is asked.
    """

    round: int
    cohort: tuple[str, ...]
    message_for: Callable[[str], Message]
    phase: str = "training"
    deadline: float | None = None
    min_replies: int = 0
    max_failures: int | None = None

    def is_over(self, started: float, num_replies: int, min_replies: int | None = None) -> bool:
        """
        Whether an engine stops waiting for replies.

        Args:
            started (`float`): Start of the plan, as `time.monotonic()` measures it.
            num_replies (`int`): Replies so far.
            min_replies (`int`, *optional*): Replaces `min_replies` of the plan, for an engine that runs a part of the
                cohort.
        """
        num_needed = self.min_replies if min_replies is None else min_replies
        return self.deadline is not None and num_replies >= num_needed and time.monotonic() - started >= self.deadline


@dataclass(frozen=True)
class EngineContext:
    """
    The federation that an engine runs.

    Args:
        build_worker (`Callable[[], ClientWorker]`): Builds the worker that answers messages in this process. An engine
            whose clients are in other processes does not call it.
        costs (`Mapping[str, float]`): Expected cost of each client in a round, in any unit.
        parallelism (`str`): `parallelism` of [`FederatedConfig`], `"data"` or `"clients"`.
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The processes of the launch.
        saved_clients (`Callable[[], list[Path]]`): Returns the folders with the client states in all checkpoints of
            the run.
    """

    build_worker: Callable[[], ClientWorker]
    costs: Mapping[str, float]
    parallelism: str
    processes: ProcessGroup
    saved_clients: Callable[[], list[Path]] = list


class Engine(ABC):
    """
    Delivers the messages of a plan and yields the replies.

    Pass an instance as `engine` to [`FederatedTrainer`]. By default the launch decides: [`LocalEngine`] in one
    process, [`RankEngine`] in several.
    """

    # Whether the clients train the model of this process.
    trains_here: ClassVar[bool] = True

    def __init__(self) -> None:
        self.ledger = Ledger()
        # The exception behind the last `ClientFailure`, if it is known. A failed round shows this exception as its
        # cause.
        self.last_error: Exception | None = None
        # Called about every second while the engine waits for replies, if the clients are on other machines.
        self.on_wait: Callable[[], None] | None = None

    def check_launch(self, num_processes: int) -> None:  # noqa: B027 - most engines support every launch
        """
        Refuse a launch that the engine does not support.

        Args:
            num_processes (`int`): Number of processes of the launch.

        Raises:
            ValueError: If the engine does not support this number of processes.
        """

    @property
    def remote_clients(self) -> FederatedDataset | None:
        """The clients, if they are on other machines. Their training examples are not on the server."""
        return None

    @property
    def remote_eval_clients(self) -> FederatedDataset | None:
        """The clients with the sizes of their evaluation examples, if the clients are on other machines."""
        return None

    @property
    def compared_settings(self) -> tuple[str, ...]:
        """Names of the settings that a client on another machine sends when it joins."""
        return ()

    def announcement(self, client_id: str) -> Announcement | None:
        """
        Return what a client on another machine announced when it joined.

        Args:
            client_id (`str`): Id of the client.
        """
        return None

    def connect(  # noqa: B027 - most engines run here
        self, settings: Callable[[], SessionConfig], output_dir: Path, num_rounds: int, *, is_complete: bool = False
    ) -> None:
        """
        Wait for clients on other machines, before a run starts.

        Args:
            settings (`Callable[[], SessionConfig]`): Returns the settings that clients must share with the server.
            output_dir (`pathlib.Path`): Output directory, for the status of the run.
            num_rounds (`int`): Number of rounds of the run.
            is_complete (`bool`, *optional*, defaults to `False`): Whether the run resumes after its last round and
                needs no clients.

        Raises:
            TimeoutError: If too few clients join. The message names the absent clients.
        """

    def stop(self, reason: str = "") -> None:  # noqa: B027 - most engines run here
        """
        End a run.

        Args:
            reason (`str`, *optional*): Why the run failed. Empty if the run is complete.
        """

    def start(self, context: EngineContext) -> None:
        """
        Start a new run with empty client states and an empty ledger.

        Args:
            context ([`EngineContext`]): The federation to run.
        """
        self.ledger = Ledger()
        self.last_error = None

    def own_clients(self, cohort: Sequence[str]) -> Sequence[str]:
        """
        The clients of a cohort whose replies `run` yields in this process, in order.

        Args:
            cohort (`Sequence[str]`): Ids of the clients to ask.
        """
        return cohort

    def run(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> Generator[Message, None, None]:
        """
        Execute a plan. A caller that closes the generator early does not ask the remaining clients.

        A reply is bound to the request: each client of the cohort answers for itself, in this round, once, and with
        the nonce of the request. Another reply is refused and counts as a failure of the client that sent it.

        Args:
            plan ([`Plan`]): The plan to execute.
            on_dispatch (`Callable[[str], None]`, *optional*): Called with a client's id when its message is sent.

        Yields:
            [`Message`]: One reply of each client, in any order. The reply is a [`ClientFailure`] if the client failed,
            if its reply was refused, or if it did not reply. An engine with several processes yields a part of the
            replies in each process. [`~Engine.gather`] and [`~Engine.reduce`] combine the results.
        """
        # The clients that were asked and have not replied.
        waiting: dict[str, ExpectedReply] = {}
        answered: set[str] = set()

        def dispatch(client_id: str) -> Message:
            message = replace(plan.message_for(client_id), nonce=secrets.token_hex(NONCE_LENGTH))
            self.ledger.record(plan.round, client_id, bytes_down=message.num_bytes)
            if on_dispatch is not None:
                on_dispatch(client_id)
            announced = self.announcement(client_id) if isinstance(message, Evaluate) else None
            waiting[client_id] = ExpectedReply.to(message, None if announced is None else announced.num_eval_examples)
            return message

        num_failures = 0
        for client_id, reply in self._execute(plan, dispatch):
            expected = waiting.pop(client_id, None)
            if expected is None:
                reason = "it has already replied" if client_id in answered else "it was not asked"
                logger.warning(f"Ignored a reply of client {client_id!r}, round {plan.round + 1}: {reason}.")
                continue
            answered.add(client_id)
            reply = self._checked(expected, reply)
            num_failures += isinstance(reply, ClientFailure)
            yield reply
            del reply  # Free the memory before the next client trains.
            if plan.max_failures is not None and num_failures > plan.max_failures:
                return
        reason = "no reply" if plan.deadline is None else f"no reply within {plan.deadline} seconds"
        for client_id in self.own_clients(plan.cohort):
            if client_id not in answered:
                yield ClientFailure(plan.round, client_id, self.absence_reason(client_id) or reason)

    def absence_reason(self, client_id: str) -> str | None:
        """Return why a client did not reply, if the engine knows."""
        return None

    def describe_waiting(self) -> str | None:
        """Return which clients the engine waits for, if they are on other machines."""
        return None

    def _checked(self, expected: ExpectedReply, reply: Message) -> Message:
        """Count the bytes of a reply, and return it. Return a failure of the client if the reply is refused."""
        round, client_id = expected.round, expected.client_id
        try:
            expected.check(reply)
            self.ledger.record(round, client_id, bytes_up=reply.num_bytes)
        except (TypeError, ValueError) as error:
            return ClientFailure(round, client_id, f"its reply was refused: {error}")
        if isinstance(reply, ClientFailure) and self.last_error is not None:
            # The client runs in this process, so the text of the error has not left it.
            reply = replace(reply, error=f"{type(self.last_error).__name__}: {self.last_error}")
        elif isinstance(reply, ClientFailure):
            # In one line, so that the text cannot imitate other lines of the log.
            reply = replace(reply, error=" ".join(reply.error.split()))
        # The nonce has served its purpose. Without it, the replies of two equal runs are equal.
        return replace(reply, nonce="")

    def collect(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> dict[str, Message]:
        """
        Execute a plan and return all replies, in every process.

        Args:
            plan ([`Plan`]): The plan to execute.
            on_dispatch (`Callable[[str], None]`, *optional*): As in [`~Engine.run`].

        Returns:
            `dict[str, Message]`: Replies by client id, in the order of the cohort, without clients that were not asked
                because of `max_failures`.
        """
        replies = {reply.client_id: reply for reply in self.run(plan, on_dispatch)}
        return {client_id: replies[client_id] for client_id in plan.cohort if client_id in replies}

    def gather(self, plan: Plan, results: Mapping[str, T]) -> dict[str, T]:
        """
        Combine the results that each process has for its clients. The ledger is complete afterwards.

        Args:
            plan ([`Plan`]): The plan that was executed.
            results (`Mapping[str, T]`): Results of this process by client id, as scalars and containers of scalars.

        Returns:
            `dict[str, T]`: Results of all processes by client id, in the order of the cohort.
        """
        return {client_id: results[client_id] for client_id in plan.cohort if client_id in results}

    def reduce(self, plan: Plan, accumulator: Accumulator) -> None:  # noqa: B027 - one process has nothing to reduce
        """
        Reduce every mean of an accumulator over all processes.

        Args:
            plan ([`Plan`]): The plan whose updates were accumulated.
            accumulator ([`Accumulator`]): This process's accumulator, changed in place.
        """

    @abstractmethod
    def _execute(self, plan: Plan, dispatch: Callable[[str], Message]) -> Iterator[tuple[str, Message]]:
        """
        Yield the id and the reply of each client. Call `dispatch` for a message exactly when it is sent.

        The id is that of the client that sent the reply, as the engine knows it and not as the reply claims. A client
        may be yielded again or without having been asked: [`~Engine.run`] refuses its reply.
        """

    @abstractmethod
    def save(self, directory: Path) -> dict[str, str]:
        """
        Write the client states to a checkpoint.

        Args:
            directory (`pathlib.Path`): An existing directory without files of this engine.

        Returns:
            `dict[str, str]`: SHA-256 of each client's file that this process wrote, by client id.
        """

    @abstractmethod
    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """
        Read the client states of a checkpoint.

        Args:
            directory (`pathlib.Path`): The directory that `save` wrote to.
            digests (`Mapping[str, str]`): Return values of `save` in all processes.

        Raises:
            ValueError: If a client's file is missing or differs from the saved file.
        """
