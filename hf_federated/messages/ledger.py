"""The ledger: bytes that went to and came from every client in every round."""

from __future__ import annotations

import json
import os
from typing import Any


LEDGER_NAME = "federated_ledger.json"


class Ledger:
    """
    Bytes down (server to client) and up (client to server), per client and round.

    The bytes are those of the serialised messages, header included, whether or not an engine had to serialise them.

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
        Add bytes to a client's account.

        Args:
            round (`int`): Round number, from 0.
            client_id (`str`): The client.
            bytes_down (`int`, *optional*, defaults to `0`): From the server.
            bytes_up (`int`, *optional*, defaults to `0`): To the server.
        """
        account = self._bytes.setdefault(round, {}).setdefault(client_id, [0, 0])
        account[0] += bytes_down
        account[1] += bytes_up

    def account(self, round: int, client_id: str) -> tuple[int, int]:
        """Bytes down and up of a client in a round."""
        down, up = self._bytes.get(round, {}).get(client_id, (0, 0))
        return down, up

    def add(self, other: Ledger) -> None:
        """Add all of another ledger's bytes, such as those that a run cost before it went on from a checkpoint."""
        for round, clients in other._bytes.items():
            for client_id, (down, up) in clients.items():
                self.record(round, client_id, down, up)

    def set_account(self, round: int, client_id: str, bytes_down: int, bytes_up: int) -> None:
        """Replace a client's account of a round by that of the process that kept it."""
        self._bytes.setdefault(round, {})[client_id] = [bytes_down, bytes_up]

    @property
    def bytes_down(self) -> int:
        """All bytes from the server to clients."""
        return sum(account[0] for clients in self._bytes.values() for account in clients.values())

    @property
    def bytes_up(self) -> int:
        """All bytes from clients to the server."""
        return sum(account[1] for clients in self._bytes.values() for account in clients.values())

    def rounds(self) -> list[dict[str, int]]:
        """One row a round: `round`, `num_clients`, `bytes_down`, `bytes_up`."""
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
        """One row a client: `bytes_down`, `bytes_up`, `num_rounds` it took part in."""
        rows: dict[str, dict[str, int]] = {}
        for clients in self._bytes.values():
            for client_id, (down, up) in clients.items():
                row = rows.setdefault(client_id, {"bytes_down": 0, "bytes_up": 0, "num_rounds": 0})
                row["bytes_down"] += down
                row["bytes_up"] += up
                row["num_rounds"] += 1
        return dict(sorted(rows.items()))

    def to_dict(self) -> dict[str, Any]:
        """The whole ledger as JSON values."""
        return {
            "rounds": {str(round): dict(sorted(clients.items())) for round, clients in sorted(self._bytes.items())}
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """The ledger that `to_dict` wrote."""
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
