"""`NetworkEngine`: clients on other machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from transformers.utils import logging

from ..data import FederatedDataset
from ..data.remote_datasets import RemoteDatasets
from ..messages import Announcement, ClientFailure, Message, read_message
from ..messages.validation import MAX_SHOWN_LENGTH
from ..transport import Event, GrpcTransport, Transport
from ..transport.framing import frame
from ..transport.protocol import DEFAULT_MAX_MESSAGE_BYTES, Blob, JoinedPieces
from ..transport.session_config import SessionConfig
from ..utils.arguments import require
from ..utils.printable import printable
from .base import Engine
from .client_states import ClientStates, saved_names
from .context import EngineContext
from .outcomes import Outcome, RecordedOutcomes
from .requests import NoReply, OpenRequest, Plan
from .run_monitor import FOLDER, RunMonitor
from .run_status import RunStatus


logger = logging.get_logger(__name__)

# Longest interval between two checks of the deadline.
_CHECK_SECONDS = 1.0
# Seconds that a server waits for clients if it resumes after the last round.
_COMPLETE_SECONDS = 10.0


class NetworkEngine(Engine):
    """
    Runs clients on other machines. Each client is a process that calls `join()` of the same trainer.

    Use it if the examples must not leave the machines of their owners. The result has the same bytes as a run in one
    process with the same examples.

    The server sends each client its message and receives its reply over a [`~hf_federated.transport.Transport`]. A
    client that leaves or is lost fails in the round, unless it joins again in time. It then answers the open message
    from the state that it had before, so the run does not differ from an undisturbed run.

    Args:
        clients (`Sequence[str]`):
            Ids of the clients that may join.
        certificates (`str`, *optional*):
            Folder with the certificates of the server, from `hf-federated certificates`. `None` requires
            `insecure=True`.
        address (`str`, *optional*, defaults to `"0.0.0.0:50051"`):
            Address to listen on, as `host:port`. Port 0 selects a free port.
        insecure (`bool`, *optional*, defaults to `False`):
            Whether to use no TLS. Allowed on a loopback address only.
        num_to_start (`int`, *optional*):
            Number of clients that must have joined before the first round. Defaults to all clients.
        join_timeout (`float`, *optional*, defaults to `3600`):
            Seconds to wait for these clients.
        rejoin_timeout (`float`, *optional*, defaults to `60`):
            Seconds that a round waits for a client that has left or was lost. With `round_deadline` of
            [`FederatedConfig`], the round waits until the deadline.
        heartbeat_timeout (`float`, *optional*, defaults to `60`):
            Seconds without a sign of a client after which the client is lost.
        max_message_bytes (`int`, *optional*, defaults to 1 GiB):
            Size of the largest message that a client may send.
        transport ([`~hf_federated.transport.Transport`], *optional*):
            Carries the messages. Defaults to a [`~hf_federated.transport.GrpcTransport`] with the arguments above.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    >>> from hf_federated.engines import NetworkEngine

    >>> engine = NetworkEngine(["north", "south"], address="127.0.0.1:0", insecure=True)
    >>> engine.remote_clients.num_rows  # the sizes are known when the clients have joined
    {'north': None, 'south': None}
    ```
    """

    trains_here = False
    holds_requests: ClassVar[bool] = True

    def __init__(
        self,
        clients: Sequence[str],
        certificates: str | None = None,
        *,
        address: str = "0.0.0.0:50051",
        insecure: bool = False,
        num_to_start: int | None = None,
        join_timeout: float = 3600.0,
        rejoin_timeout: float = 60.0,
        heartbeat_timeout: float = 60.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        transport: Transport | None = None,
    ) -> None:
        super().__init__()
        if isinstance(clients, str) or not clients or len(set(clients)) != len(clients):
            raise ValueError(f"`clients` is {clients!r}; it must be a list of different client ids.")
        num_to_start = len(clients) if num_to_start is None else num_to_start
        allowed = f"at least 1 and at most the number of clients, {len(clients)}"
        require("num_to_start", num_to_start, 1 <= num_to_start <= len(clients), allowed)
        for name, seconds in (("join_timeout", join_timeout), ("rejoin_timeout", rejoin_timeout)):
            require(name, seconds, seconds > 0, "positive")
        self.transport = transport or GrpcTransport(
            address,
            certificates,
            insecure=insecure,
            heartbeat_timeout=heartbeat_timeout,
            max_message_bytes=max_message_bytes,
        )
        self._announced: dict[str, Announcement] = {}
        self._datasets = RemoteDatasets(clients, self._announced)
        self._num_to_start = num_to_start
        self._join_timeout = join_timeout
        self._rejoin_timeout = rejoin_timeout
        self._is_open = False
        self._status = RunStatus(clients, self.transport)
        self._monitor: RunMonitor | None = None
        self._saved_clients: Callable[[], list[Path]] = list
        self._states = ClientStates()
        self._output_dir, self._outcomes = Path(), RecordedOutcomes()
        # Replies to open requests for which no caller has waited.
        self._kept: dict[str, Blob] = {}
        # Clients whose request was withdrawn. Their reply may be among the events.
        self._withdrawn: set[str] = set()
        # When each client that is not connected was last connected.
        self._absent_since: dict[str, float] = {}
        # Clients that missed a round and have not joined again.
        self._missing: dict[str, str] = dict.fromkeys(clients, "the client has not joined")

    @property
    def remote_clients(self) -> FederatedDataset:
        """The clients, with the numbers of training examples that they have announced."""
        return FederatedDataset(self._datasets)

    @property
    def remote_eval_clients(self) -> FederatedDataset:
        """The clients, with the numbers of evaluation examples that they have announced."""
        return FederatedDataset(RemoteDatasets(self._datasets.client_ids, self._announced, "num_eval_examples"))

    @property
    def announcements(self) -> Mapping[str, Announcement]:
        return self._announced

    def check_launch(self, num_processes: int) -> None:
        if num_processes > 1:
            raise ValueError(
                f"engine=NetworkEngine() runs in one process, but the launch has {num_processes} processes. Start the "
                "server without a launcher."
            )

    def connect(
        self, settings: Callable[[], SessionConfig], output_dir: Path, num_rounds: int, *, is_complete: bool = False
    ) -> None:
        clients = self._datasets.client_ids
        self._output_dir, self._outcomes = output_dir, RecordedOutcomes(output_dir / FOLDER)
        # Clients of a complete run may not know that it has ended, or may have left.
        num_awaited = len(clients) if is_complete else self._num_to_start
        seconds = min(self._join_timeout, _COMPLETE_SECONDS) if is_complete else self._join_timeout
        if not self._is_open:
            shared = settings()
            self.compared_settings = tuple(shared.to_dict())
            self.transport.start(clients, shared)
            self._is_open = True
            self._status.num_rounds = num_rounds
            self._monitor = RunMonitor(
                output_dir, lambda: self._status.snapshot(dict(self.remote_clients.num_rows), self._missing)
            )
            self._monitor.start()
            address = getattr(self.transport, "address", None)
            place = "" if address is None else f" at {address}"
            logger.warning(f"Waiting for {num_awaited} of {len(clients)} clients{place}.")
        deadline = time.monotonic() + seconds
        while not self._can_start(num_awaited):
            remaining = deadline - time.monotonic()
            if remaining <= 0 and is_complete:
                break
            if remaining <= 0:
                awaited = [name for name in clients if name not in self._status.expelled]
                absent = [name for name in awaited if not self.transport.is_connected(name)]
                raise TimeoutError(
                    f"Clients {absent} have not joined within {self._join_timeout:g} s, and num_to_start is "
                    f"{self._num_to_start}. Start these clients, or lower `num_to_start`."
                )
            if (event := self.transport.receive(min(remaining, _CHECK_SECONDS))) is not None:
                self._note(event)
        # The events of clients that have joined in the meantime.
        self._note_all()

    def _can_start(self, num_awaited: int) -> bool:
        self._expel_clients()
        names = [name for name in self._datasets.client_ids if name not in self._status.expelled]
        # The announcement of a connected client may be among the events.
        num_joined = sum(name in self._announced and self.transport.is_connected(name) for name in names)
        return num_joined >= min(num_awaited, len(names))

    def _expel_clients(self) -> None:
        """Expel the clients that the operator has named."""
        for name in [] if self._monitor is None else self._monitor.expelled():
            if name in self._datasets.client_ids and name not in self._status.expelled:
                self._exclude(name, "the operator has expelled the client")
                _log(f"The operator has expelled client {name!r}.", "expelled", name)

    def _exclude(self, client_id: str, reason: str, text: str = "") -> None:
        """Disconnect a client and refuse it from now on. The client receives the text."""
        self._status.expelled.add(client_id)
        self._missing[client_id] = reason
        self.transport.expel(client_id, text)

    def _refuse_announcement(self, client_id: str, reason: str) -> None:
        """Exclude a client because of its announcement. The reason may contain numbers of other clients."""
        self._announced.pop(client_id, None)
        text = f"The server refused the announcement of client {client_id!r}. The log of the server has the details."
        self._exclude(client_id, "its announcement was refused", text)
        _log(f"The server refused client {client_id!r}: {reason}", "refused", client_id)

    def start(self, context: EngineContext) -> None:
        super().start(context)
        self._states = ClientStates()
        self._saved_clients = context.saved_clients

    def stop(self, reason: str = "") -> None:
        super().stop(reason)
        if self._is_open:
            self._is_open = False
            self.transport.stop(reason)
            self._missing = dict.fromkeys(self._datasets.client_ids, "the run has ended")
            if self._monitor is not None:
                self._monitor.stop(f"failed: {reason}" if reason else "complete")

    def _note_all(self) -> None:
        """Record all events that have arrived."""
        while (event := self.transport.receive(0)) is not None:
            self._note(event)
        self._withdrawn.clear()

    def _note(self, event: Event) -> None:
        """Record that a client joined, left or was lost. Keep the reply to an open request, and ignore others."""
        name = event.client_id
        if name in self._status.expelled:
            return
        if event.kind == "joined":
            try:
                announced = Announcement.from_bytes(event.blob)
            except ValueError as error:
                self._refuse_announcement(name, f"it sent an invalid announcement: {printable(error)}")
                return
            self._missing.pop(name, None)
            self._absent_since.pop(name, None)
            self._announce(name, announced)
        elif event.kind in ("left", "lost"):
            self._absent_since[name] = time.monotonic()
            _log(f"Client {name!r} {'left' if event.kind == 'left' else 'is no longer heard'}.", event.kind, name)
        elif self._is_asked(name):
            self._kept[name] = event.blob
        else:
            _log(f"Ignored a reply of client {name!r}: it came too late.", "late_reply", name)

    def _is_asked(self, client_id: str) -> bool:
        return client_id in self._requests and self._requests[client_id].expected is not None

    def _announce(self, client_id: str, announced: Announcement) -> None:
        """Keep the first announcement of a client, because it limits what the client may claim, or refuse it."""
        first = self._announced.setdefault(client_id, announced)
        refused = {} if self.find_refused is None else self.find_refused(self._announced, client_id)
        for name, reason in refused.items():
            self._refuse_announcement(name, reason)
        if client_id in refused:
            return
        _log(
            f"Client {client_id!r} joined with {announced.describe(first)}.",
            "joined",
            client_id,
            num_examples=first.num_examples,
        )

    def absence_reason(self, client_id: str) -> str | None:
        return self._missing.get(client_id)

    def _is_over(self, until: float | None, enough: int, num_replies: int) -> bool:
        # A resumed run also waits for the clients that replied in time in the interrupted run.
        return super()._is_over(until, enough, num_replies) and not self._outcomes.awaits(self._requests)

    def describe_waiting(self) -> str | None:
        return self._status.describe_waiting()

    def run(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> Generator[Message, None, None]:
        self._status.begin(plan.round, plan.phase)
        self._note_all()
        with closing(super().run(plan, on_dispatch)) as replies:
            for reply in replies:
                self._add_outcome(plan.round, reply)
                yield reply
                del reply  # Free the memory before the next reply arrives.

    def replies(
        self, deadline: float | None = None, enough: int = 0, clients: Iterable[str] | None = None
    ) -> Generator[Message, None, None]:
        if clients is not None:
            yield from super().replies(deadline, enough, clients)
            return
        # Requests that stay open beyond a round. A resumed run uses their replies in the order of the first run.
        expected = self._outcomes.next_client()
        clients = None if expected is None or expected not in self._requests else [expected]
        with closing(super().replies(deadline, enough, clients)) as replies:
            for reply in replies:
                self._add_outcome(reply.round, reply)
                yield reply
                del reply  # Free the memory before the next reply arrives.

    def _add_outcome(self, round: int, reply: Message) -> None:
        failure = reply.error[:MAX_SHOWN_LENGTH] if isinstance(reply, ClientFailure) else None
        self._outcomes.add(Outcome(round, reply.client_id, failure))

    def withdraw(self, client_id: str) -> None:
        if self._is_asked(client_id):
            self.transport.withdraw(client_id)
            self._status.withdrawn(client_id)
            self._withdrawn.add(client_id)
        super().withdraw(client_id)
        if client_id in self._kept:
            self._note(Event("reply", client_id, self._kept.pop(client_id)))

    def _transmit(self, client_id: str, request: OpenRequest) -> None:
        if client_id in self._missing or client_id in self._withdrawn:
            self._note_all()
        self._outcomes.write()
        if client_id in self._missing or self._outcomes.failure(request.round, client_id) is not None:
            return
        message = self._dispatch(client_id, request)
        header = {
            "state": self._states.of(client_id),
            # The client keeps the states of all checkpoints, because the run may resume from each of them.
            "keep": [*saved_names(self._saved_clients(), client_id), *self._states.recorded_of(client_id)],
            "num_clients": len(self._datasets.client_ids),
        }
        self._status.sent(client_id, message.round, message.num_bytes)
        facts = {"round": message.round + 1, "bytes": message.num_bytes}
        _log(f"Sent a request to client {client_id!r}.", "request", client_id, logging.INFO, **facts)
        self.transport.send(client_id, lambda: JoinedPieces(frame(header), message.to_pieces()))

    def _receive(self, clients: Set[str] | None, until: float | None) -> tuple[str, Message] | None:
        if self.on_wait is not None:
            self.on_wait()
        self._expel_clients()
        now = time.monotonic()
        for client_id in self._waiting(clients):
            request = self._requests[client_id]
            if client_id in self._kept and client_id not in self._missing:
                return self._reply(client_id, request, self._kept.pop(client_id))
            waits = until is None or (now >= until and self._outcomes.awaits({client_id: request}))
            if waits and now - self._absent_since.get(client_id, now) > self._rejoin_timeout:
                self.transport.withdraw(client_id)
                self._missing[client_id] = f"the client was absent for {self._rejoin_timeout:g} s"
                text = f"Round {request.round + 1} no longer waits for client {client_id!r}."
                _log(text, "absent", client_id, round=request.round + 1)
            if client_id in self._missing or request.expected is None:
                self._status.withdrawn(client_id)
                self._kept.pop(client_id, None)
                reason = self._missing.get(client_id) or self._outcomes.failure(request.round, client_id)
                reason = reason or "the client was absent"
                return client_id, NoReply(request.round, client_id, reason)
        pause = self._rejoin_timeout if until is None else max(until - now, 0.01)
        event = self.transport.receive(min(_CHECK_SECONDS, pause))
        if event is None:
            return None
        name = event.client_id
        if event.kind != "reply" or not self._is_asked(name) or (clients is not None and name not in clients):
            self._note(event)
            return None
        return self._reply(name, self._requests[name], event.blob)

    def _reply(self, client_id: str, request: OpenRequest, blob: Blob) -> tuple[str, Message]:
        """Log the reply to a request, and read it. A damaged reply is a failure of its client."""
        seconds = self._status.replied(client_id, len(blob))
        facts = {"round": request.round + 1, "bytes": len(blob), "seconds": round(seconds, 3)}
        _log(f"Client {client_id!r} replied after {seconds:.1f} s.", "reply", client_id, logging.INFO, **facts)
        nonce = "" if request.expected is None else request.expected.nonce
        try:
            reply = read_message(blob, self.kinds, self.max_tensors)
        except ValueError as error:
            text = f"its reply is damaged: {printable(error)}"
            return client_id, ClientFailure(request.round, client_id, text, nonce=nonce)
        self._states.names[client_id] = nonce
        return client_id, reply

    # ---- Checkpoints

    def record_states(self) -> dict[str, str]:
        self._outcomes.write()
        return self._states.record()

    def replay(self, round: int, states: Mapping[str, str]) -> None:
        self._states.names.update(states)
        self._states.record()
        self._outcomes.skip(round)

    def save(self, directory: Path) -> dict[str, str]:
        self._outcomes.write()
        return self._states.save(directory, self._outcomes.num_used)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        num_outcomes = self._states.load(directory, digests)
        # The outcomes in the output directory do not belong to a checkpoint in another directory.
        if num_outcomes is not None and self._output_dir.resolve() in directory.resolve().parents:
            self._outcomes.resume(num_outcomes)
        for client_id in digests:
            if not self.transport.is_connected(client_id) and client_id not in self._status.expelled:
                # The client took part before the checkpoint, so the round waits for it as for a client that was lost.
                self._missing.pop(client_id, None)
                self._absent_since[client_id] = time.monotonic()


def _log(text: str, event: str, client_id: str, level: int = logging.WARNING, **fields: Any) -> None:
    """Log an event of a client. By default it is an event that an operator should see."""
    logger.log(level, text, extra={"event": event, "client": client_id, **fields})
