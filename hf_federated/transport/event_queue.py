"""`EventQueue`: the events of the clients of a transport."""

from __future__ import annotations

import queue

from .base import Event
from .read_gate import ReadGate


class EventQueue(queue.Queue[Event]):
    """
    The events of clients, in their order. The caller of `receive` holds at most one reply.

    Args:
        gate ([`ReadGate`]): Limits how many large replies are in memory. The transport enters it, and `receive` leaves
            it for the last reply.
    """

    def __init__(self, gate: ReadGate) -> None:
        super().__init__()
        self.gate = gate
        # The client whose reply the caller has.
        self._replied: str | None = None

    def receive(self, timeout: float | None) -> Event | None:
        """
        Return the next event. The caller has dropped the last reply.

        Args:
            timeout (`float`, *optional*): Seconds to wait. By default there is no limit.

        Returns:
            [`Event`], *optional*: The event, or `None` after the timeout.
        """
        if self._replied is not None:
            self.gate.leave(self._replied)
        try:
            event = self.get(timeout=timeout)
        except queue.Empty:
            event = None
        self._replied = event.client_id if event is not None and event.kind == "reply" else None
        return event
