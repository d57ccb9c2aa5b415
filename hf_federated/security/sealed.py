"""A link whose messages only the two parties can read, whoever carries them.

FL-GLM encrypts what crosses (section 3.2). Here every message is sealed with the keys of an encrypted session
(`encryption.py`), which is made when the link is connected and made anew every so many steps. A message that is sent
again, because its answer was lost, is answered with the same bytes and not carried out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .encryption import ClientSession, EncryptionError, RepeatedMessageError, ServerSession
from .sealing import OVERHEAD_BYTES


class SealedEnd(Protocol):
    """The server's end of a sealed link."""

    def hello(self, hello: bytes) -> bytes:
        """Answer the first message of a handshake or rotation."""

    def finish(self, finish: bytes) -> None:
        """Take its last message."""

    def exchange(self, sealed: bytes) -> bytes:
        """Answer a sealed message."""


class SealedCarrier(SealedEnd, Protocol):
    """The server's end of a sealed link as its client has it: itself, or what carries messages to it."""

    def check_size(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes (`int`): Of a sealed message that is to be exchanged.

        Raises:
            ValueError: If it is larger than what is carried.
        """


class SealedServer:
    """
    The server's end of a sealed link to one client.

    Args:
        session ([`~split.encryption.ServerSession`]): With this client.
        answer (`Callable[[bytes], bytes]`): What answers its messages.
    """

    def __init__(self, session: ServerSession, answer: Callable[[bytes], bytes]) -> None:
        self.session = session
        self.answer = answer
        self._last: bytes | Exception = EncryptionError("No message was answered yet.")

    def hello(self, hello: bytes) -> bytes:
        """Answer the first message of a handshake or rotation."""
        return self.session.reply(hello)

    def finish(self, finish: bytes) -> None:
        """Take its last message."""
        self.session.complete(finish)

    def exchange(self, sealed: bytes) -> bytes:
        """
        Answer a sealed message.

        Args:
            sealed (`bytes`): What the client sealed.

        Returns:
            `bytes`: The sealed answer; of the message that was opened last, the same bytes again.

        Raises:
            EncryptionError: If it is not the client's next message, or was changed on its way.
            ValueError: What the answering raises, again where the message comes again.
        """
        try:
            message = self.session.open(sealed)
        except RepeatedMessageError:
            if isinstance(self._last, Exception):
                raise self._last from None
            return self._last
        try:
            self._last = self.session.seal(self.answer(message))
        except Exception as error:
            self._last = error
            raise
        return self._last

    def check_size(self, num_bytes: int) -> None:
        """Nothing: messages of any size are answered."""


class SealedLink:
    """
    A client's way to a server, sealed.

    Args:
        session ([`~split.encryption.ClientSession`]): With the server.
        server ([`SealedCarrier`]): Its end, or what carries messages to it.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel
    >>> from hf_federated.security.sealed import SealedLink, SealedServer
    >>> from hf_federated.security.encryption import ClientSession, Identity, ServerSession

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> split = SplitModel.from_model(LlamaForCausalLM(config), client_id="north")
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> open_logits = split(tokens).logits

    >>> north, server = Identity.generate("north", 2048), Identity.generate("server", 2048)
    >>> there = ServerSession(server, "north", north.fingerprint, rsa_bits=2048)
    >>> here = ClientSession(north, "server", server.fingerprint, rsa_bits=2048)
    >>> split.boundary.link = SealedLink(here, SealedServer(there, split.boundary.link.server.answer))
    >>> bool((split(tokens).logits == open_logits).all())
    True
    ```
    """

    def __init__(self, session: ClientSession, server: SealedCarrier) -> None:
        self.session = session
        self.server = server

    def connect(self) -> None:
        """Agree on keys: the first ones, or new ones."""
        self.server.finish(self.session.finish(self.server.hello(self.session.hello())))

    def exchange(self, blob: bytes) -> bytes:
        """
        Seal a message, and open its answer.

        Raises:
            EncryptionError: If the answer is not the server's next message, or was changed on its way.
            ValueError: If the message is larger than what is carried. The link goes on.
        """
        # What is sealed has a number, and if it did not go none after it would open.
        self.server.check_size(len(blob) + OVERHEAD_BYTES)
        if self.session.epoch is None or self.session.rotation_due:
            self.connect()
        return self.session.open(self.server.exchange(self.session.seal(blob)))

    def end_step(self) -> None:
        """Count a step, after so many of which keys are made anew."""
        if self.session.epoch is None:
            return
        if self.session.rotation_due:
            self.connect()
        self.session.end_step()
