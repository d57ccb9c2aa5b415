"""`RunLink`: a client's link to the server of a networked run, with the messages that wait or are in flight."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..security.encrypted_link import PendingAnswer
from ..split.agreement import RefusedAnswerError, read_answer
from ..split.boundary import Link
from .answers import check_kind, read_removed_peer, read_reply
from .link_wrappers import max_in_flight
from .messages import Bundle, LateReply, PeerRemovedReply, as_tensor, as_view


# Size of a bundle of messages, which is in memory as a whole. Larger messages are sent separately.
MAX_BUNDLE_BYTES = 1 << 28
# If messages can be in flight together, smaller messages wait for further messages and travel in a bundle.
MIN_BUNDLE_BYTES = 1 << 16


class LateError(RuntimeError):
    """Raised when the deadline of a step passed and the step continues without this client."""


class PeerRemovedError(RuntimeError):
    """Raised when the other client of a request was removed from the run."""


@dataclass(frozen=True)
class _Outgoing:
    """
    A message that waits for further messages, or was sent.

    Args:
        message (`bytes`): The serialized message.
        on_answer (`Callable`): Called with the serialized answer.
        on_error (`Callable`, *optional*): Called with the error if there is no answer.
        is_deferred (`bool`, *optional*, defaults to `False`): Whether the message waits for the next message.
    """

    message: bytes
    on_answer: Callable[[bytes | memoryview], object]
    on_error: Callable[[BaseException], object] = lambda error: None
    is_deferred: bool = False

    def __len__(self) -> int:
        return len(self.message)


class PostedMessage:
    """
    A message whose answer is read later.

    Args:
        link ([`RunLink`]): The link.
    """

    def __init__(self, link: RunLink) -> None:
        self._link = link
        self._answer: bytes | memoryview | BaseException | None = None

    def answer(self) -> bytes | memoryview:
        """Wait for the answer. Raises the errors of [`RunLink.exchange`]."""
        while self._answer is None:
            self._link.receive_next()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def set(self, answer: bytes | memoryview | BaseException) -> None:
        """Set the answer, or the error of the exchange. The first error is kept."""
        if not isinstance(self._answer, BaseException):
            self._answer = answer


class RunLink:
    """
    A client's link to the server of a networked run, for hidden states, gradients and control messages.

    A control message whose answer is not needed at once waits for the next message, and both travel in one exchange.
    Posted messages are in flight together if the link allows it: while one message travels, the server processes the
    previous ones, and the client computes the next one. On other links they travel in one exchange.

    Args:
        link ([`~split.Link`]): The link that transfers the messages.
        client_id (`str`): The client.
    """

    def __init__(self, link: Link, client_id: str) -> None:
        self.link = link
        self.client_id = client_id
        self._deferred: list[_Outgoing] = []
        # Posted messages that wait for further messages, and bundles of messages in flight.
        self._waiting: list[_Outgoing] = []
        self._in_flight: collections.deque[tuple[list[_Outgoing], PendingAnswer]] = collections.deque()

    def exchange(self, blob: bytes) -> bytes | memoryview:
        """
        Send a message and return the answer.

        Raises:
            LateError: If the step continues without this client.
            PeerRemovedError: If the other client of the request was removed from the run.
        """
        return self.exchange_all([blob])[0]

    def exchange_all(self, blobs: Sequence[bytes]) -> list[bytes | memoryview]:
        """
        Send the deferred messages and further messages, which the server processes in this order.

        Args:
            blobs (`Sequence[bytes]`): The messages.

        Returns:
            `list[bytes]`: The answers to `blobs`.

        Raises:
            LateError: If the step continues without this client.
            PeerRemovedError: If the other client of a request was removed from the run.
            RefusedAnswerError: If the server did not answer all messages, or answers of another kind.
        """
        deferred, self._deferred = self._deferred, []
        answers: list[bytes | memoryview] = []
        for bundle in _bundles([*deferred, *(_Outgoing(blob, answers.append) for blob in blobs)]):
            self._deliver(bundle, self.link.exchange(self._pack(bundle)))
        return answers

    def post(self, blob: bytes) -> PostedMessage:
        """
        Queue a message. It is sent at the latest when an answer is read.

        The server processes posted messages in their order. Small messages wait for further messages, and travel in a
        bundle with them. The errors of the message, and of the deferred messages before it, are raised when the answer
        is read.

        Args:
            blob (`bytes`): The message.
        """
        posted = PostedMessage(self)
        self._waiting += [dataclasses.replace(item, on_error=posted.set) for item in self._deferred]
        self._waiting.append(_Outgoing(blob, posted.set, posted.set))
        self._deferred = []
        # If all but one of the possible messages are in flight, the others wait for an answer, and travel together.
        has_slot = len(self._in_flight) < max_in_flight(self.link) - 1
        if has_slot and sum(map(len, self._waiting)) >= MIN_BUNDLE_BYTES:
            self._send_waiting()
        return posted

    def receive_next(self) -> None:
        """Send the posted messages that wait, and receive the answers to the oldest bundle in flight."""
        self._send_waiting()
        bundle, pending = self._in_flight.popleft()
        try:
            self._deliver(bundle, pending.result())
        except BaseException as error:
            for item in bundle:
                item.on_error(error)
            if not isinstance(error, Exception):
                raise

    def abandon(self) -> None:
        """
        Drop the posted messages that wait, and receive the answers and errors of the messages in flight.

        Deferred messages that wait are not dropped.
        """
        self._deferred = [*(item for item in self._waiting if item.is_deferred), *self._deferred]
        self._waiting = []
        while self._in_flight:
            self.receive_next()

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        link: Any = self.link
        for bundle in _bundles(waiting):
            pending: Any = Future()
            try:
                if max_in_flight(link) > 1:
                    pending = link.submit(self._pack(bundle))
                else:
                    pending.set_result(link.exchange(self._pack(bundle)))
            except Exception as error:
                pending.set_exception(error)
            self._in_flight.append((bundle, pending))

    def _pack(self, bundle: Sequence[_Outgoing]) -> bytes:
        if len(bundle) == 1:
            return bundle[0].message
        return bytes(Bundle(self.client_id, [as_tensor(item.message) for item in bundle]).to_bytes())

    def _deliver(self, bundle: Sequence[_Outgoing], received: bytes | memoryview) -> None:
        """Read the answers to a bundle of messages, and call the functions that wait for them."""
        answers = [received]
        if len(bundle) > 1:
            answers = [as_view(answer) for answer in read_answer(Bundle, received).messages]
        for item, answer in zip(bundle, answers, strict=False):
            kind = check_kind(item.message, answer)
            if kind == LateReply.kind:
                raise LateError("The step continues without this client.")
            if kind == PeerRemovedReply.kind:
                peer = read_removed_peer(item.message, answer)
                raise PeerRemovedError(f"Client {peer!r} was removed from the run.")
        if len(answers) != len(bundle):
            found = f"has {len(answers)} answers"
            agreed = f"an answer to each of {len(bundle)} messages of client {self.client_id!r}"
            raise RefusedAnswerError(Bundle.kind, "messages", found, agreed)
        for item, answer in zip(bundle, answers, strict=True):
            item.on_answer(answer)

    def end_step(self) -> None:
        """Report the end of an optimizer step."""
        self.link.end_step()

    def request(self, message: Any, answer: type[Any]) -> Any:
        """Send a control message and return its deserialized answer."""
        return read_reply(message, answer, self.exchange(message.to_bytes()))

    def defer(self, message: Any, answer: type[Any], on_answer: Callable[[Any], object] = lambda answer: None) -> None:
        """
        Send a control message with the next message.

        Args:
            message (`ControlMessage`): The message.
            answer (`type`): Class of the answer.
            on_answer (`Callable`, *optional*): Called with the deserialized answer.
        """
        self._deferred.append(
            _Outgoing(message.to_bytes(), lambda blob: on_answer(read_reply(message, answer, blob)), is_deferred=True)
        )

    def flush(self) -> None:
        """Send the deferred messages, if there are any. Raises the errors of `exchange_all`."""
        self.exchange_all([])


def _bundles(messages: Sequence[_Outgoing]) -> Iterator[list[_Outgoing]]:
    """Group messages so that a bundle has at most `MAX_BUNDLE_BYTES`, or one message."""
    group: list[_Outgoing] = []
    num_bytes = 0
    for message in messages:
        if group and num_bytes + len(message) > MAX_BUNDLE_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(message)
        num_bytes += len(message)
    if group:
        yield group
