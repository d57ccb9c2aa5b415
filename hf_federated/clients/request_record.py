"""`RequestRecord`: the requests that a client has agreed to, so that a server cannot ask for more answers in a round.

A server that resumes a run repeats its requests. A client therefore answers a request again if the request has the
same content and starts from the same state of the client, and refuses another request in its place.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from ..messages import Message
from ..utils.fields import Count, check_values
from ..utils.journal import Journal


REQUESTS_FILE = "requests.jsonl"
# Largest number of replies that a client keeps. It computes older ones again if a server that resumes repeats them.
MAX_REPLIES = 32
_END = {"end": "complete"}


@dataclass(frozen=True)
class _Entry:
    """A request. Its nonce is the name of the client's state after it, and `start` the name of the state before it."""

    kind: str
    client_id: str
    round: Count
    amount: Count
    digest: str
    nonce: str
    start: str
    phase: Count | None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.client_id, self.round


class RequestRecord:
    """
    The requests that a client has agreed to.

    Args:
        folder (`pathlib.Path`, *optional*): Folder of the file, so that the record survives the process. By default,
            the record is in memory.
        agreement (`str`, *optional*): Digest of what the client agreed to. The record of another agreement is dropped,
            as is the record of a complete run.
        writes (`bool`, *optional*, defaults to `True`): Whether this process writes the file.
        saved (`list[dict[str, Any]]`, *optional*): Entries of the file, so that all processes decide alike.
            By default, the process reads the file.

    Attributes:
        run (`str`): Random id of the run. A new record has a new id.
        num_refused (`int`): Number of requests that the client refused in this run.

    Raises:
        ValueError: If the file is damaged.
    """

    def __init__(
        self,
        folder: Path | None = None,
        agreement: str = "",
        writes: bool = True,
        saved: list[dict[str, Any]] | None = None,
    ) -> None:
        self._journal = None if folder is None else Journal(folder / REQUESTS_FILE)
        self._writes = writes
        self.run = secrets.token_hex(8)
        self.num_refused = 0
        # Nonce of the last request that repeats no earlier one.
        self.last = ""
        # Name of the state from which the client answers the next request.
        self.start = ""
        # The entries by kind, client and round, and then by digest and state.
        self._entries: defaultdict[tuple[str, str, int], dict[tuple[str, str], _Entry]] = defaultdict(dict)
        self._last_rounds: Counter[str] = Counter()
        # The last phase of each client and round.
        self._phases: Counter[tuple[str, int]] = Counter()
        # The nonces of all requests, in their order, each with the nonce of the first request that it repeats.
        self._nonces: dict[str, str] = {}
        # The last request whose digest was computed, and the digest.
        self._digested: tuple[weakref.ref[Message], str] | None = None
        if self._journal is None:
            return
        saved = self._journal.read() if saved is None else saved
        first = saved[0] if saved else {}
        if first.get("agreement") == agreement and saved[-1] != _END:
            self.run = str(first.get("run", ""))
            for fields in saved[1:]:
                self._load(fields)
        elif writes:
            self._journal.replace([{"agreement": agreement, "run": self.run}])

    @property
    def path(self) -> Path | None:
        """The file of the record, if it has one."""
        return None if self._journal is None else self._journal.path

    def add(self, request: Message, amount: int, largest: int, is_durable: bool = True) -> str | None:
        """
        Add a request before the client computes the reply. A request with the content of an earlier one is allowed.

        Args:
            request ([`Message`]): The request.
            amount (`int`): What the request asks for, such as a number of public examples.
            largest (`int`): Largest sum of the amounts of different requests of this kind in a round.
            is_durable (`bool`, *optional*, defaults to `True`): Whether the entry must survive a power failure.

        Returns:
            `str`, *optional*: Why the request is not allowed, as the predicate of a sentence about its round.
        """
        entry = self._entry(request, amount)
        entries = self._entries[entry.key]
        if (entry.digest, entry.start) not in entries:
            if request.round < (last := self._last_rounds[request.client_id]):
                return f"is {request.round}, but the client has answered requests of round {last}"
            phase = self._phases[request.client_id, request.round]
            if request.phase is not None and request.phase < phase:
                return f"is {request.round}, of which the client has answered requests of a later phase"
            answered = sum(each.amount for each in entries.values())
            if answered + amount > largest:
                return f"is {request.round}, in which the client has already answered {answered}"
        self._keep(entry)
        self._write(asdict(entry), is_durable)
        return None

    def amount(self, kind: str, client_id: str, round: int) -> int:
        """Return the sum of the amounts of the requests of a kind in a round."""
        return sum(entry.amount for entry in self._entries.get((kind, client_id, round), {}).values())

    def earlier(self, request: Message) -> str | None:
        """
        Return the nonce of the last request with the same content and the same state.

        Args:
            request ([`Message`]): A request.
        """
        entry = self._entry(request)
        found = self._entries[entry.key].get((entry.digest, entry.start))
        return None if found is None else found.nonce

    def since(self, nonces: Collection[str]) -> list[str]:
        """
        Return the nonces of the last requests after some requests, at most [`MAX_REPLIES`], the last one first.

        Args:
            nonces (`Collection[str]`): Nonces of requests. If the record has none of them, the result is empty.
        """
        if not any(nonce in self._nonces for nonce in nonces):
            return []
        later = itertools.takewhile(lambda nonce: nonce not in nonces, reversed(self._nonces))
        return list(itertools.islice(later, MAX_REPLIES))

    def add_refusal(self, reason: str) -> None:
        """
        Count a refused request.

        Args:
            reason (`str`): Why the client refused the request.
        """
        self.num_refused += 1
        self._write({"refused": reason})

    def end(self) -> None:
        """Record that the run is complete. The next run has a new record."""
        self._write(_END)

    def _entry(self, request: Message, amount: int = 1) -> _Entry:
        key = request.kind, request.client_id, request.round
        start = self._nonces.get(self.start, self.start)
        if self._digested is None or self._digested[0]() is not request:
            # A large request takes as long to digest as to send.
            self._digested = weakref.ref(request), digest_of(request)
        return _Entry(*key, amount, self._digested[1], request.nonce, start, request.phase)

    def _keep(self, entry: _Entry) -> None:
        entries, content = self._entries[entry.key], (entry.digest, entry.start)
        if content not in entries:
            self.last = entry.nonce
        first = entries[content].nonce if content in entries else entry.nonce
        entries[content] = entry
        place = entry.client_id, entry.round
        self._phases[place] = max(self._phases[place], entry.phase or 0)
        self._last_rounds[entry.client_id] = max(self._last_rounds[entry.client_id], entry.round)
        self._nonces[entry.nonce] = self._nonces.get(first, first)

    def _write(self, fields: Mapping[str, Any], is_durable: bool = True) -> None:
        if self._journal is not None and self._writes:
            self._journal.append([fields], is_durable)

    def _load(self, fields: dict[str, Any]) -> None:
        if fields.keys() == {"refused"}:
            self.num_refused += 1
            return
        where = f"{str(self.path)!r} is damaged: "
        if fields.keys() != {field.name for field in dataclass_fields(_Entry)}:
            raise ValueError(f"{where}{fields} is not a request.")
        check_values(_Entry, fields, where)
        self._keep(_Entry(**fields))


def digest_of(request: Message) -> str:
    """Return the SHA-256 digest of a request without its nonce."""
    digest = hashlib.sha256()
    for piece in replace(request, nonce="").to_pieces():
        digest.update(piece)
    return digest.hexdigest()
