"""A server and clients of split models on a loopback address, and a relay that interrupts their connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from hf_federated.security.certificates import create_certificates
from hf_federated.split import Cut, ModelFingerprint, SplitSessionConfig, Wire
from hf_federated.transport import GrpcLink, GrpcServer, TlsCredentials
from hf_federated.transport.protocol import HEADER_KEY, MessageHeader


CLIENTS = ["north", "south", "Zoë/2"]
SESSION_CONFIG = SplitSessionConfig(
    ModelFingerprint({"hidden_size": 32}, "", {}, commit="a1b2"), Cut(5), Wire("float32")
)


def certificates(folder: Path, clients: list[str] = CLIENTS) -> Path:
    """Create certificates for a server on loopback and for clients. Return the folder."""
    create_certificates(folder, ["localhost", "127.0.0.1"], clients, rsa_bits=2048)
    return folder


def serve(tls: Path, answer: Callable[[str, bytes], bytes], **settings: Any) -> GrpcServer:
    """A server with a certificate."""
    settings = {"clients": CLIENTS, "session_config": SESSION_CONFIG, "heartbeat_timeout": 20.0, **settings}
    return GrpcServer(answer, TlsCredentials.of_server(tls), **settings)


def join(tls: Path, server: GrpcServer | Relay, client_id: str = "north", **settings: Any) -> GrpcLink:
    """A link of a client with its certificate to a server or relay."""
    settings = {
        "session_config": SESSION_CONFIG,
        "connect_timeout": 10.0,
        "reconnect_timeout": 10.0,
        "answer_timeout": 20.0,
        **settings,
    }
    return GrpcLink(server.address, TlsCredentials.of_client(tls, client_id), client_id, **settings)


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition holds that other threads fulfill."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.005)


class Relay:
    """
    Forwards bytes between clients and a server, and can cut or silence the connections.

    A silenced connection stays open, but forwards no data.

    Attributes:
        address (`str`): Address of the relay, as `host:port`.
        connections (`list[int]`): Number of bytes that each connection forwarded to the server.
        cut_after (`int`, *optional*): Number of bytes in one direction after which all connections are cut, once.
        accepting (`threading.Event`): Whether new connections are forwarded. If cleared, they are closed at once.
        num_silenced (`int`): Number of silenced connections, counted from the first connection.
        silence_after (`int`, *optional*): Number of bytes in one direction after which all connections are silenced.
        received (`list[int]`): Number of bytes that each connection forwarded to the client.
        hold_after (`int`, *optional*): Number of bytes in one direction after which the first connection stays open,
            but forwards nothing more in any direction.
        holds_to_server (`bool`, *optional*): In which direction these bytes are counted. By default in both.
    """

    def __init__(self, server: GrpcServer) -> None:
        host, _, port = server.address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.connections: list[int] = []
        self.received: list[int] = []
        self.cut_after: int | None = None
        self.num_silenced = 0
        self.silence_after: int | None = None
        self.hold_after: int | None = None
        self.holds_to_server: bool | None = None
        self.accepting = threading.Event()
        self.accepting.set()
        self._open_sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Cut all connections. New connections are still forwarded."""
        while self._open_sockets:
            with contextlib.suppress(OSError):
                self._open_sockets.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut all connections, and accept no new connections."""
        with contextlib.suppress(OSError):
            # Without the shutdown, a blocked accept() would still accept one connection.
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
                self.received.append(0)
                self._open_sockets += [client, server]
                index = len(self.connections) - 1
                for arguments in ((client, server, index, True), (server, client, index, False)):
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, index: int, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            num_forwarded = 0
            while data := source.recv(1 << 16):
                if index < self.num_silenced:
                    continue
                is_counted = self.holds_to_server in (None, to_server)
                if (
                    index == 0
                    and is_counted
                    and self.hold_after is not None
                    and num_forwarded + len(data) > self.hold_after
                ):
                    self.num_silenced, data = 1, data[: self.hold_after - num_forwarded]
                target.sendall(data)
                num_forwarded += len(data)
                if self.silence_after is not None and num_forwarded > self.silence_after:
                    self.num_silenced = 1 << 20
                if self.cut_after is not None and num_forwarded > self.cut_after:
                    self.cut_after = None
                    self.cut()
                (self.connections if to_server else self.received)[index] += len(data)
        if index >= self.num_silenced:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


class CountingAnswer:
    """
    Answers every message with the number of processed messages and the message.

    Attributes:
        processed (`list[bytes]`): The processed messages.
        action (`Callable[[bytes], object]`): Called while a message is processed. Tests cut the connection or wait.
    """

    def __init__(self) -> None:
        self.processed: list[bytes] = []
        self.action = lambda message: None

    def __call__(self, client_id: str, message: bytes) -> bytes:
        self.processed.append(message)
        self.action(message)
        return f"{len(self.processed)}: ".encode() + message


def raw_exchange(tls: Path, address: str, client_id: str, header: MessageHeader, *chunks: bytes) -> bytes:
    """Send a message without the checks of `GrpcLink`, and return the answer."""
    certificate = tls / "clients" / f"{client_id}.pem"
    credentials = grpc.ssl_channel_credentials(
        (tls / "ca.pem").read_bytes(), certificate.with_suffix(".key").read_bytes(), certificate.read_bytes()
    )
    with grpc.secure_channel(address, credentials) as channel:
        call = channel.stream_stream("/hf_federated.Sessions/Exchange")
        return b"".join(call(iter(chunks), timeout=10, metadata=((HEADER_KEY, header.to_json()),)))
