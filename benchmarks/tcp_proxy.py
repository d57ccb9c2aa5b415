"""`TcpProxy`: forwards connections to a server, and can delay, limit, hold or cut them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time


_BLOCK_BYTES = 1 << 16
# Blocks that wait for their time. A full queue stops the sender, as the buffers of a slow link do.
_MAX_BLOCKS = 1024


class _Direction:
    """
    One direction of a link, which all connections share.

    Args:
        delay (`float`): Seconds until a byte arrives.
        bytes_per_second (`float`, *optional*): Limit for all connections together.
    """

    def __init__(self, delay: float, bytes_per_second: float | None) -> None:
        self._delay, self._rate = delay, bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def arrival(self, num_bytes: int) -> float:
        """Return when a block arrives that is sent now."""
        now = time.monotonic()
        if self._rate is None:
            return now + self._delay
        with self._lock:
            self._free_at = max(now, self._free_at) + num_bytes / self._rate
            return self._free_at + self._delay


class TcpProxy:
    """
    Forwards bytes between clients and a server, in threads.

    Args:
        target (`str`): Address of the server, as `host:port`.
        address (`str`, *optional*, defaults to `"127.0.0.1:0"`): Address to listen on. Port 0 selects a free port.
        delay (`float`, *optional*, defaults to `0`): Seconds that bytes take in each direction.
        bytes_per_second (`float`, *optional*): Limit in each direction, for all connections together.

    Attributes:
        address (`str`): Address of the proxy, as `host:port`.
        num_forwarded (`int`): Bytes that have arrived, in both directions.
        is_accepting (`bool`): Whether new connections are forwarded. Otherwise they are closed at once.
    """

    def __init__(
        self,
        target: str,
        address: str = "127.0.0.1:0",
        *,
        delay: float = 0.0,
        bytes_per_second: float | None = None,
    ) -> None:
        self._target = _host_and_port(target)
        self._listener = socket.create_server(_host_and_port(address), backlog=512)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_forwarded = 0
        self.is_accepting = True
        self._directions = [_Direction(delay, bytes_per_second) for _ in range(2)]
        self._lock = threading.Lock()
        # Both sockets of each connection, and the connections that forward nothing.
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._held: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections. New connections are still forwarded."""
        with self._lock:
            connections, self._connections = self._connections, []
        for sockets in connections:
            for each in sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Let the present connections stay open and accept bytes, but forward nothing, not even their end."""
        with self._lock:
            for sockets in self._connections:
                self._held.update(sockets)

    def close(self) -> None:
        """Cut all connections, and accept no new connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Otherwise `accept` would still accept one connection.
        self._listener.close()
        self.cut()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self.is_accepting:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()  # The server has not started or was killed.
                    continue
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._connections.append((client, server))
                for direction, (source, goal) in zip(
                    self._directions, ((client, server), (server, client)), strict=True
                ):
                    blocks: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_BLOCKS)
                    threading.Thread(target=self._read, args=(source, direction, blocks), daemon=True).start()
                    threading.Thread(target=self._write, args=(source, goal, blocks), daemon=True).start()

    def _read(self, source: socket.socket, direction: _Direction, blocks: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_BLOCK_BYTES)
            except OSError:
                data = b""
            blocks.put((direction.arrival(len(data)), data))

    def _write(self, source: socket.socket, goal: socket.socket, blocks: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = blocks.get()
            time.sleep(max(due - time.monotonic(), 0))
            if source in self._held:
                if not data:
                    return
                continue
            try:
                if not data:
                    goal.shutdown(socket.SHUT_WR)
                    return
                goal.sendall(data)
                self.num_forwarded += len(data)
            except OSError:
                # Read the rest, so that the reader ends.
                with contextlib.suppress(OSError):
                    source.shutdown(socket.SHUT_RDWR)
                while blocks.get()[1]:
                    pass
                return


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
