"""The contract between the round loop and the engine that runs the clients.

A [`Plan`] assigns a message to each client of a cohort. An [`Engine`] delivers the messages, yields the replies in any
order, and counts the bytes in both directions. The plan holds everything that an algorithm could depend on, such as
sampling and seeds, so the same plan gives the same result on every engine.

Each message opens a request, which the reply closes. [`~Engine.send`] opens a request without a plan, so that it may
stay open beyond a round.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from transformers.utils import logging

from ..aggregation import Accumulator
from ..data import FederatedDataset
from ..messages import KINDS, Announcement, ClientFailure, Evaluate, Message
from ..messages.ledger import Ledger
from ..messages.serialization import MAX_TENSORS
from ..messages.validation import ExpectedReply, checked_reply
from ..transport.session_config import SessionConfig
from .context import EngineContext
from .requests import NoReply, OpenRequest, Plan


logger = logging.get_logger(__name__)

# Number of bytes of a nonce.
NONCE_LENGTH = 16

T = TypeVar("T")


class Engine(ABC):
    """
    Delivers the messages of a plan and yields the replies.

    Pass an instance as `engine` to [`FederatedTrainer`]. By default the launch decides: [`LocalEngine`] in one
    process, [`RankEngine`] in several.
    """

    # Whether the clients train the model of this process.
    trains_here: ClassVar[bool] = True
    # Whether `send`, `replies` and `withdraw` may be called without a plan. A request then stays open beyond a round.
    holds_requests: ClassVar[bool] = False
    # Names of the settings that a client on another machine sends when it joins.
    compared_settings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.ledger = Ledger()
        # The exception behind the last `ClientFailure`, if it is known. A failed round shows this exception as its
        # cause.
        self.last_error: Exception | None = None
        # Called about every second while the engine waits for replies, if the clients are on other machines.
        self.on_wait: Callable[[], None] | None = None
        # Called with the announcements of the clients on other machines, and with the id of the client that joins.
        # Returns the clients to refuse, with the reasons.
        self.find_refused: Callable[[Mapping[str, Announcement], str], Mapping[str, str]] | None = None
        # The kinds of messages that engine and clients read.
        self.kinds: Mapping[str, type[Message]] = KINDS
        # Largest number of tensors of a message.
        self.max_tensors = MAX_TENSORS
        # The open requests by client id, in the order of sending. The first key of a large `dict` without its earlier
        # keys is slow to find.
        self._requests: OrderedDict[str, OpenRequest] = OrderedDict()

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
    def announcements(self) -> Mapping[str, Announcement]:
        """What the clients on other machines have announced, by client id."""
        return {}

    def announcement(self, client_id: str) -> Announcement | None:
        """Return what a client on another machine announced when it joined."""
        return self.announcements.get(client_id)

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

    def stop(self, reason: str = "") -> None:
        """
        End a run, and withdraw its open requests.

        Args:
            reason (`str`, *optional*): Why the run failed. Empty if the run is complete.
        """
        for client_id in self.open_requests:
            self.withdraw(client_id)

    def start(self, context: EngineContext) -> None:
        """
        Start a new run with empty client states, an empty ledger and no open requests.

        Args:
            context ([`EngineContext`]): The federation to run.
        """
        Engine.stop(self)
        self.ledger = Ledger()
        self.last_error = None
        self.kinds = context.kinds
        self.max_tensors = context.max_tensors

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
        started = time.monotonic()
        own = self.own_clients(plan.cohort)
        waiting: set[str] = set()
        answered: set[str] = set()
        num_failures = 0
        try:
            for client_id in own:
                self.send(client_id, plan.message_for, on_dispatch, round=plan.round)
                waiting.add(client_id)
            deadline = None if plan.deadline is None else started + plan.deadline - time.monotonic()
            for reply in self.replies(deadline, plan.min_replies, own):
                waiting.discard(reply.client_id)
                if isinstance(reply, NoReply):
                    continue
                answered.add(reply.client_id)
                num_failures += isinstance(reply, ClientFailure)
                yield reply
                del reply  # Free the memory before the next client trains.
                if plan.max_failures is not None and num_failures > plan.max_failures:
                    return
        finally:
            for client_id in own:
                if client_id in waiting:
                    self.withdraw(client_id)
        reason = "no reply" if plan.deadline is None else f"no reply within {plan.deadline} seconds"
        for client_id in own:
            if client_id not in answered:
                yield ClientFailure(plan.round, client_id, self.absence_reason(client_id) or reason)

    # ---- Single requests

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the clients with an open request, in the order of sending."""
        return tuple(self._requests)

    def send(
        self,
        client_id: str,
        message_for: Callable[[str], Message],
        on_dispatch: Callable[[str], None] | None = None,
        *,
        round: int = 0,
    ) -> None:
        """
        Open a request to a client. It stays open until it is answered or withdrawn, also beyond a round.

        Without a plan, only an engine whose `holds_requests` is `True` has this method and [`~Engine.replies`].

        Args:
            client_id (`str`): Id of the client.
            message_for (`Callable[[str], Message]`): Builds the message of the client. An engine calls this function
                when it sends the message: at once, or when it is the client's turn.
            on_dispatch (`Callable[[str], None]`, *optional*): Called with the client's id when the message is sent.
            round (`int`, *optional*, defaults to `0`): Round for the log, and for the failure if the message cannot be
                sent. The message has the round of the reply.

        Raises:
            ValueError: If the client has an open request.
        """
        if client_id in self._requests:
            raise ValueError(
                f"Client {client_id!r} has an open request. Wait for its reply with `replies()`, or close the request "
                "with `withdraw()`."
            )
        request = OpenRequest(message_for, on_dispatch, round)
        self._transmit(client_id, request)
        self._requests[client_id] = request

    def replies(
        self, deadline: float | None = None, enough: int = 0, clients: Iterable[str] | None = None
    ) -> Generator[Message, None, None]:
        """
        Wait for the replies to open requests. Requests that the caller opens in the meantime are included.

        Each reply closes its request, and is bound to it as in [`~Engine.run`]. If the caller stops early, the other
        requests stay open.

        Args:
            deadline (`float`, *optional*): Seconds after which the engine stops waiting, once `enough` replies have
                arrived. By default the engine waits until no request is open.
            enough (`int`, *optional*, defaults to `0`): Number of replies that the engine waits for, even beyond the
                deadline.
            clients (`Iterable[str]`, *optional*): Ids of the clients to wait for. Defaults to all clients. The
                requests of the other clients stay open, and an engine on one machine does not run these clients.

        Yields:
            [`Message`]: One reply for each request. The reply is a [`ClientFailure`] if the client failed, if its
                reply was refused, or if the client is absent.
        """
        until = None if deadline is None else time.monotonic() + deadline
        wanted = None if clients is None else frozenset(clients)
        answered: set[str] = set()
        num_replies = 0
        while (first := next(self._waiting(wanted), None)) is not None:
            if self._is_over(until, enough, num_replies):
                return
            arrived = self._receive(wanted, until)
            if arrived is None:
                continue
            client_id, reply = arrived
            request = self._requests.get(client_id)
            if not isinstance(reply, NoReply):
                if request is None or request.expected is None:
                    reason = "it has already replied" if client_id in answered else "it was not asked"
                    where = f"client {client_id!r}, round {self._requests[first].round + 1}"
                    logger.warning(f"Ignored a reply of {where}: {reason}.")
                    continue
                answered.add(client_id)
                num_replies += 1
                reply = checked_reply(request.expected, reply, self.ledger, self.last_error)
            del self._requests[client_id]
            yield reply
            del arrived, reply  # Free the memory before the next client trains.

    def withdraw(self, client_id: str) -> None:
        """
        Close the open request of a client, if there is one. A reply to the request is ignored.

        Args:
            client_id (`str`): Id of the client.
        """
        self._requests.pop(client_id, None)

    def _waiting(self, clients: Set[str] | None) -> Iterator[str]:
        """The clients with an open request, without the clients that are not in `clients`."""
        return iter(self._requests) if clients is None else filter(clients.__contains__, self._requests)

    def _is_over(self, until: float | None, enough: int, num_replies: int) -> bool:
        """Whether the engine stops waiting for replies."""
        return until is not None and num_replies >= enough and time.monotonic() >= until

    def _dispatch(self, client_id: str, request: OpenRequest) -> Message:
        """Build the message of a request and count its bytes. Call this method exactly when the message is sent."""
        message = request.message_for(client_id).with_nonce(secrets.token_hex(NONCE_LENGTH))
        self.ledger.record(message.round, client_id, bytes_down=message.num_bytes)
        if request.on_dispatch is not None:
            request.on_dispatch(client_id)
        announced = self.announcement(client_id) if isinstance(message, Evaluate) else None
        request.round = message.round
        request.expected = ExpectedReply.to(message, None if announced is None else announced.num_eval_examples)
        return message

    def absence_reason(self, client_id: str) -> str | None:
        """Return why a client did not reply, if the engine knows."""
        return None

    def describe_waiting(self) -> str | None:
        """Return which clients the engine waits for, if they are on other machines."""
        return None

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

    def record_states(self) -> dict[str, str]:
        """
        Return the names of the states of clients on other machines, which keep these states.

        A run that resumes passes the names to [`~Engine.replay`].
        """
        return {}

    def replay(self, round: int, states: Mapping[str, str]) -> None:  # noqa: B027 - most engines have no such states
        """
        Continue after a round whose result is on disk, without a request to the clients.

        Args:
            round (`int`): Round number, from 0.
            states (`Mapping[str, str]`): Return value of [`~Engine.record_states`] after the round.
        """

    def shared(self, label: str, compute: Callable[[], T]) -> T:
        """
        Compute a value once for all processes, such as a random number.

        Args:
            label (`str`): Point of the program, for errors.
            compute (`Callable[[], T]`): Computes the value, of scalars and containers of scalars.
        """
        return compute()

    def sum_(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - one process has the sums
        """
        Replace tensors of integers in place by their sums over all processes. Call `gather` just before.

        Args:
            plan ([`Plan`]): The plan whose replies were added.
            tensors (`Sequence[torch.Tensor]`): Tensors of the same shapes and dtypes in each process.
        """

    def _transmit(self, client_id: str, request: OpenRequest) -> None:  # noqa: B027 - or when it is the client's turn
        """Send the message of a new request, which [`~Engine._dispatch`] builds. The request is not yet open."""

    @abstractmethod
    def _receive(self, clients: Set[str] | None, until: float | None) -> tuple[str, Message] | None:
        """
        Wait for the next reply. At least one request of `clients` is open.

        Args:
            clients (`Set[str]`, *optional*): Ids of the clients to wait for. By default all clients.
            until (`float`, *optional*): Deadline, as `time.monotonic()` measures it.

        Returns:
            `tuple[str, Message]`, *optional*: The id and the reply of a client, a [`NoReply`] if the client can no
            longer reply, or `None` if no reply arrived within about a second. The id is that of the client that sent
            the reply, as the engine knows it and not as the reply claims. [`~Engine.replies`] ignores the reply of a
            client without an open request.
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
