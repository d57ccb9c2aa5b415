"""`StepMemories`: what the postprocessors keep on the server between rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..clients import ClientStore, MemoryStore
from ..messages import ClientUpdate, Fit
from ..methods import Accumulator, Round
from ..postprocessing import Memories, Postprocessor, run_on_sums, run_server_receive, run_server_send
from ..utils.weighted_mean import State


class StepMemories:
    """
    Runs the server sides of the postprocessors with their memories.

    Args:
        steps (`Sequence[Postprocessor]`, *optional*): The postprocessors.
        store ([`~hf_federated.clients.ClientStore`], *optional*): Stores the memories of the server for each client.
            Defaults to a store in memory.

    Attributes:
        steps (`Sequence[Postprocessor]`): The postprocessors.
        changes_requests (`bool`): Whether a postprocessor changes the messages to clients.
        store ([`~hf_federated.clients.ClientStore`]): The store.
    """

    def __init__(self, steps: Sequence[Postprocessor] = (), store: ClientStore | None = None) -> None:
        self.steps = steps
        self.store = MemoryStore() if store is None else store
        self.changes_requests = any(step.changes_requests for step in steps)
        # The memories of `on_sums` and `server_send_shared`.
        self._of_all: Memories = {}

    def send(self, message: Fit) -> Fit:
        """Change a message before it leaves the server."""
        entry = self.store.get(message.client_id)
        memories = entry.setdefault("memories", {})
        message = dataclasses.replace(message, accepted_round=entry.get("accepted_round"))
        sent = run_server_send(self.steps, message, memories, self._of_all)
        self.store.set(message.client_id, entry)
        return sent

    def receive(self, update: ClientUpdate, state: State, seed: int) -> ClientUpdate:
        """
        Change an update when it reaches the server.

        Args:
            update ([`ClientUpdate`]): The update.
            state (`dict[str, torch.Tensor]`): The global state that the server sent.
            seed (`int`): Seed of the message.
        """
        entry = self.store.get(update.client_id)
        had_memories = bool(memories := entry.setdefault("memories", {}))
        received = run_server_receive(self.steps, update, state, seed, memories)
        if memories or had_memories:
            self.store.set(update.client_id, entry)
        return received

    def accept(self, numbers: Mapping[str, int]) -> None:
        """Note for each client whose update is used the round of its request."""
        for client_id, number in numbers.items():
            self.store.set(client_id, {**self.store.get(client_id), "accepted_round": number})

    def on_sums(self, sums: Accumulator, round: Round, seed: int) -> Accumulator:
        """Change the sums of the accepted updates."""
        return run_on_sums(self.steps, sums, round, seed, self._of_all)

    def state_dict(self) -> dict[str, Any]:
        """Return the memories for all clients together. `store` has the memories of clients."""
        return dict(self._of_all)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memories that `state_dict` returned."""
        self._of_all = dict(state)
