"""Ledger of the bytes that the server sent to and received from every client in every round."""

from __future__ import annotations

import json
import os
from typing import Any


LEDGER_NAME = "federated_ledger.json"


class Ledger:
    """
    Number of bytes down (server to client) and up (client to server), per client and round.

    The numbers are the sizes of the serialized messages with their headers. They are also counted for an engine that
    does not serialize messages.

    Example:

    ```python
    >>> from hf_federated.messages.ledger import Ledger

    >>> ledger = Ledger()
    >>> ledger.record(round=0, client_id="a", bytes_down=100, bytes_up=40)
    >>> ledger.record(round=0, client_id="b", bytes_down=100)
    >>> ledger.bytes_down, ledger.bytes_up
    (200, 40)
    >>> ledger.rounds()
    [{'round': 0, 'num_clients': 2, 'bytes_down': 200, 'bytes_up': 40}]
    ```
    """

    def __init__(self) -> None:
        # round -> client -> [down, up]
        self._bytes: dict[int, dict[str, list[int]]] = {}

    def record(self, round: int, client_id: str, bytes_down: int = 0, bytes_up: int = 0) -> None:
        """
        Add bytes to the account of a client in a round.

        Args:
            round (`int`): Round number, from 0.
            client_id (`str`): Id of the client.
            bytes_down (`int`, *optional*, defaults to `0`): Bytes sent from the server to the client.
            bytes_up (`int`, *optional*, defaults to `0`): Bytes sent from the client to the server.
        """
        account = self._bytes.setdefault(round, {}).setdefault(client_id, [0, 0])
        account[0] += bytes_down
        account[1] += bytes_up

    def account(self, round: int, client_id: str) -> tuple[int, int]:
        """Return the bytes down and up of a client in a round."""
        down, up = self._bytes.get(round, {}).get(client_id, (0, 0))
        return down, up

    def add(self, other: Ledger) -> None:
        """Add all bytes of another ledger, such as the ledger of a run before it was resumed from a checkpoint."""
        for round, clients in other._bytes.items():
            for client_id, (down, up) in clients.items():
                self.record(round, client_id, down, up)

    def set_account(self, round: int, client_id: str, bytes_down: int, bytes_up: int) -> None:
        """Replace the account of a client in a round, for an account that another process recorded."""
        self._bytes.setdefault(round, {})[client_id] = [bytes_down, bytes_up]

    @property
    def bytes_down(self) -> int:
        """Total number of bytes from the server to the clients."""
        return sum(account[0] for clients in self._bytes.values() for account in clients.values())

    @property
    def bytes_up(self) -> int:
        """Total number of bytes from the clients to the server."""
        return sum(account[1] for clients in self._bytes.values() for account in clients.values())

    def rounds(self) -> list[dict[str, int]]:
        """Return one row per round: `round`, `num_clients`, `bytes_down`, `bytes_up`."""
        return [
            {
                "round": round,
                "num_clients": len(clients),
                "bytes_down": sum(account[0] for account in clients.values()),
                "bytes_up": sum(account[1] for account in clients.values()),
            }
            for round, clients in sorted(self._bytes.items())
        ]

    def clients(self) -> dict[str, dict[str, int]]:
        """Return one row per client id: `bytes_down`, `bytes_up`, and `num_rounds` with participation."""
        rows: dict[str, dict[str, int]] = {}
        for clients in self._bytes.values():
            for client_id, (down, up) in clients.items():
                row = rows.setdefault(client_id, {"bytes_down": 0, "bytes_up": 0, "num_rounds": 0})
                row["bytes_down"] += down
                row["bytes_up"] += up
                row["num_rounds"] += 1
        return dict(sorted(rows.items()))

    def to_dict(self) -> dict[str, Any]:
        """Return the whole ledger as JSON values."""
        return {
            "rounds": {str(round): dict(sorted(clients.items())) for round, clients in sorted(self._bytes.items())}
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """Restore a ledger from the values of [`~Ledger.to_dict`]."""
        ledger = cls()
        ledger._bytes = {
            int(round): {client_id: list(account) for client_id, account in clients.items()}
            for round, clients in values["rounds"].items()
        }
        return ledger

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `federated_ledger.json` into a directory."""
        with open(os.path.join(directory, LEDGER_NAME), "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Ledger:
        """Read `federated_ledger.json` from a directory."""
        with open(os.path.join(directory, LEDGER_NAME), encoding="utf-8") as file:
            return cls.from_dict(json.load(file))
