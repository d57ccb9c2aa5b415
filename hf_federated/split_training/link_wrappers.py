"""Links on which what crosses is counted, and for parties in one process sealed where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..messages.serialization import packed_kind
from ..security.encryption import ClientSession, Identity, ServerSession
from ..security.sealed import SealedCarrier, SealedLink, SealedServer
from ..split.boundary import Link
from .messages import Late


# Client, bytes up, bytes down.
Count = Callable[[str, int, int], None]


class CountedLink:
    """
    A link that counts what it carries.

    Args:
        link ([`~split.Link`]): What carries it.
        client_id (`str`): Whose messages they are.
        count (`Callable[[str, int, int], None]`): Is told the client, and the bytes up and down of each exchange.
    """

    def __init__(self, link: Link, client_id: str, count: Count) -> None:
        self.link = link
        self.client_id = client_id
        self.count = count

    def exchange(self, blob: bytes) -> bytes:
        """Carry a message and its answer."""
        answer = self.link.exchange(blob)
        self.count(self.client_id, len(blob), len(answer))
        return answer

    def end_step(self) -> None:
        """An optimizer step ended."""
        self.link.end_step()


class _CountedEnd:
    """The server's end of a sealed link, or what carries messages to it, where what is sealed is counted."""

    def __init__(self, server: SealedCarrier, client_id: str, count: Count) -> None:
        self.server = server
        self.client_id = client_id
        self.count = count

    def hello(self, hello: bytes) -> bytes:
        reply = self.server.hello(hello)
        self.count(self.client_id, len(hello), len(reply))
        return reply

    def finish(self, finish: bytes) -> None:
        self.server.finish(finish)
        self.count(self.client_id, len(finish), 0)

    def exchange(self, sealed: bytes) -> bytes:
        answer = self.server.exchange(sealed)
        self.count(self.client_id, len(sealed), len(answer))
        return answer

    def check_size(self, num_bytes: int) -> None:
        self.server.check_size(num_bytes)


def counted(link: Link, client_id: str, count: Count) -> Link:
    """
    A link that counts what crosses: of a sealed one what is sealed, and the handshakes.

    Args:
        link ([`~split.Link`]): A client's.
        client_id (`str`): Whose it is.
        count (`Callable[[str, int, int], None]`): As of [`CountedLink`].
    """
    if isinstance(link, SealedLink):
        return SealedLink(link.session, _CountedEnd(link.server, client_id, count))
    return CountedLink(link, client_id, count)


def sealed(link: Link, client_id: str, server: Identity, rotate_every: int) -> SealedLink:
    """
    A sealed link to what another link leads to, with keys of its own.

    Args:
        link ([`~split.Link`]): What carries a message once it is opened.
        client_id (`str`): Whose it is.
        server ([`~split.encryption.Identity`]): The server's.
        rotate_every (`int`): Steps for which keys last.

    Raises:
        ImportError: Without the extra `split`.
    """
    client = Identity.generate(client_id)
    there = ServerSession(server, client_id, client.fingerprint, rotate_every=rotate_every)
    here = ClientSession(client, server.name, server.fingerprint, rotate_every=rotate_every)
    return SealedLink(here, SealedServer(there, link.exchange))


class LateError(RuntimeError):
    """The others waited for this client as long as they may, and the step went on without it."""


class RunLink:
    """
    A client's link to the server of a run, for passages and for what is said about the run.

    Args:
        link ([`~split.Link`]): What carries messages.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    def exchange(self, blob: bytes) -> bytes:
        """
        Carry a message and its answer.

        Raises:
            LateError: If the step went on without this client.
        """
        answer = self.link.exchange(blob)
        if packed_kind(answer) == Late.kind:
            raise LateError("The step went on without this client.")
        return answer

    def end_step(self) -> None:
        """An optimizer step ended."""
        self.link.end_step()

    def ask(self, message: Any, answer: type[Any]) -> Any:
        """The answer to what is said about the run."""
        return answer.from_bytes(self.exchange(message.to_bytes()))
