"""`Transport` and `Connection`: the two ends of what carries messages between a server and clients on other machines.

Both carry blobs of bytes and do not interpret them. [`GrpcTransport`] and [`GrpcConnection`] are those of this
library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from .protocol import Blob, Pieces
from .session_config import SessionConfig


@dataclass(frozen=True)
class Event:
    """
    What happened to a client.

    Args:
        kind (`str`): `"joined"`, `"reply"`, `"left"`, or `"lost"` for a client that the server no longer hears.
        client_id (`str`): Id of the client.
        blob (`Blob`, *optional*, defaults to `b""`): The reply, or what the client announced when it joined.
    """

    kind: Literal["joined", "reply", "left", "lost"]
    client_id: str
    blob: Blob = b""


class Transport(ABC):
    """
    Carries requests to clients on other machines, and their replies back.

    Each client has at most one open request. A client that joins again receives its open request again. One thread
    calls all methods.
    """

    @abstractmethod
    def start(self, client_ids: Sequence[str], session_config: SessionConfig) -> None:
        """
        Accept clients.

        Args:
            client_ids (`Sequence[str]`): Ids of the clients that may join.
            session_config ([`SessionConfig`]): Settings that a client must share with the server. A client with other
                settings is refused, with the names of the settings and both values.
        """

    @abstractmethod
    def send(self, client_id: str, build: Callable[[], bytes | Pieces]) -> None:
        """
        Open a request to a client. It replaces the open request of the client.

        Args:
            client_id (`str`): Id of the client.
            build (`Callable[[], bytes | Pieces]`): Builds the request when it is sent. It may be called several times,
                and from any thread.
        """

    @abstractmethod
    def withdraw(self, client_id: str) -> None:
        """Close the open request of a client, if there is one. A reply to the request is ignored."""

    @abstractmethod
    def receive(self, timeout: float | None) -> Event | None:
        """
        Return the next event.

        Args:
            timeout (`float`, *optional*): Seconds to wait. By default there is no limit.

        Returns:
            [`Event`], *optional*: The event, or `None` after the timeout.
        """

    @abstractmethod
    def is_connected(self, client_id: str) -> bool:
        """Whether a client has joined and has neither left nor been lost."""

    def seconds_since_heard(self, client_id: str) -> float | None:
        """Seconds since the last sign of a connected client, or `None` if the transport does not know."""
        return None

    def expel(self, client_id: str, reason: str = "") -> None:
        """
        Disconnect a client and refuse it from now on. By default, only its open request is closed.

        Args:
            client_id (`str`): Id of the client.
            reason (`str`, *optional*): Why, as a sentence for the client. By default, the operator expelled it.
        """
        self.withdraw(client_id)

    @abstractmethod
    def stop(self, reason: str = "") -> None:
        """
        Tell the connected clients that the run has ended, and refuse further clients.

        Args:
            reason (`str`, *optional*): Why the run failed. Empty if the run is complete.
        """


class Connection(AbstractContextManager["Connection"]):
    """
    A client's end of a [`Transport`]. The constructor connects, compares the settings and announces the client.

    A connection is a context manager that closes on exit.

    Attributes:
        end (`str`, *optional*): Why the run has ended: empty if it is complete, `None` while it goes on.
    """

    end: str | None = None

    @abstractmethod
    def receive(self, reply: bytes | None = None) -> Blob | None:
        """
        Send a reply, if there is one, and wait for the next request.

        Args:
            reply (`bytes`, *optional*): Reply to the last request.

        Returns:
            `Blob`, *optional*: The next request. `None` if the run has ended; `end` then has the reason.

        Raises:
            LinkError: If the connection ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect from the server."""

    def __exit__(self, *exception: object) -> None:
        self.close()


# Connects a client, with the settings that it must share with the server and with its announcement.
Connector = Callable[[SessionConfig, bytes], Connection]
