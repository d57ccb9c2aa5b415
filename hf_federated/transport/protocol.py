"""What a client and a server of a split model say to each other over gRPC, and in which form.

| method | kind | request | response |
|---|---|---|---|
| `Connect` | unary | JSON: version, client id, the process's own token, terms | JSON: session, timeouts, limits |
| `Exchange`, `Hello`, `Finish` | stream | chunks; the header is JSON in the call's metadata | JSON header, chunks |
| `Heartbeat`, `Leave` | unary | JSON: session | JSON: nothing |

Messages and answers travel in chunks of 1 MiB, so gRPC's limit of 4 MiB a frame holds for every call and the size of
a message is bounded by what the server states alone. What an answer's header says is how the answering ended; what
gRPC's status says is that nothing was answered. Nothing is unpickled, and JSON is read with every field checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from transformers.utils import logging

from .errors import RequestRejectedError, ServerFailedError


logger = logging.get_logger(__name__)

VERSION = 1
SERVICE = "hf_federated.Split"
# What a message asks of the server's end of a link, by method.
KINDS = {"Exchange": "exchange", "Hello": "hello", "Finish": "finish"}
HEADER_KEY = "hf-federated-message"
CHUNK_BYTES = 1 << 20
DEFAULT_MAX_MESSAGE_BYTES = 1 << 30
# gRPC drops a call whose metadata, status text included, has more than 8 KiB, and text may be escaped to thrice its
# size on the way.
MAX_STATUS_CHARACTERS = 1500
MAX_TEXT_CHARACTERS = 8000

OutcomeKind = Literal["answer", "value_error", "timeout", "failed"]
_OUTCOME_KINDS: tuple[OutcomeKind, ...] = ("answer", "value_error", "timeout", "failed")

T = TypeVar("T", bound="Header")


def chunks(blob: bytes) -> Iterator[bytes]:
    """A blob in pieces of at most `CHUNK_BYTES`."""
    view = memoryview(blob)
    return (bytes(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES))


def gather(pieces: Iterable[bytes], num_bytes: int, on_piece: Callable[[], None] | None = None) -> bytes:
    """
    The blob that came in pieces.

    Args:
        pieces (`Iterable[bytes]`): What comes.
        num_bytes (`int`): How many bytes were announced.
        on_piece (`Callable[[], None]`, *optional*): Called after each piece.

    Raises:
        ValueError: If there are more or fewer bytes. Not more than announced are kept.
    """
    parts: list[bytes] = []
    came = 0
    for piece in pieces:
        came += len(piece)
        if came > num_bytes:
            raise ValueError(f"A message of {num_bytes} bytes was announced, and more came.")
        parts.append(piece)
        if on_piece is not None:
            on_piece()
    if came < num_bytes:
        raise ValueError(f"A message of {num_bytes} bytes was announced, and {came} came.")
    return b"".join(parts)


def read_object(text: str | bytes, what: str) -> dict[str, Any]:
    """
    A JSON object.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is not JSON.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is a JSON object, got {type(found).__name__}.")
    return found


@dataclass(frozen=True)
class Header:
    """Base of the headers: text and whole numbers from 0, as JSON in ASCII."""

    def to_text(self) -> str:
        """As JSON in ASCII, which may stand in a call's metadata."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls: type[T], text: str | bytes) -> T:
        """
        Raises:
            ValueError: If a field is missing, of another type, below zero or not declared.
        """
        found = read_object(text, cls.__name__)
        types = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if found.keys() != types.keys() or not all(type(found[name]) is kind for name, kind in types.items()):
            raise ValueError(f"{cls.__name__} has the fields {types}, got {sorted(found)}.")
        if any(type(value) is int and value < 0 for value in found.values()):
            raise ValueError(f"{cls.__name__} holds a number below zero.")
        return cls(**found)


@dataclass(frozen=True)
class ConnectResponse(Header):
    """
    What a server grants a client that connects.

    Args:
        session (`str`): The name of its session.
        heartbeat_timeout_ms (`int`): Milliseconds of silence after which it is lost.
        max_message_bytes (`int`): The largest message that it may send.
    """

    session: str
    heartbeat_timeout_ms: int
    max_message_bytes: int


@dataclass(frozen=True)
class MessageHeader(Header):
    """
    What a client says of a message.

    Args:
        session (`str`): As the server named it.
        number (`int`): Messages of the session before this one.
        token (`str`): Drawn for this message. The same message has it when it comes again, and another that got the
            same number, such as a forked process's, has not.
        num_bytes (`int`): Of the message.
    """

    session: str
    number: int
    token: str
    num_bytes: int


@dataclass(frozen=True)
class AnswerHeader(Header):
    """
    What a server says of an answer.

    Args:
        outcome (`str`): How the answering ended: `"answer"`, `"value_error"`, `"timeout"` or `"failed"`.
        text (`str`): What was wrong; empty for an answer.
        num_bytes (`int`): Of the answer.
    """

    outcome: str
    text: str
    num_bytes: int


@dataclass(frozen=True)
class Outcome:
    """
    How the answering of a message ended. It may be told more than once.

    Args:
        kind (`str`): `"answer"`, `"value_error"`, `"timeout"` or `"failed"`.
        blob (`bytes`): The answer.
        text (`str`): What was wrong, in place of an answer.
    """

    kind: OutcomeKind
    blob: bytes = b""
    text: str = ""

    @classmethod
    def of(cls, do: Callable[[], bytes], of_what: str) -> Outcome:
        """
        Do it. Of a `ValueError` and a `TimeoutError` the text is for the client; of anything else, which may hold
        paths or worse, it is for this process's log.
        """
        try:
            return cls("answer", do())
        except ValueError as error:
            return cls("value_error", text=str(error)[:MAX_TEXT_CHARACTERS])
        except TimeoutError as error:
            return cls("timeout", text=str(error)[:MAX_TEXT_CHARACTERS])
        except BaseException as error:
            # Whatever ends a thread must not leave its client waiting.
            logger.exception(f"{of_what} could not be answered.")
            return cls("failed", text=type(error).__name__)

    def frames(self) -> Iterator[bytes]:
        """What travels: the header and the answer in pieces."""
        yield AnswerHeader(self.kind, self.text, len(self.blob)).to_text().encode("ascii")
        yield from chunks(self.blob)

    @classmethod
    def from_frames(cls, frames: Iterator[bytes], max_bytes: int) -> Outcome:
        """
        What came.

        Raises:
            ValueError: If it is no outcome, or has more than `max_bytes`.
        """
        first = next(frames, None)
        if first is None:
            raise ValueError("An answer came without its header.")
        header = AnswerHeader.from_text(first)
        if header.outcome not in _OUTCOME_KINDS:
            raise ValueError(f"An answer ends in one of {_OUTCOME_KINDS}, got {header.outcome!r}.")
        if header.num_bytes > max_bytes:
            raise ValueError(f"An answer of {header.num_bytes} bytes came; at most {max_bytes} are taken.")
        blob = gather(frames, header.num_bytes)
        return cls(header.outcome, blob, header.text)

    def result(self) -> bytes:
        """
        The answer.

        Raises:
            ValueError: What the server's answering raised, by its text.
            TimeoutError: As well.
            ServerFailedError: If it raised anything else.
        """
        if self.kind == "answer":
            return self.blob
        if self.kind == "value_error":
            raise ValueError(self.text)
        if self.kind == "timeout":
            raise TimeoutError(self.text)
        raise ServerFailedError(f"The server failed while it answered ({self.text}). Its log says why.")


def bad_request(error: ValueError) -> RequestRejectedError:
    """The refusal of what is not of this protocol."""
    return RequestRejectedError("INVALID_ARGUMENT", f"What came is not of this protocol: {error}")
