"""What a server does with what comes, whoever carries it: admits clients, and answers their messages once and in turn.

A message passes four places: the client's session is looked up and its owner compared with the certificate; a message
that was answered is answered alike; there must be room, before its bytes are read; and one message of a client is
carried out at a time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers.utils import logging

from ..security.encrypted_link import EncryptedServer, ServerEndpoint
from ..security.encrypted_session import ServerSession
from .errors import RequestRejectedError
from .protocol import VERSION, ConnectResponse, MessageHeader, Outcome, bad_request, gather, read_object
from .session_config import SessionConfig, format_differences
from .session_registry import ClientSession, SessionRegistry


logger = logging.get_logger(__name__)


Answer = Callable[[str, bytes], bytes]


class PlainEndpoint:
    """
    The server's end of a link that TLS alone protects.

    Args:
        answer (`Callable[[bytes], bytes]`): What answers its messages.
    """

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.exchange = answer

    def hello(self, hello: bytes) -> bytes:
        """
        Raises:
            ValueError: Always: there are no keys to agree on.
        """
        raise ValueError("This server seals no messages: give it encryption=, or use the link without EncryptedLink.")

    def finish(self, finish: bytes) -> None:
        """
        Raises:
            ValueError: Always: there are no keys to agree on.
        """
        raise ValueError("This server seals no messages.")


class Service:
    """
    The server's side of the protocol. Arguments are those of [`SplitServer`].

    Example: see [`SplitServer`], which has one.
    """

    def __init__(
        self,
        answer: Answer,
        presence: SessionRegistry,
        terms: SessionConfig,
        *,
        encryption: Callable[[str], ServerSession] | None,
        max_message_bytes: int,
        max_exchanges: int,
        on_connected: Callable[[str], None] | None,
        on_left: Callable[[str], None] | None,
    ) -> None:
        self.presence = presence
        self._answer = answer
        self._terms = terms
        self._encryption = encryption
        self._max_message_bytes = max_message_bytes
        self._max_exchanges = max_exchanges
        self._on_connected = on_connected
        self._on_left = on_left
        self._connecting = threading.Lock()
        self._turns = {client_id: threading.Lock() for client_id in presence.clients}
        self._room = threading.Lock()
        # How many messages of a client are being read or carried out. Two where a call broke off and came again.
        self._busy: dict[str, int] = {}

    def connect(self, request: bytes, owner: str | None) -> bytes:
        """
        Admit a client.

        Args:
            request (`bytes`): JSON.
            owner (`str`, *optional*): Whom the certificate names; `None` without TLS.

        Raises:
            RequestRejectedError: If the client is another than it says, not known, connected already, or of other terms.
        """
        try:
            said = read_object(request, "Connect")
            self._check_version(said)
            client_id, process, terms = said.get("client_id"), said.get("process"), said.get("terms")
            if not isinstance(client_id, str) or not isinstance(process, str):
                raise ValueError("Connect names a client and a process.")
            self._check_owner(client_id, owner)
            if client_id not in self.presence.clients:
                raise RequestRejectedError("PERMISSION_DENIED", f"The server knows no client {client_id!r}.")
            found = self._terms.differences(terms)
        except ValueError as error:
            raise bad_request(error) from None
        if found:
            reason = f"Client {client_id!r} and the server do not agree. {format_differences(found)}."
            # Others wait for it, and somebody has to find out why.
            logger.warning(reason)
            raise RequestRejectedError("FAILED_PRECONDITION", reason)
        with self._connecting:
            session, is_new = self.presence.admit(client_id, process, functools.partial(self._make_end, client_id))
            if is_new and self._on_connected is not None:
                try:
                    self._on_connected(client_id)
                except Exception as error:
                    session.close("The server did not take the client in.")
                    if isinstance(error, ValueError):
                        raise RequestRejectedError("FAILED_PRECONDITION", str(error)) from None
                    raise
        milliseconds = int(self.presence.heartbeat_timeout * 1000)
        return ConnectResponse(session.session, milliseconds, self._max_message_bytes).to_text().encode("ascii")

    def heartbeat(self, request: bytes, owner: str | None) -> bytes:
        """
        Take a sign of life.

        Raises:
            RequestRejectedError: If the session ended or is another client's.
        """
        self._session_named(request, owner).hear()
        return b"{}"

    def leave(self, request: bytes, owner: str | None) -> bytes:
        """
        Let a client go.

        Raises:
            RequestRejectedError: If the session ended or is another client's.
        """
        session = self._session_named(request, owner)
        if session.close(f"Client {session.client_id!r} left.") and self._on_left is not None:
            self._on_left(session.client_id)
        return b"{}"

    def find(self, header_text: str | bytes, owner: str | None) -> tuple[ClientSession, MessageHeader]:
        """
        Whose message it is, and what is said of it.

        Raises:
            RequestRejectedError: If the session ended or is another client's, or the message is too large.
        """
        try:
            header = MessageHeader.from_text(header_text)
        except ValueError as error:
            raise bad_request(error) from None
        session = self._find(header.session, owner)
        if header.num_bytes > self._max_message_bytes:
            raise RequestRejectedError(
                "INVALID_ARGUMENT",
                f"A message of {header.num_bytes} bytes came; the server takes at most {self._max_message_bytes}.",
            )
        return session, header

    def exchange(
        self,
        kind: str,
        session: ClientSession,
        header: MessageHeader,
        pieces: Iterable[bytes],
        wanted: Callable[[], bool],
    ) -> Outcome | None:
        """
        Carry a message out, or say again how that ended.

        Args:
            kind (`str`): `"exchange"`, `"hello"` or `"finish"`.
            session ([`ClientSession`]): Whose message it is.
            header ([`MessageHeader`]): What is said of it.
            pieces (`Iterable[bytes]`): Its bytes, which are read where they are needed.
            wanted (`Callable[[], bool]`): Whether the client waits.

        Returns:
            `Outcome`, *optional*: `None` where nobody waits any more.

        Raises:
            RequestRejectedError: If the message is out of order, is not as announced, or there is no room for it.
        """
        if not session.once.is_new(header.number, header.token):
            outcome = session.once.wait(header.number, header.token, lambda: wanted() and session.ended is None)
            session.check_goes_on()
            return outcome
        with self._place(session.client_id):
            try:
                blob = gather(pieces, header.num_bytes, session.hear)
            except ValueError as error:
                raise bad_request(error) from None
            session.check_goes_on()
            carry_out = functools.partial(self._carry_out, kind, session, blob)
            return session.once.carry_out(header.number, header.token, carry_out)

    def _carry_out(self, kind: str, session: ClientSession, blob: bytes) -> Outcome:
        def do() -> bytes:
            # Of a session before this one a message may still be under way.
            with self._turns[session.client_id]:
                if session.ended is not None:
                    raise ValueError(session.ended)
                if kind == "exchange":
                    return session.end.exchange(blob)
                if kind == "hello":
                    return session.end.hello(blob)
                session.end.finish(blob)
                return b""

        return Outcome.of(do, f"A message of client {session.client_id!r}")

    @contextlib.contextmanager
    def _place(self, client_id: str) -> Iterator[None]:
        """
        Room for a client's message while it is read and carried out.

        Raises:
            RequestRejectedError: If there is none.
        """
        with self._room:
            if client_id not in self._busy and len(self._busy) >= self._max_exchanges:
                raise RequestRejectedError(
                    "RESOURCE_EXHAUSTED", f"The server answers {self._max_exchanges} clients already: come again."
                )
            self._busy[client_id] = self._busy.get(client_id, 0) + 1
        try:
            yield
        finally:
            with self._room:
                self._busy[client_id] -= 1
                if not self._busy[client_id]:
                    del self._busy[client_id]

    def _make_end(self, client_id: str) -> ServerEndpoint:
        answer = functools.partial(self._answer, client_id)
        return (
            PlainEndpoint(answer) if self._encryption is None else EncryptedServer(self._encryption(client_id), answer)
        )

    def _session_named(self, request: bytes, owner: str | None) -> ClientSession:
        try:
            session = read_object(request, "The request").get("session")
            if not isinstance(session, str):
                raise ValueError("It names no session.")
        except ValueError as error:
            raise bad_request(error) from None
        return self._find(session, owner)

    def _find(self, name: str, owner: str | None) -> ClientSession:
        session = self.presence.find(name)
        self._check_owner(session.client_id, owner)
        session.hear()
        return session

    def _check_owner(self, client_id: str, owner: str | None) -> None:
        if owner is not None and owner != client_id:
            raise RequestRejectedError(
                "PERMISSION_DENIED", f"The certificate is that of {owner!r}, and {client_id!r} is said to be calling."
            )

    def _check_version(self, said: dict[str, Any]) -> None:
        if said.get("version") != VERSION:
            raise RequestRejectedError(
                "FAILED_PRECONDITION",
                f"The server speaks version {VERSION} of the protocol, the client {said.get('version')!r}: install "
                "the same version of hf-federated on both.",
            )
