"""A server and clients of split models on loopback, and a connection between them that a test can break."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_federated.security.certificates import create_certificates
from hf_federated.split import Cut, ModelFingerprint, SplitSessionConfig, Wire
from hf_federated.transport import GrpcLink, SplitServer, TlsCredentials


CLIENTS = ["north", "south", "Zoë/2"]
TERMS = SplitSessionConfig(ModelFingerprint({"hidden_size": 32}, "", {}, commit="a1b2"), Cut(5), Wire("float32"))


def certificates(folder: Path, clients: list[str] = CLIENTS) -> Path:
    """A folder of them for a server on loopback."""
    create_certificates(folder, ["localhost", "127.0.0.1"], clients, rsa_bits=2048)
    return folder


def serve(tls: Path, answer: Callable[[str, bytes], bytes], **settings: Any) -> SplitServer:
    """A server with a certificate."""
    settings = {"clients": CLIENTS, "terms": TERMS, "heartbeat_timeout": 20.0, **settings}
    return SplitServer(answer, TlsCredentials.of_server(tls), **settings)


def join(tls: Path, server: SplitServer | Relay, client_id: str = "north", **settings: Any) -> GrpcLink:
    """A client's link to it, by its own certificate."""
    settings = {"terms": TERMS, "connect_timeout": 10.0, "reconnect_timeout": 10.0, "answer_timeout": 20.0, **settings}
    return GrpcLink(server.address, TlsCredentials.of_client(tls, client_id), client_id, **settings)


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


class Relay:
    """
    Carries bytes between clients and a server, until it is told to cut its connections.

    Attributes:
        connections (`list[int]`): Of each connection, the bytes that went to the server.
        cut_after (`int`, *optional*): Bytes in one direction after which the connections are cut, once.
        accepting (`threading.Event`): Whether new connections are carried; cleared, they are broken at once.
        silenced (`int`): Of so many connections, from the first, nothing is carried, and they stand.
        silence_after (`int`, *optional*): Bytes in one direction after which all connections are silenced.
    """

    def __init__(self, server: SplitServer) -> None:
        host, _, port = server.address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.connections: list[int] = []
        self.cut_after: int | None = None
        self.silenced = 0
        self.silence_after: int | None = None
        self.accepting = threading.Event()
        self.accepting.set()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break all connections. New ones are carried."""
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break all connections, and take no more."""
        with contextlib.suppress(OSError):
            # Closing alone would let one more in.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self.accepting.is_set():
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self.connections.append(0)
                self._open += [client, server]
                number = len(self.connections) - 1
                for ends in ((client, server, number, True), (server, client, number, False)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, number: int, counted: bool) -> None:
        with contextlib.suppress(OSError):
            carried = 0
            while data := source.recv(1 << 16):
                if number < self.silenced:
                    continue
                target.sendall(data)
                carried += len(data)
                if self.silence_after is not None and carried > self.silence_after:
                    self.silenced = 1 << 20
                if self.cut_after is not None and carried > self.cut_after:
                    self.cut_after = None
                    self.cut()
                if counted:
                    self.connections[number] += len(data)
        if number >= self.silenced:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
