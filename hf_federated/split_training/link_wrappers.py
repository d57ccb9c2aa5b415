"""Wrappers around a client's link to the server: byte counting, encryption, and the replies of a networked run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..messages.serialization import packed_kind
from ..security.encrypted_link import EncryptedLink, EncryptedServer, ServerConnection
from ..security.encrypted_session import ClientSession, Identity, ServerSession
from ..split.boundary import Link
from .messages import Bundle, LateReply, PeerRemovedReply, as_tensor, as_view


# Size of a bundle of messages, which is in memory as a whole. Larger messages are sent separately.
MAX_BUNDLE_BYTES = 1 << 28
# Arguments: client id, bytes sent, bytes received.
RecordBytes = Callable[[str, int, int], None]


class ByteCountingLink:
    """
    A link that counts the bytes of its messages.

    Args:
        link ([`~split.Link`]): The link that transfers the messages.
        client_id (`str`): The client that uses the link.
        record_bytes (`Callable[[str, int, int], None]`): Called after each exchange with the client id, the bytes sent
            and the bytes received.
    """

    def __init__(self, link: Link, client_id: str, record_bytes: RecordBytes) -> None:
        self.link = link
        self.client_id = client_id
        self.record_bytes = record_bytes

    def exchange(self, blob: bytes) -> bytes | memoryview:
        """Send a message and return the answer."""
        answer = self.link.exchange(blob)
        self.record_bytes(self.client_id, len(blob), len(answer))
        return answer

    def end_step(self) -> None:
        """Report the end of an optimizer step."""
        self.link.end_step()


class _ByteCountingServer:
    """The server side of an encrypted link, with a count of the encrypted bytes."""

    def __init__(self, server: ServerConnection, client_id: str, record_bytes: RecordBytes) -> None:
        self.server = server
        self.client_id = client_id
        self.record_bytes = record_bytes

    def hello(self, hello: bytes) -> bytes | memoryview:
        reply = self.server.hello(hello)
        self.record_bytes(self.client_id, len(hello), len(reply))
        return reply

    def finish(self, finish: bytes) -> None:
        self.server.finish(finish)
        self.record_bytes(self.client_id, len(finish), 0)

    def exchange(self, encrypted: bytes) -> bytes | memoryview:
        answer = self.server.exchange(encrypted)
        self.record_bytes(self.client_id, len(encrypted), len(answer))
        return answer

    def check_size(self, num_bytes: int) -> None:
        self.server.check_size(num_bytes)


def with_byte_counting(link: Link, client_id: str, record_bytes: RecordBytes) -> Link:
    """
    Count the bytes of a link. For an encrypted link the count includes the encrypted messages and the handshakes.

    Args:
        link ([`~split.Link`]): The link of a client.
        client_id (`str`): The client.
        record_bytes (`Callable[[str, int, int], None]`): As in [`ByteCountingLink`].
    """
    if isinstance(link, EncryptedLink):
        return EncryptedLink(link.session, _ByteCountingServer(link.server, client_id, record_bytes))
    return ByteCountingLink(link, client_id, record_bytes)


def with_encryption(link: Link, client_id: str, server_identity: Identity, rotate_every: int) -> EncryptedLink:
    """
    Encrypt a link between a client and a server in the same process, with new keys.

    Args:
        link ([`~split.Link`]): The link that transfers the decrypted messages.
        client_id (`str`): The client.
        server_identity ([`~hf_federated.security.keys.Identity`]): The identity of the server.
        rotate_every (`int`): Number of optimizer steps after which the keys are replaced.

    Raises:
        ImportError: If the extra `split` is not installed.
    """
    client_identity = Identity.generate(client_id)
    server_session = ServerSession(server_identity, client_id, client_identity.fingerprint, rotate_every=rotate_every)
    client_session = ClientSession(
        client_identity, server_identity.name, server_identity.fingerprint, rotate_every=rotate_every
    )
    return EncryptedLink(client_session, EncryptedServer(server_session, link.exchange))


class LateError(RuntimeError):
    """Raised when the deadline of a step passed and the step continues without this client."""


class PeerRemovedError(RuntimeError):
    """Raised when the other client of a request was removed from the run."""


@dataclass(frozen=True)
class _Deferred:
    """
    A message that is sent with the next one.

    Args:
        message (`bytes`): The serialized message.
        on_answer (`Callable`): Called with the serialized answer.
    """

    message: bytes
    on_answer: Callable[[bytes | memoryview], object]


class RunLink:
    """
    A client's link to the server of a networked run, for hidden states, gradients and control messages.

    A control message whose answer is not needed at once waits for the next message, and both travel in one exchange.

    Args:
        link ([`~split.Link`]): The link that transfers the messages.
        client_id (`str`): The client.
    """

    def __init__(self, link: Link, client_id: str) -> None:
        self.link = link
        self.client_id = client_id
        self._deferred: list[_Deferred] = []

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
            ValueError: If the server did not answer all messages.
        """
        deferred, self._deferred = self._deferred, []
        answers: list[bytes | memoryview] = []
        for bundled in _bundles([*(item.message for item in deferred), *blobs]):
            answers += self._exchange_bundle(bundled)
        for item, answer in zip(deferred, answers, strict=False):
            item.on_answer(answer)
        return answers[len(deferred) :]

    def _exchange_bundle(self, blobs: Sequence[bytes]) -> list[bytes | memoryview]:
        if len(blobs) == 1:
            answers = [self.link.exchange(blobs[0])]
        else:
            bundle = Bundle(self.client_id, [as_tensor(blob) for blob in blobs])
            received = Bundle.from_bytes(self.link.exchange(bundle.to_bytes()))
            answers = [as_view(answer) for answer in received.messages]
        for answer in answers:
            kind = packed_kind(answer)
            if kind == LateReply.kind:
                raise LateError("The step continues without this client.")
            if kind == PeerRemovedReply.kind:
                raise PeerRemovedError(
                    f"Client {PeerRemovedReply.from_bytes(answer).peer!r} was removed from the run."
                )
        if len(answers) != len(blobs):
            raise ValueError(
                f"The server answered {len(answers)} of {len(blobs)} messages of client {self.client_id!r}."
            )
        return answers

    def end_step(self) -> None:
        """Report the end of an optimizer step."""
        self.link.end_step()

    def request(self, message: Any, answer: type[Any]) -> Any:
        """Send a control message and return its deserialized answer."""
        return answer.from_bytes(self.exchange(message.to_bytes()))

    def defer(self, message: Any, answer: type[Any], on_answer: Callable[[Any], object] = lambda answer: None) -> None:
        """
        Send a control message with the next message.

        Args:
            message (`ControlMessage`): The message.
            answer (`type`): Class of the answer.
            on_answer (`Callable`, *optional*): Called with the deserialized answer.
        """
        self._deferred.append(_Deferred(message.to_bytes(), lambda blob: on_answer(answer.from_bytes(blob))))

    def flush(self) -> None:
        """Send the deferred messages, if there are any. Raises the errors of `exchange_all`."""
        if self._deferred:
            self.exchange_all([])


def _bundles(blobs: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Group messages so that a bundle has at most `MAX_BUNDLE_BYTES`, or one message."""
    group: list[bytes] = []
    num_bytes = 0
    for blob in blobs:
        if group and num_bytes + len(blob) > MAX_BUNDLE_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(blob)
        num_bytes += len(blob)
    if group:
        yield group
