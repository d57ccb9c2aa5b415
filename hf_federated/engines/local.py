"""`LocalEngine`: every client in this process, one after the other, on one resident model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..clients import ClientWorker
from ..messages import Message, read_message
from .base import Engine, Plan


class LocalEngine(Engine):
    """
    Clients take turns on the worker's model; only what is exchanged is swapped, and nothing is serialised.

    Args:
        worker ([`~hf_federated.clients.ClientWorker`]): Answers the messages.
        serialize (`bool`, *optional*, defaults to `False`): Pass every message through its bytes in both directions,
            as a network would. Slower and otherwise the same; it shows that nothing else is shared.
    """

    def __init__(self, worker: ClientWorker, serialize: bool = False) -> None:
        super().__init__()
        self.worker = worker
        self.serialize = serialize

    def _execute(self, plan: Plan, dispatch: Callable[[str], Message]) -> Iterator[tuple[str, Message]]:
        for client_id in self._own_clients(plan.cohort):
            message = dispatch(client_id)
            reply = self._deliver(message)
            self.last_error = self.worker.last_error
            yield client_id, reply
            del message, reply  # Not kept while the next client trains.

    def _deliver(self, message: Message) -> Message:
        if self.serialize:
            return read_message(self.worker.handle(read_message(message.to_bytes())).to_bytes())
        return self.worker.handle(message)

    def _own_clients(self, cohort: Sequence[str]) -> Sequence[str]:
        """The clients of a cohort that train in this process."""
        return cohort

    def reset(self) -> None:
        self.worker.models.clear()

    def save(self, directory: Path) -> dict[str, str]:
        return self.worker.models.save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self.worker.models.load(directory, digests)
