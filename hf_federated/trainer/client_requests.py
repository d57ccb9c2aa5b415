"""`ClientRequests`: the requests of a server on another machine, in all processes of a client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ..distributed.process_group import ProcessGroup
from ..transport import AnswerTimeoutError, Connection, ServerUnreachableError, SessionLostError
from ..transport.framing import unframe
from ..utils.printable import printable


logger = logging.get_logger(__name__)

# While the main process waits for the server, the processes communicate at this interval, so that each of them notices
# the end of another one.
_POLL_SECONDS = 1.0
_CHUNK_BYTES = 32 * 2**20

_Found = tuple[dict[str, Any], memoryview] | None


@dataclass(frozen=True)
class Request:
    """
    A request of the server.

    Args:
        state (`str`): Name of the state from which the client starts. Empty for the state before the first request.
        keep (`list[str]`): Names of the states to keep.
        num_clients (`int`): Number of clients of the federation.
        content (`memoryview`): The message.
    """

    state: str
    keep: list[str]
    num_clients: int
    content: memoryview


class ClientRequests:
    """
    The requests of the server to a client, in all processes of the client's launch.

    The main process has the connection. It passes each request to the other processes.

    Args:
        client_id (`str`): Id of the client.
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The processes of the launch.
        connect (`Callable[[], Connection]`): Connects the client to the server. It is called again if the session is
            lost.

    Attributes:
        end (`str`, *optional*): Why the run has ended: empty if it is complete, `None` while it goes on.
    """

    def __init__(self, client_id: str, processes: ProcessGroup, connect: Callable[[], Connection]) -> None:
        self.end: str | None = None
        self._client_id = client_id
        self._processes = processes
        self._connect = connect
        self._is_closed = False
        self._connection = connect() if processes.is_main else None

    def receive(self, reply: bytes | None = None) -> Request | None:
        """
        Send a reply, if there is one, and wait for the next request. All processes must call this method.

        Args:
            reply (`bytes`, *optional*): Reply to the last request. Only the reply of the main process is sent.

        Returns:
            [`Request`], *optional*: The next request. `None` if the run has ended; `end` then has the reason.

        Raises:
            LinkError: If the connection ended. The other processes raise [`PeerFailedError`].
        """
        if self._processes.world_size == 1:
            found = self._receive_here(reply)
            return None if found is None else Request(**found[0], content=found[1])
        # Only the main process has a connection. It waits in a thread.
        result = self._start(reply) if self._processes.is_main else Future()
        label = f"next request to client {self._client_id!r}"
        received: dict[str, Any] = {"kind": "waiting"}
        found = None
        while received["kind"] == "waiting":

            def poll() -> dict[str, Any]:
                nonlocal found
                if not wait([result], _POLL_SECONDS).done:
                    return {"kind": "waiting"}
                found = result.result()
                if found is None:
                    return {"kind": "end", "end": self.end}
                return {"kind": "request", "header": found[0], "num_bytes": len(found[1])}

            received = self._processes.run_on_main(label, poll)
        if received["kind"] == "end":
            self.end = received["end"]
            return None
        content = self._share(None if found is None else found[1], received["num_bytes"])
        return Request(**received["header"], content=content)

    def close(self) -> None:
        """Disconnect from the server."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    def _start(self, reply: bytes | None) -> Future[_Found]:
        """Wait for the next request in a thread, which ends with this process."""
        result: Future[_Found] = Future()

        def run() -> None:
            try:
                result.set_result(self._receive_here(reply))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=f"requests-{self._client_id}", daemon=True).start()
        return result

    def _share(self, content: memoryview | None, num_bytes: int) -> memoryview:
        """Return the content of the main process in all processes."""
        buffer = torch.empty(0 if content is not None else num_bytes, dtype=torch.uint8)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, num_bytes)
            if content is not None:
                chunk = torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8)
            else:
                chunk = buffer[start:stop]
            self._processes.broadcast_([chunk], source=0)
        return memoryview(buffer.numpy().data) if content is None else content

    def _receive_here(self, reply: bytes | None) -> _Found:
        """Return the header and the content of the next request. Connect again if the session is lost."""
        while True:
            if self._connection is None:
                raise RuntimeError("Only the main process of a client has a connection.")
            try:
                blob = self._connection.receive(reply)
                break
            except (SessionLostError, ServerUnreachableError, AnswerTimeoutError) as error:
                logger.warning(
                    f"The connection to the server ended: {error} Client {self._client_id!r} connects again."
                )
                self._connection.close()
                self._connection = self._connect()
                if self._is_closed:
                    self._connection.close()
                # If the server still waits for the reply, it asks again.
                reply = None
        if blob is None:
            end = self._connection.end
            self.end = None if end is None else printable(end)
            return None
        header, content = unframe(blob, state=str, keep=list, num_clients=int)
        if not all(isinstance(name, str) for name in header["keep"]):
            raise ValueError("The header of a request must name states with texts.")
        return header, content
