"""`RunStatus`: what the clients of a federation over a network do at the moment."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..transport import Transport


# A client is late if it takes longer than this multiple of the median time of the clients that have replied.
_LATE_RATIO = 2.0
# Interval in seconds over which the bytes per second are measured.
_RATE_SECONDS = 30.0
# Largest number of clients that a description names.
_MAX_NAMES = 3


class RunStatus:
    """
    The status of a run. The engine changes it in one thread, and other threads read it.

    Args:
        client_ids (`Sequence[str]`): Ids of the clients.
        transport ([`~hf_federated.transport.Transport`]): Knows which clients are connected.

    Attributes:
        num_rounds (`int`): Number of rounds of the run.
        expelled (`set[str]`): Clients that the operator has expelled, or whose announcement the server has refused.
    """

    def __init__(self, client_ids: Sequence[str], transport: Transport) -> None:
        self._client_ids = list(client_ids)
        self._transport = transport
        self.num_rounds = 0
        self.expelled: set[str] = set()
        self._round: int | None = None
        self._phase = "waiting for clients"
        # When each open request was sent.
        self._sent: dict[str, float] = {}
        # Seconds of each reply of this phase.
        self._seconds: list[float] = []
        # Bytes to and from each client since the server started.
        self._bytes = {client_id: [0, 0] for client_id in client_ids}
        # Times and totals of these bytes. The lock guards them, because two threads measure.
        self._totals: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def begin(self, round: int, phase: str) -> None:
        """Record the begin of a phase of a round."""
        self._round, self._phase = round, phase
        self._seconds = []

    def sent(self, client_id: str, round: int, num_bytes: int) -> None:
        """Record that a request was sent. Without a plan, the request begins its round."""
        if round != self._round:
            self.begin(round, "training")
        self._sent[client_id] = time.monotonic()
        self._bytes[client_id][0] += num_bytes

    def replied(self, client_id: str, num_bytes: int) -> float:
        """Record that a request was answered. Returns the seconds since it was sent."""
        seconds = time.monotonic() - self._sent.pop(client_id)
        self._seconds.append(seconds)
        self._bytes[client_id][1] += num_bytes
        return seconds

    def withdrawn(self, client_id: str) -> None:
        """Record that the engine no longer waits for a reply."""
        self._sent.pop(client_id, None)

    def late_clients(self) -> dict[str, float]:
        """Clients that take much longer than the clients that have replied, with the seconds since their request."""
        seconds = list(self._seconds)  # The engine may begin another phase meanwhile.
        if not seconds:
            return {}
        now, limit = time.monotonic(), _LATE_RATIO * statistics.median(seconds)
        return {name: now - sent for name, sent in list(self._sent.items()) if now - sent > limit}

    def bytes_per_second(self) -> float:
        """Bytes of the messages in both directions per second, over the last half minute."""
        now, total = time.monotonic(), sum(down + up for down, up in self._bytes.values())
        with self._lock:
            self._totals.append((now, total))
            while len(self._totals) > 2 and now - self._totals[0][0] > _RATE_SECONDS:
                self._totals.popleft()
            first_time, first = self._totals[0]
        return max(total - first, 0) / max(now - first_time, 1e-3)

    def describe_waiting(self) -> str:
        """One line for a progress bar: the clients that train, that are late and that are absent, and the rate."""
        late = self.late_clients()
        absent = [name for name in list(self._sent) if not self._transport.is_connected(name)]
        working = [name for name in list(self._sent) if name not in late and name not in absent]
        parts = [_names(working, "waiting for {}"), _names(absent, "absent: {}")]
        if late:
            slowest = max(late, key=late.__getitem__)
            parts.append(f"late: {slowest} ({late[slowest]:.0f} s)")
        parts.append(f"{self.bytes_per_second() / 1e6:.1f} MB/s")
        return " · ".join(part for part in parts if part)

    def snapshot(self, announced: Mapping[str, int | None], missing: Mapping[str, str]) -> dict[str, Any]:
        """
        Return the status as JSON values.

        Args:
            announced (`Mapping[str, int | None]`): Number of examples that each client has announced.
            missing (`Mapping[str, str]`): Clients that are not asked, with the reason.
        """
        late = self.late_clients()
        clients = {}
        for name in self._client_ids:
            is_connected = self._transport.is_connected(name)
            heard = self._transport.seconds_since_heard(name) if is_connected else None
            down, up = self._bytes[name]
            clients[name] = {
                "state": self._state(name, is_connected, name in late),
                "reason": missing.get(name),
                "seconds_since_heard": None if heard is None else round(heard, 1),
                "num_examples": announced.get(name),
                "bytes_down": down,
                "bytes_up": up,
            }
        return {
            "round": None if self._round is None else self._round + 1,
            "num_rounds": self.num_rounds,
            "phase": self._phase,
            "bytes_per_second": round(self.bytes_per_second()),
            "clients": clients,
        }

    def _state(self, client_id: str, is_connected: bool, is_late: bool) -> str:
        if client_id in self.expelled:
            return "expelled"
        if not is_connected:
            return "absent"
        if client_id not in self._sent:
            return "waiting"
        return "late" if is_late else "working"


def _names(names: Sequence[str], text: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return text.format(", ".join(names[:_MAX_NAMES]) + more)
