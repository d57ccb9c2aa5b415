"""
The protocol between clients and a server over gRPC.

| method | kind | request | response |
|---|---|---|---|
| `Connect` | unary | JSON: version, client id, process token, session config | JSON: session id, timeouts, limits |
| `ExchangeSmall` | unary | JSON header and a message of up to 64 KiB | JSON header and answer, or empty |
| `Exchange`, `Hello`, `Finish` | stream | chunks; JSON header in the metadata | chunks, with a JSON header first |
| `Heartbeat`, `Leave` | unary | JSON: session id | JSON: empty object |

A client has at most `MAX_MESSAGES_IN_FLIGHT` messages without an answer, each in a separate call. The server processes
them in the order of their numbers, while later messages and earlier answers travel.

A response of `ExchangeSmall` is empty if the answer has more than one chunk. The client then sends the message again
with `Exchange`, and receives the stored answer.

Messages and answers are sent in chunks of 1 MiB, which is below gRPC's limit of 4 MiB per frame. Only the server's own
limit bounds the size of a message. The header of an answer contains the outcome of the processing. A gRPC error status
means that there is no outcome. No data is unpickled, and every field of the JSON objects is checked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, cast

from transformers.utils import logging

from ..utils.buffers import aligned_buffer
from ..utils.fields import Count, checks_of, problems_of
from ..utils.printable import printable, printable_traceback
from ..utils.untrusted_json import parse_json
from .errors import RequestRejectedError, ServerFailedError


logger = logging.get_logger(__name__)

VERSION = 5
SERVICE = "hf_federated.Sessions"
# The kind of message of each streaming method.
KINDS = {"Exchange": "exchange", "Hello": "hello", "Finish": "finish"}
HEADER_KEY = "hf-federated-message"
CHUNK_BYTES = 1 << 20
# The method for small messages, and the size of the largest one.
EXCHANGE_SMALL = "ExchangeSmall"
MAX_SMALL_MESSAGE_BYTES = 1 << 16
# Number of messages of a client without an answer, at most.
MAX_MESSAGES_IN_FLIGHT = 8
# Length of the field that contains the length of a header.
_LENGTH_BYTES = 4
DEFAULT_MAX_MESSAGE_BYTES = 1 << 30
# Largest message of a handshake, which has keys and signatures.
MAX_HANDSHAKE_BYTES = 1 << 20
# Largest JSON object of a request, which has the settings of a client, and of a header, which has an error message.
MAX_REQUEST_BYTES = 4 << 20
MAX_HEADER_BYTES = 1 << 18
# Largest number of values of a JSON object. The settings have a value for each file of a checkpoint.
_MAX_JSON_VALUES = 200_000
# gRPC drops a call whose metadata, including the status text, has more than 8 KiB. Escaping can triple the size of the
# text.
MAX_STATUS_CHARACTERS = 1500
MAX_TEXT_CHARACTERS = 8000

OutcomeKind = Literal["answer", "value_error", "timeout", "failed"]

T = TypeVar("T", bound="Header")
# A message. A large received message is a view of memory that can be written to, so its tensors need no copy.
Blob = bytes | memoryview


class Pieces(Protocol):
    """Bytes in pieces, which may be read several times."""

    def __len__(self) -> int:
        """Total number of bytes."""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """Iterate over the pieces."""


class JoinedPieces:
    """
    Bytes and pieces, one after the other, without a copy.

    Args:
        parts (`Blob` or [`Pieces`]): The parts.
    """

    def __init__(self, *parts: Blob | Pieces) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for part in self._parts:
            yield from [part] if isinstance(part, (bytes, memoryview)) else part


def split_into_chunks(blob: Blob | Pieces) -> Iterator[bytes]:
    """Split a blob into chunks of `CHUNK_BYTES`. The last chunk may be smaller."""
    buffer = bytearray()
    for piece in JoinedPieces(blob):
        view = memoryview(piece)
        while len(buffer) + len(view) >= CHUNK_BYTES:
            stop = CHUNK_BYTES - len(buffer)
            # Large pieces are copied once.
            yield b"".join([buffer, view[:stop]])
            view = view[stop:]
            buffer.clear()
        buffer += view
    if buffer:
        yield bytes(buffer)


def join_chunks(chunks: Iterable[bytes], num_bytes: int, on_chunk: Callable[[], None] | None = None) -> Blob:
    """
    Join the chunks of a blob, so that its bytes are in memory once.

    Args:
        chunks (`Iterable[bytes]`): The received chunks.
        num_bytes (`int`): Size of the blob according to its header.
        on_chunk (`Callable[[], None]`, *optional*): Called after each chunk.

    Returns:
        `bytes` or `memoryview`: The blob. It is `bytes` if it arrives in one chunk, and otherwise a writable view.

    Raises:
        ValueError: If more or fewer than `num_bytes` bytes arrive. Never more than `num_bytes` bytes are stored.
    """
    first, buffer = b"", memoryview(b"")
    num_received = 0
    for chunk in chunks:
        start, num_received = num_received, num_received + len(chunk)
        if num_received > num_bytes:
            raise ValueError(f"The header announces a message of {num_bytes} bytes, but more bytes arrived.")
        if start == 0:
            first = chunk
        else:
            if not buffer:
                # The system provides the memory when it is written, so a false announcement costs nothing.
                buffer = aligned_buffer(num_bytes)
                buffer[:start] = first
            buffer[start:num_received] = chunk
        if on_chunk is not None:
            on_chunk()
    if num_received < num_bytes:
        raise ValueError(f"The header announces a message of {num_bytes} bytes, but {num_received} bytes arrived.")
    return buffer or first


def parse_json_object(text: str | bytes, name: str, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, Any]:
    """
    Parse a JSON object.

    Args:
        text (`str` or `bytes`): The JSON text.
        name (`str`): Name of the object, for errors.
        max_bytes (`int`, *optional*): Largest number of bytes.

    Raises:
        ValueError: If the text is not a JSON object, or exceeds a limit.
    """
    try:
        parsed = parse_json(text, max_bytes, _MAX_JSON_VALUES)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a JSON object, got {type(parsed).__name__}.")
    return parsed


@dataclass(frozen=True)
class Header:
    """Base class of the headers. The fields are texts and counts."""

    def to_json(self) -> str:
        """Convert the header to JSON in ASCII, which the metadata of a call can contain."""
        return json.dumps(vars(self))

    def to_prefix(self) -> bytes:
        """Return four bytes with the length of the JSON, and the JSON. [`split_prefix`] splits them from a content."""
        text = self.to_json().encode("ascii")
        return len(text).to_bytes(_LENGTH_BYTES, "big") + text

    @classmethod
    def from_json(cls: type[T], text: str | bytes) -> T:
        """
        Parse a header.

        Raises:
            ValueError: If a field is missing or unknown, has another type, or is out of range.
        """
        values = parse_json_object(text, cls.__name__)
        names = checks_of(cast(Any, cls)).keys()
        if values.keys() != names:
            raise ValueError(
                f"{cls.__name__} must have the fields {[*names]}, but has the fields {printable(sorted(values), 500)}."
            )
        header = cls(**values)
        for name, problem in problems_of(header).items():
            raise ValueError(f"{name} of {cls.__name__} {problem}. The header has the fields {[*names]}.")
        return header


def split_prefix(blob: bytes, name: str) -> tuple[bytes, bytes]:
    """
    Split a blob that starts with `Header.to_prefix()`.

    Args:
        blob (`bytes`): The blob.
        name (`str`): Name of the blob, for errors.

    Returns:
        `tuple[bytes, bytes]`: The JSON of the header, and the content.

    Raises:
        ValueError: If the blob has no complete header.
    """
    stop = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "big")
    if not _LENGTH_BYTES < stop <= len(blob):
        raise ValueError(f"{name} has no header.")
    return blob[_LENGTH_BYTES:stop], blob[stop:]


@dataclass(frozen=True)
class ConnectResponse(Header):
    """
    The server's answer to a client that connects.

    Args:
        session (`str`): Id of the client's session.
        heartbeat_timeout_ms (`int`): Milliseconds without activity after which the server ends the session.
        max_message_bytes (`int`): Size of the largest message that the client may send.
        terms (`dict[str, Any]`, *optional*): The settings of the server, which the client compares with its own.
    """

    session: str
    heartbeat_timeout_ms: Count
    max_message_bytes: Count
    terms: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MessageHeader(Header):
    """
    The header of a client's message.

    Args:
        session (`str`): Id of the session.
        number (`int`): Number of the message in the session, from 0.
        token (`str`): Random token of the message. A repeated delivery has the same token. A different message with
            the same number, such as a message of a forked process, has another token.
        num_bytes (`int`): Size of the message.
        oldest (`int`): Number of the oldest message whose answer the client has not received. It confirms the answers
            to all messages before, which the server then drops.
    """

    session: str
    number: Count
    token: str
    num_bytes: Count
    oldest: Count


@dataclass(frozen=True)
class AnswerHeader(Header):
    """
    The header of the server's answer.

    Args:
        outcome (`str`): Outcome of the processing: `"answer"`, `"value_error"`, `"timeout"` or `"failed"`.
        text (`str`): The error message. Empty if the outcome is `"answer"`.
        num_bytes (`int`): Size of the answer.
    """

    outcome: OutcomeKind
    text: str
    num_bytes: Count


@dataclass(frozen=True)
class Outcome:
    """
    The outcome of processing a message. It can be sent more than once.

    Args:
        kind (`str`): `"answer"`, `"value_error"`, `"timeout"` or `"failed"`.
        blob (`Blob` or [`Pieces`], *optional*, defaults to `b""`): The answer.
        text (`str`, *optional*, defaults to `""`): The error message, if there is no answer.
    """

    kind: OutcomeKind
    blob: Blob | Pieces = b""
    text: str = ""

    @classmethod
    def from_call(cls, call: Callable[[], Blob | Pieces], description: str) -> Outcome:
        """
        Run a call and return its outcome.

        The client receives the text of a `ValueError` or a `TimeoutError`. Other errors can contain paths or secrets,
        so the client receives only their class name, and the server logs the text.

        Args:
            call (`Callable[[], Blob | Pieces]`): Returns the answer.
            description (`str`): Name of the processed message, for the log.
        """
        try:
            return cls("answer", call())
        except ValueError as error:
            return cls("value_error", text=str(error)[:MAX_TEXT_CHARACTERS])
        except TimeoutError as error:
            return cls("timeout", text=str(error)[:MAX_TEXT_CHARACTERS])
        except BaseException as error:
            # Also catch exceptions such as SystemExit: otherwise the client would wait for an answer.
            logger.error(f"{description} could not be answered.\n{printable_traceback(error)}")
            return cls("failed", text=type(error).__name__)

    def frames(self) -> Iterator[bytes]:
        """Yield the chunks of the header and the answer. The header is in the first chunk."""
        prefix = AnswerHeader(self.kind, self.text, len(self.blob)).to_prefix()
        if isinstance(self.blob, bytes) and len(prefix) + len(self.blob) <= CHUNK_BYTES:
            yield prefix + self.blob
        else:
            yield from split_into_chunks(JoinedPieces(prefix, self.blob))

    def to_frame(self) -> bytes:
        """Return the only chunk of the header and the answer, or `b""` if the answer has more than `CHUNK_BYTES`."""
        if len(self.blob) > CHUNK_BYTES:
            return b""
        return b"".join([AnswerHeader(self.kind, self.text, len(self.blob)).to_prefix(), *JoinedPieces(self.blob)])

    @classmethod
    def from_frames(cls, frames: Iterator[bytes], max_bytes: int) -> Outcome:
        """
        Read an outcome from its frames.

        Args:
            frames (`Iterator[bytes]`): The received frames.
            max_bytes (`int`): Size of the largest allowed answer.

        Raises:
            ValueError: If the frames are not an outcome, or the answer has more than `max_bytes`.
        """
        text, first = split_prefix(next(frames, b""), "The answer")
        header = AnswerHeader.from_json(text)
        if header.num_bytes > max_bytes:
            raise ValueError(f"The answer has {header.num_bytes} bytes, but at most {max_bytes} bytes are allowed.")
        blob = join_chunks(itertools.chain([first], frames), header.num_bytes)
        return cls(header.outcome, blob, header.text)

    def result(self) -> Blob:
        """
        Return the answer, or raise the error of the server.

        Raises:
            ValueError: If the server raised a `ValueError`. The text is the same, in one line.
            TimeoutError: If the server raised a `TimeoutError`. The text is the same, in one line.
            ServerFailedError: If the server raised another exception.
        """
        if self.kind == "answer":
            return self.blob if isinstance(self.blob, (bytes, memoryview)) else b"".join(self.blob)
        if self.kind == "value_error":
            raise ValueError(printable(self.text))
        if self.kind == "timeout":
            raise TimeoutError(printable(self.text))
        raise ServerFailedError(
            f"The server failed while it processed the message ({printable(self.text)}). See the log of the server."
        )


@contextlib.contextmanager
def rejected_if_invalid() -> Iterator[None]:
    """Reject a request that violates the protocol, which a `ValueError` in the context reports."""
    try:
        yield
    except ValueError as error:
        raise RequestRejectedError("INVALID_ARGUMENT", f"The request violates the protocol: {error}") from None
