"""Ledger of the bytes that the server sent to and received from every client in every round."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..utils.run_files import LEDGER_NAME
from ..utils.untrusted_json import read_json
from .ledger_blocks import ROUNDS_PER_BLOCK, Accounts, decode_block, encode_block


# Numbers of bytes and rounds are 64-bit integers in a checkpoint.
_LARGEST = 2**63 - 1
_ROUND = re.compile(r"0|[1-9][0-9]{0,18}")


class Ledger:
    """
    Number of bytes down (server to client) and up (client to server), per client and round.

    Use it to compare methods by their bytes instead of their rounds, or to find the clients that cost the most.

    The numbers are the sizes of the serialized messages with their headers. They are also counted for an engine that
    does not serialize messages.

    Attributes:
        bytes_down (`int`): Total number of bytes from the server to the clients.
        bytes_up (`int`): Total number of bytes from the clients to the server.

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
        self._bytes: Accounts = {}
        self.bytes_down = 0
        self.bytes_up = 0
        # First round of each client.
        self._first_rounds: dict[str, int] = {}
        # Clients in the order of the encoded blocks, and the blocks whose accounts have not changed since.
        self._encoded_clients: list[str] = []
        self._blocks: dict[int, bytes] = {}

    def record(self, round: int, client_id: str, bytes_down: int = 0, bytes_up: int = 0) -> None:
        """
        Add bytes to the account of a client in a round.

        Args:
            round (`int`): Round number, from 0.
            client_id (`str`): Id of the client.
            bytes_down (`int`, *optional*, defaults to `0`): Bytes sent from the server to the client.
            bytes_up (`int`, *optional*, defaults to `0`): Bytes sent from the client to the server.
        """
        self._blocks.pop(round // ROUNDS_PER_BLOCK, None)
        self._first_rounds[client_id] = min(round, self._first_rounds.get(client_id, round))
        account = self._bytes.setdefault(round, {}).setdefault(client_id, [0, 0])
        account[0] += bytes_down
        account[1] += bytes_up
        self.bytes_down += bytes_down
        self.bytes_up += bytes_up

    def account(self, round: int, client_id: str) -> tuple[int, int]:
        """Return the bytes down and up of a client in a round."""
        down, up = self._bytes.get(round, {}).get(client_id, (0, 0))
        return down, up

    def accounts(self, round: int) -> dict[str, tuple[int, int]]:
        """Return the bytes down and up of each client in a round."""
        return {client_id: (down, up) for client_id, (down, up) in self._bytes.get(round, {}).items()}

    def add(self, other: Ledger) -> None:
        """Add all bytes of another ledger, such as the ledger of a run before it was resumed from a checkpoint."""
        for round, clients in other._bytes.items():
            for client_id, (down, up) in clients.items():
                self.record(round, client_id, down, up)

    def set_account(self, round: int, client_id: str, bytes_down: int, bytes_up: int) -> None:
        """Replace the account of a client in a round, for an account that another process recorded."""
        down, up = self.account(round, client_id)
        self.record(round, client_id, bytes_down - down, bytes_up - up)

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
    def from_dict(cls, values: Any) -> Ledger:
        """
        Restore a ledger from the values of [`~Ledger.to_dict`].

        Raises:
            ValueError: If the values are not the values of a ledger.
        """
        rounds = values.get("rounds") if isinstance(values, Mapping) else None
        if not isinstance(rounds, Mapping):
            raise ValueError("A ledger must be a dictionary with the key 'rounds', which is a dictionary.")
        ledger = cls()
        for key, clients in rounds.items():
            if not (isinstance(key, str) and _ROUND.fullmatch(key)):
                raise ValueError(
                    f"A ledger has the round {key!r}; a round must be the text of an integer of at least 0."
                )
            if not isinstance(clients, Mapping):
                raise ValueError(f"Round {key} of a ledger is {clients!r:.80}; it must be a dictionary of clients.")
            for client_id, account in clients.items():
                if not isinstance(client_id, str) or not _is_account(account):
                    raise ValueError(
                        f"The account of client {client_id!r:.80} in round {key} of a ledger is {account!r:.80}; it "
                        "must be a list of two integers of at least 0, the bytes down and up."
                    )
                ledger.record(int(key), client_id, *account)
        return ledger

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `federated_ledger.json` into a directory."""
        (Path(directory) / LEDGER_NAME).write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Ledger:
        """
        Read `federated_ledger.json` from a directory.

        Raises:
            FileNotFoundError: If the directory has no such file.
            ValueError: If the file is damaged. The message names the file.
        """
        path = Path(directory) / LEDGER_NAME
        try:
            return cls.from_dict(read_json(path))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)!r} is not the ledger of a run: {str(error).rstrip('.')}. Save the ledger again, "
                "or delete the file."
            ) from error

    # ---- Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """
        Return the whole ledger as a small tree for a checkpoint.

        The time depends on the accounts that changed since the last call. The size is about two bytes per account, and
        much less if the messages of the rounds have equal sizes.
        """
        # The order depends on the accounts only, so that every engine saves the same bytes. A new client is the last.
        clients = sorted(self._first_rounds, key=lambda client_id: (self._first_rounds[client_id], client_id))
        if clients[: len(self._encoded_clients)] != self._encoded_clients:
            self._blocks = {}
        self._encoded_clients = clients
        members: dict[int, list[int]] = {}
        for round in self._bytes:
            members.setdefault(round // ROUNDS_PER_BLOCK, []).append(round)
        index = {client_id: number for number, client_id in enumerate(clients)}
        layout = []
        for number in sorted(members):
            rounds = members[number]
            if number not in self._blocks:
                self._blocks[number] = encode_block({round: self._bytes[round] for round in rounds}, index)
            num_accounts = sum(len(self._bytes[round]) for round in rounds)
            layout.append([len(self._blocks[number]), len(rounds), num_accounts])
        data = b"".join(self._blocks[number] for number in sorted(members))
        return {
            "clients": clients,
            "layout": torch.tensor(layout, dtype=torch.int64).reshape(-1, 3),
            "blocks": torch.tensor(np.frombuffer(data, np.uint8)),
        }

    @classmethod
    def from_state_dict(cls, state: Any) -> Ledger:
        """
        Restore a ledger from the values of [`~Ledger.state_dict`], or of [`~Ledger.to_dict`] in a checkpoint of
        hf_federated 0.1.0.

        Raises:
            ValueError: If the values are not the values of a ledger.
        """
        if isinstance(state, Mapping) and "rounds" in state:
            return cls.from_dict(state)
        clients, layout, blocks = _checked_state(state)
        ledger, start = cls(), 0
        for length, num_rounds, num_accounts in layout.tolist():
            blob = blocks[start : start + length].numpy().tobytes()
            for round, accounts in decode_block(blob, num_rounds, num_accounts, clients).items():
                for client_id, (down, up) in accounts.items():
                    ledger.record(round, client_id, down, up)
            start += length
        return ledger


def _is_account(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(type(number) is int and 0 <= number <= _LARGEST for number in value)
    )


def _checked_state(state: Any) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return the values of [`~Ledger.state_dict`] after checks of their types, shapes and ranges."""
    values = state if isinstance(state, Mapping) else {}
    clients, layout, blocks = (values.get(name) for name in ("clients", "layout", "blocks"))
    if (
        isinstance(clients, list)
        and all(isinstance(client_id, str) for client_id in clients)
        and len(set(clients)) == len(clients)
        and isinstance(layout, torch.Tensor)
        and layout.dtype == torch.int64
        and layout.ndim == 2
        and layout.shape[1] == 3
        and isinstance(blocks, torch.Tensor)
        and blocks.dtype == torch.uint8
        and blocks.ndim == 1
        and bool((layout >= 0).all())
        and bool((layout <= _LARGEST // 2**16).all())
        and sum(layout[:, 0].tolist()) == len(blocks)
    ):
        return clients, layout, blocks
    raise ValueError("The accounts of a ledger are damaged: a type, a shape or a length is wrong.")
