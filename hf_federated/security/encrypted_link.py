"""
An encrypted link between a client and the server of a split model.

FL-GLM encrypts the exchanged messages (section 3.2). The link encrypts every message with the keys of an encrypted
session (`encrypted_session.py`). The link performs the handshake when it connects, and again after a configured number
of steps. If a client sends a message again because the answer was lost, the server returns the same bytes and does not
process the message again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, Protocol

from .authenticated_encryption import OVERHEAD_BYTES, Buffer
from .encrypted_session import ClientSession, EncryptionError, RepeatedMessageError, ServerSession


class PendingAnswer(Protocol):
    """The answer to a message that was sent."""

    def result(self) -> bytes | memoryview:
        """Wait for the answer. Raises the errors of the exchange."""


class ServerEndpoint(Protocol):
    """The server's side of a link to one client. It answers handshakes and messages."""

    def hello(self, hello: bytes) -> bytes | memoryview:
        """Answer the first message of a handshake or rotation."""

    def finish(self, finish: bytes) -> None:
        """Process the last message of a handshake or rotation."""

    def exchange(self, sealed: bytes) -> bytes | memoryview:
        """Answer an encrypted message."""


class ServerConnection(ServerEndpoint, Protocol):
    """
    A client's connection to a [`ServerEndpoint`].

    This is the endpoint itself if client and server run in the same process, or a network link to the endpoint.

    A connection on which a client can send messages before the answers to the previous messages arrive has two more
    members: `max_in_flight` (`int`), the number of messages that can be in flight, and `submit(sealed)`, which sends a
    message and returns a [`PendingAnswer`]. The server processes the messages in the order of the calls.
    """

    def check_size(self, num_bytes: int) -> None:
        """
        Check that a message is not too large for the connection.

        Args:
            num_bytes (`int`): Size of the encrypted message.

        Raises:
            ValueError: If the message is larger than the connection allows.
        """


class _SealedAnswer:
    """
    An encrypted answer that is not opened yet.

    Args:
        link ([`EncryptedLink`]): The link, which opens the answers in the order of the messages.
        sealed ([`PendingAnswer`]): The encrypted answer.
    """

    def __init__(self, link: EncryptedLink, sealed: PendingAnswer) -> None:
        self.sealed = sealed
        self.opened: bytes | Exception | None = None
        self._link = link

    def result(self) -> bytes:
        while self.opened is None:
            self._link.open_next()
        if isinstance(self.opened, Exception):
            raise self.opened
        return self.opened


class EncryptedServer:
    """
    The server's side of an encrypted link to one client.

    Args:
        session ([`~hf_federated.security.encrypted_session.ServerSession`]): The session with the client.
        answer (`Callable[[bytes], bytes]`): Returns the answer to a decrypted message of the client.
    """

    def __init__(self, session: ServerSession, answer: Callable[[bytes], bytes | memoryview]) -> None:
        self.session = session
        self.answer = answer
        self._last_answer: bytes | Exception = EncryptionError("No message was answered yet.")

    def hello(self, hello: bytes) -> bytes:
        """Answer the first message of a handshake or rotation."""
        return self.session.reply(hello)

    def finish(self, finish: bytes) -> None:
        """Process the last message of a handshake or rotation."""
        self.session.complete(finish)

    def exchange(self, sealed: Buffer) -> bytes:
        """
        Decrypt a message and return the encrypted answer.

        Args:
            sealed (`bytes`): A message that the client encrypted.

        Returns:
            `bytes`: The encrypted answer. If the most recently opened message arrives again, the same bytes.

        Raises:
            EncryptionError: If the message is not the client's next message, or was changed.
            ValueError: If `answer` raises it. The same error is raised again if the message arrives again.
        """
        try:
            message = self.session.open(sealed)
        except RepeatedMessageError:
            if isinstance(self._last_answer, Exception):
                raise self._last_answer from None
            return self._last_answer
        try:
            self._last_answer = self.session.seal(self.answer(message))
        except Exception as error:
            self._last_answer = error
            raise
        return self._last_answer

    def check_size(self, num_bytes: int) -> None:
        """Do nothing: the endpoint accepts messages of any size."""


class EncryptedLink:
    """
    A client's link to the server on which every message is encrypted.

    Args:
        session ([`~hf_federated.security.encrypted_session.ClientSession`]): The session with the server.
        server ([`ServerConnection`]): The server's endpoint, or a network link to the endpoint.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel
    >>> from hf_federated.security.encrypted_link import EncryptedLink, EncryptedServer
    >>> from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> split = SplitModel.from_model(LlamaForCausalLM(config), client_id="north")
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> unencrypted_logits = split(tokens).logits

    >>> north, server = Identity.generate("north", 2048), Identity.generate("server", 2048)
    >>> client_session = ClientSession(north, "server", server.fingerprint, rsa_bits=2048)
    >>> server_session = ServerSession(server, "north", north.fingerprint, rsa_bits=2048)
    >>> endpoint = EncryptedServer(server_session, split.boundary.link.server.answer)
    >>> split.boundary.link = EncryptedLink(client_session, endpoint)
    >>> bool((split(tokens).logits == unencrypted_logits).all())
    True
    ```
    """

    def __init__(self, session: ClientSession, server: ServerConnection) -> None:
        self.session = session
        self.server = server
        # Answers to the messages in flight, in the order of the messages.
        self._pending: collections.deque[_SealedAnswer] = collections.deque()

    @property
    def max_in_flight(self) -> int:
        """Number of messages that can be in flight."""
        return int(getattr(self.server, "max_in_flight", 1))

    def connect(self) -> None:
        """Perform a handshake, which creates the keys of the session or rotates them."""
        while self._pending:
            self.open_next()
        self.server.finish(self.session.finish(bytes(self.server.hello(self.session.hello()))))

    def exchange(self, blob: bytes) -> bytes:
        """
        Encrypt a message, send it, and decrypt its answer.

        Raises:
            EncryptionError: If the answer is not the server's next message, or was changed.
            ValueError: If the message is larger than the connection allows. The link stays usable.
        """
        while self._pending:
            self.open_next()
        return self.session.open(self.server.exchange(self._seal(blob)))

    def submit(self, blob: bytes) -> PendingAnswer:
        """
        Encrypt and send a message, and return before its answer arrives.

        Requires a connection to the server with `submit`, see [`ServerConnection`].

        Returns:
            [`PendingAnswer`]: The answer. `result()` raises the errors of `exchange`.

        Raises:
            ValueError: If the message is larger than the connection allows. The link stays usable.
        """
        server: Any = self.server
        answer = _SealedAnswer(self, server.submit(self._seal(blob)))
        self._pending.append(answer)
        return answer

    def open_next(self) -> None:
        """Decrypt the oldest answer to a message in flight, and keep the plain text or the error for its result."""
        answer = self._pending[0]
        try:
            answer.opened = self.session.open(answer.sealed.result())
        except Exception as error:
            answer.opened = error
        self._pending.popleft()

    def _seal(self, blob: bytes) -> bytes:
        # Check the size before encryption. Encryption uses a message number, so the server would reject all later
        # messages if this message was not sent.
        self.server.check_size(len(blob) + OVERHEAD_BYTES)
        if self.session.epoch is None or self.session.rotation_due:
            self.connect()
        return self.session.seal(blob)

    def end_step(self) -> None:
        """Count a step, and rotate the keys first if a rotation is due."""
        if self.session.epoch is None:
            return
        if self.session.rotation_due:
            self.connect()
        self.session.end_step()
