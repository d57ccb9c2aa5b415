"""Wrappers around a client's link to the server: byte counting and encryption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..security.encrypted_link import EncryptedLink, EncryptedServer, PendingAnswer
from ..security.encrypted_session import ClientSession, Identity, ServerSession
from ..split.boundary import Answer, Link, deliver
from ..split.messages import Backward, Forward


# Arguments: client id, bytes sent, bytes received.
RecordBytes = Callable[[str, int, int], None]


class _MappedAnswer:
    """
    An answer that is processed when it is read.

    Args:
        pending ([`PendingAnswer`]): The answer.
        function (`Callable`): Called with the answer by each `result()`. Returns the result.
    """

    def __init__(self, pending: PendingAnswer, function: Callable[[bytes | memoryview], bytes | memoryview]) -> None:
        self._pending = pending
        self._function = function

    def result(self) -> bytes | memoryview:
        return self._function(self._pending.result())


class _ByteCounter:
    """
    Counts the bytes of exchanges with a link or a server.

    Args:
        carrier (`Any`): The link or the server.
        client_id (`str`): The client.
        record_bytes (`Callable[[str, int, int], None]`): As in [`ByteCountingLink`].
    """

    def __init__(self, carrier: Any, client_id: str, record_bytes: RecordBytes) -> None:
        self._carrier = carrier
        self.client_id = client_id
        self.record_bytes = record_bytes

    @property
    def max_in_flight(self) -> int:
        """Number of messages that can be in flight."""
        return max_in_flight(self._carrier)

    def exchange(self, blob: bytes) -> bytes | memoryview:
        """Send a message and return the answer."""
        return self._record(len(blob), self._carrier.exchange(blob))

    def submit(self, blob: bytes) -> PendingAnswer:
        """Send a message, and return before its answer arrives. Requires a link on which this is possible."""
        num_bytes = len(blob)
        return _MappedAnswer(self._carrier.submit(blob), lambda answer: self._record(num_bytes, answer))

    def _record(self, num_bytes: int, answer: bytes | memoryview) -> bytes | memoryview:
        self.record_bytes(self.client_id, num_bytes, len(answer))
        return answer


class ByteCountingLink(_ByteCounter):
    """
    A link that counts the bytes of its messages.

    Args:
        carrier ([`~split.Link`]): The link that transfers the messages.
        client_id (`str`): The client that uses the link.
        record_bytes (`Callable[[str, int, int], None]`): Called after each exchange with the client id, the bytes sent
            and the bytes received.
    """

    def deliver(self, message: Forward | Backward, answer_class: type[Answer]) -> Answer:
        """
        Send a message and return the answer. The link may pass the message without serializing it.

        Args:
            message ([`~split.messages.Forward`] or [`~split.messages.Backward`]): The message.
            answer_class (`type`): The class of the answer.
        """
        answer = deliver(self._carrier, message, answer_class)
        self.record_bytes(self.client_id, message.num_bytes, answer.num_bytes)
        return answer

    def end_step(self) -> None:
        """Report the end of an optimizer step."""
        self._carrier.end_step()


class _ByteCountingServer(_ByteCounter):
    """The server side of an encrypted link, with a count of the encrypted bytes."""

    def hello(self, hello: bytes) -> bytes | memoryview:
        return self._record(len(hello), self._carrier.hello(hello))

    def finish(self, finish: bytes) -> None:
        self._carrier.finish(finish)
        self.record_bytes(self.client_id, len(finish), 0)

    def check_size(self, num_bytes: int) -> None:
        self._carrier.check_size(num_bytes)


def max_in_flight(link: Any) -> int:
    """Number of messages that can be in flight on a link. It is 1 for links without `submit`."""
    return int(getattr(link, "max_in_flight", 1))


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
        ImportError: If the extra `network` is not installed.
    """
    client_identity = Identity.generate(client_id)
    server_session = ServerSession(server_identity, client_id, client_identity.fingerprint, rotate_every=rotate_every)
    client_session = ClientSession(
        client_identity, server_identity.name, server_identity.fingerprint, rotate_every=rotate_every
    )
    return EncryptedLink(client_session, EncryptedServer(server_session, link.exchange))
