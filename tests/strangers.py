"""
Connections of strangers to a split server, in a process without torch.

    python tests/strangers.py ADDRESS FOLDER NAME NUMBER KIND [KIND ...]

The process opens `NUMBER` connections of each kind, prints `ready`, and holds the connections until its input ends. A
connection that the server ends is opened again after a pause. At the end the process prints the number of connections
and calls that the server refused or ended, by kind.

- `half_open`: calls with a certificate of the right authority and an unknown name, which never send a message.
- `idle`: half of the connections send nothing, half complete the TLS handshake and send nothing more.
- `slow`: the TLS handshake, one byte per second.
- `garbage`: random bytes, in half of the connections after the TLS handshake.
"""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc


# A call without a message keeps the handler of a unary method waiting.
METHODS = ("Connect", "Connect", "Connect", "Heartbeat", "Leave", "Exchange")
PAUSE = 1.0
KINDS = ("half_open", "idle", "slow", "garbage")


@contextlib.contextmanager
def strangers(folder: Path, address: str, number: int, kinds: tuple[str, ...]) -> Iterator[None]:
    """Hold connections of strangers with the certificate `stranger`, from another process, in the context."""
    command = [sys.executable, __file__, address, str(folder), "stranger", str(number), *kinds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        yield
        output, _ = process.communicate(timeout=60)
    print(output)


class Strangers:
    """
    Connections of strangers.

    Args:
        address (`str`): Address of the server, as `host:port`.
        folder (`Path`): Folder with the certificates.
        name (`str`): Name of the strangers' certificate.
    """

    def __init__(self, address: str, folder: Path, name: str) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._paths = [folder / "ca.pem", folder / "clients" / f"{name}.key", folder / "clients" / f"{name}.pem"]
        self.stopped = threading.Event()
        self.num_opened: collections.Counter[str] = collections.Counter()
        self.num_ended: collections.Counter[str] = collections.Counter()
        self._threads: list[threading.Thread] = []

    def open(self, kind: str, number: int) -> None:
        """Open and hold connections of a kind."""
        method = {
            "half_open": self._half_open,
            "idle": self._idle,
            "slow": self._slow,
            "garbage": self._garbage,
        }[kind]
        for index in range(number):
            thread = threading.Thread(target=self._repeat, args=(kind, method, index), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End all connections."""
        self.stopped.set()

    def _repeat(self, kind: str, method, index: int) -> None:
        while not self.stopped.is_set():
            with contextlib.suppress(OSError, grpc.RpcError):
                method(kind, index)
            if not self.stopped.is_set():
                self.num_ended[kind] += 1
                self.stopped.wait(PAUSE)

    def _half_open(self, kind: str, index: int) -> None:
        credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in self._paths))
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        with grpc.secure_channel(self.address, credentials, options) as channel:

            def messages():
                self.stopped.wait()
                yield from ()

            method = METHODS[index % len(METHODS)]
            call = channel.stream_stream(f"/hf_federated.Sessions/{method}")(messages(), wait_for_ready=True)
            self.num_opened[kind] += 1
            list(call)

    def _connect(self, kind: str, with_tls: bool) -> socket.socket:
        connection: socket.socket = socket.create_connection(self._target, timeout=600)
        if with_tls:
            context = ssl.create_default_context(cafile=str(self._paths[0]))
            context.check_hostname = False
            context.load_cert_chain(self._paths[2], self._paths[1])
            context.set_alpn_protocols(["h2"])
            connection = context.wrap_socket(connection)
        self.num_opened[kind] += 1
        return connection

    def _idle(self, kind: str, index: int) -> None:
        with self._connect(kind, with_tls=bool(index % 2)) as connection:
            self._wait_for_end(connection)

    def _slow(self, kind: str, index: int) -> None:
        hello, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = ssl.create_default_context().wrap_bio(incoming, hello, server_hostname="localhost")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        with self._connect(kind, with_tls=False) as connection:
            for byte in hello.read():
                connection.sendall(bytes([byte]))
                if self.stopped.wait(1.0):
                    return

    def _garbage(self, kind: str, index: int) -> None:
        with self._connect(kind, with_tls=bool(index % 2)) as connection:
            connection.sendall(random.Random(index).randbytes(1 << 12))
            self._wait_for_end(connection)

    def _wait_for_end(self, connection: socket.socket) -> None:
        connection.settimeout(0.5)
        while not self.stopped.is_set():
            try:
                if not connection.recv(1 << 12):
                    return
            except TimeoutError:
                continue


def main(address: str, folder: str, name: str, number: str, *kinds: str) -> None:
    strangers = Strangers(address, Path(folder), name)
    for kind in kinds:
        strangers.open(kind, int(number))
    while any(strangers.num_opened[kind] < int(number) for kind in kinds):
        strangers.stopped.wait(0.05)
    print("ready", flush=True)
    sys.stdin.read()
    strangers.stop()
    print(dict(strangers.num_opened), dict(strangers.num_ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
