"""One attempt to deliver a message of a link: by a unary call if the message is small, or by a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .connection import local_error
from .link_state import LinkState
from .protocol import (
    CHUNK_BYTES,
    HEADER_KEY,
    MAX_SMALL_MESSAGE_BYTES,
    SERVICE,
    MessageHeader,
    Outcome,
    split_into_chunks,
)


# A message in flight of this size fits into the buffers of a connection. The next one is sent at once.
_SMALL_BYTES = 1 << 14


class Attempts:
    """
    Sends messages of a link, each once. The link repeats an attempt that fails.

    Args:
        grpc (`Any`): The module `grpc`.
        state ([`~transport.link_state.LinkState`]): The state of the link.
        max_answer_bytes (`int`): Size of the largest answer that the client accepts.
    """

    def __init__(self, grpc: Any, state: LinkState, max_answer_bytes: int) -> None:
        self._grpc = grpc
        self._state = state
        self._max_answer_bytes = max_answer_bytes
        # Whether a unary call would probably return the answer, because the latest answer was small.
        self._expects_small_answer = True

    def send(
        self, method: str, header: MessageHeader, blob: bytes, on_sent: Callable[[], object] | None, timeout: float
    ) -> Outcome:
        """
        Send a message once, by a unary call if the message and its answer are small, and return the outcome.

        Args:
            method (`str`): The method for a stream.
            header ([`MessageHeader`]): Header of the message.
            blob (`bytes`): The message.
            on_sent (`Callable[[], object]`, *optional*): Called when the message has been sent. The message then
                travels by a stream, because a unary call does not report this time.
            timeout (`float`): Seconds to wait for the outcome.

        Raises:
            grpc.RpcError: If the call fails.
            ValueError: If the answer violates the protocol, or is too large.
            LinkError: If the link has ended.
        """
        if method != "Exchange" or on_sent is not None or len(blob) > MAX_SMALL_MESSAGE_BYTES:
            return self._send_by_stream(method, header, blob, on_sent, timeout)
        deadline = time.monotonic() + timeout
        outcome = self._send_by_unary_call(header, blob, timeout) if self._expects_small_answer else None
        if outcome is None:
            timeout = max(deadline - time.monotonic(), 0.01)
            outcome = self._send_by_stream(method, header, blob, on_sent, timeout)
            self._expects_small_answer = len(outcome.blob) <= CHUNK_BYTES
        return outcome

    def _send_by_unary_call(self, header: MessageHeader, blob: bytes, timeout: float) -> Outcome | None:
        """
        Send a small message by a unary call, which costs less than a stream.

        Returns:
            `Outcome`, *optional*: The outcome, or `None` if the answer is large.
        """
        state = self._state
        with state.lock:
            state.check_usable()
            state.has_unary_call, call = True, state.connection.exchange_small
        try:
            response: bytes = call(header.to_prefix() + blob, timeout)
        except ValueError:
            # The channel was closed before the call started.
            raise local_error(self._grpc, "CANCELLED", "The channel was closed.") from None
        finally:
            with state.lock:
                state.has_unary_call = False
        state.last_active_at = time.monotonic()
        return Outcome.from_frames(iter([response]), self._max_answer_bytes) if response else None

    def _send_by_stream(
        self, method: str, header: MessageHeader, blob: bytes, on_sent: Callable[[], object] | None, timeout: float
    ) -> Outcome:
        # The lock prevents a call from starting on a channel that is being replaced.
        with self._state.lock:
            # A stream needs a thread, but reports when the message has been sent. The server sees no difference.
            is_small = len(blob) <= (CHUNK_BYTES if on_sent is None else _SMALL_BYTES)
            channel = self._state.connection.channel
            start = channel.unary_stream if is_small else channel.stream_stream
            call = start(f"/{SERVICE}/{method}")(
                bytes(blob) if is_small else self._record_activity(split_into_chunks(blob), on_sent),
                timeout=timeout,
                metadata=((HEADER_KEY, header.to_json()),),
            )
            self._state.calls[header.number] = call
            if self._state.failure is not None:
                call.cancel()
        if is_small and on_sent is not None:
            on_sent()
        try:
            return Outcome.from_frames(self._record_activity(call), self._max_answer_bytes)
        finally:
            # Cancelling a completed call has no effect.
            call.cancel()
            with self._state.lock:
                self._state.calls.pop(header.number, None)

    def _record_activity(self, chunks: Iterator[bytes], on_end: Callable[[], object] | None = None) -> Iterator[bytes]:
        """
        Yield chunks, and record the time after each chunk as activity of the server.

        A sent chunk is also activity: gRPC requests the next chunk only after it transmitted the previous chunk.
        """
        for chunk in chunks:
            yield chunk
            self._state.last_active_at = time.monotonic()
        if on_end is not None:
            on_end()
