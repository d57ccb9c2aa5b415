"""
State of a networked run that all threads of the server share: its clients, its step, and how it ends.

A short lock guards the state. Each body has a lock that is held while the body computes, and the state is not locked
meanwhile. Presence, heartbeats and control messages therefore never wait for the computation of another client. The
bodies of `"server_hierarchical"` compute in parallel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from transformers.utils import logging

from ..utils.errors import UserError
from ..utils.printable import printable, printable_traceback


logger = logging.get_logger(__name__)


class RunFailedError(ValueError):
    """Raised when the run has failed for all clients. The run can be resumed from its checkpoints."""


class ClientRemovedError(ValueError):
    """Raised for the requests of a client that was removed from the run."""


class RunState:
    """
    Clients, step and end of a networked run.

    A client that fails is removed, and the run continues with the other clients if at least `min_clients` are left.
    All methods except `computing` require the lock, which `condition` holds.

    Args:
        client_ids (`Sequence[str]`): The clients of the run, in their order.
        min_clients (`int`): Number of clients without which the run ends.

    Attributes:
        condition (`threading.Condition`): The lock of the state. Its waiters wake up after each change.
        finished (`threading.Event`): Whether all clients have finished, and the body is saved.
        step (`int`): Number of completed optimizer steps.
        failure (`str`, *optional*): The reason why the run failed for all clients.
        removed (`dict[str, str]`): The reason for the removal of each removed client.
        finished_clients (`set[str]`): Clients that need nothing more from the server.
        last_message_at (`dict[str, float]`): Time of the last message of each client or of its answer, in seconds of
            `time.monotonic()`.
    """

    def __init__(self, client_ids: Sequence[str], min_clients: int) -> None:
        self.client_ids = list(client_ids)
        self.min_clients = min_clients
        self.condition = threading.Condition()
        self.finished = threading.Event()
        self.step = 0
        self.failure: str | None = None
        self.removed: dict[str, str] = {}
        self.finished_clients: set[str] = set()
        self.last_message_at = dict.fromkeys(self.client_ids, time.monotonic())
        # The lock of each body, by the client whose messages it processes. Clients that share a body share its lock.
        self._body_locks = {client_id: threading.Lock() for client_id in self.client_ids}

    @property
    def active_clients(self) -> list[str]:
        """Clients that were not removed, in the order of the clients."""
        return [client_id for client_id in self.client_ids if client_id not in self.removed]

    @property
    def is_over(self) -> bool:
        """Whether the run failed or finished."""
        return self.failure is not None or self.finished.is_set()

    def fail(self, reason: str) -> None:
        """End the run for all clients."""
        self.failure = self.failure or reason
        self.condition.notify_all()

    def remove(self, client_id: str, reason: str) -> None:
        """
        Remove a client from the run. If too few clients are left, the run ends for all clients.

        Args:
            client_id (`str`): The client.
            reason (`str`): The reason, as a clause that names the client.
        """
        if client_id in self.removed or client_id in self.finished_clients or self.is_over:
            return
        self.removed[client_id] = reason
        num_left = len(self.active_clients)
        if num_left < self.min_clients:
            self.fail(f"{reason}; {num_left} clients are left, but min_clients is {self.min_clients}")
        else:
            logger.warning(
                f"Client {client_id!r} was removed from the run at step {self.step}: {reason}. The run continues with "
                f"{num_left} clients."
            )
        self.condition.notify_all()

    def check(self, client_id: str) -> None:
        """
        Check that the run continues with a client.

        Raises:
            RunFailedError: If the run failed.
            ClientRemovedError: If the client was removed.
        """
        if self.failure is not None:
            raise RunFailedError(
                f"The run ended at step {self.step}: {self.failure}. Restart all parties, and resume on the clients."
            )
        if client_id in self.removed:
            raise ClientRemovedError(
                f"Client {client_id!r} was removed from the run: {self.removed[client_id]}. The other clients "
                "continue. To train with all clients, restart all parties, and resume on the clients."
            )

    def share_bodies(self, names: Mapping[str, str]) -> None:
        """
        Set which clients share a body.

        Args:
            names (`Mapping[str, str]`): Name of the body of each client, by client id.
        """
        locks = {name: threading.Lock() for name in names.values()}
        self._body_locks = {client_id: locks[name] for client_id, name in names.items()}

    @contextlib.contextmanager
    def computing(self, client_id: str | None = None) -> Iterator[None]:
        """
        Release the lock of the state, and hold the lock of a body.

        Args:
            client_id (`str`, *optional*): The client that uses the body. By default all bodies are locked.
        """
        locks = self._body_locks.values() if client_id is None else [self._body_locks[client_id]]
        self.condition.release()
        try:
            with contextlib.ExitStack() as stack:
                # All threads take the locks in the same order.
                for lock in dict.fromkeys(locks):
                    stack.enter_context(lock)
                yield
        finally:
            self.condition.acquire()

    @contextlib.contextmanager
    def end_on_error(self, client_id: str) -> Iterator[None]:
        """
        End the run if the block raises an error. The server logs the error; the clients receive only its class.

        Args:
            client_id (`str`): The client whose thread runs the block.
        """
        try:
            yield
        except RunFailedError:
            raise
        except Exception as error:
            text = printable(error) if isinstance(error, UserError) else printable_traceback(error)
            logger.error(f"The server failed, and the run ends.\n{text}")
            self.fail(f"the server failed ({type(error).__name__}); see the log of the server")
            self.check(client_id)
            raise
