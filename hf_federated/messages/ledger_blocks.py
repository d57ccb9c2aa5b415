"""Compact form of the accounts of a ledger, for checkpoints.

The accounts of `ROUNDS_PER_BLOCK` rounds form a block. A block is a sequence of 64-bit integers: the round numbers,
the number of accounts of each round, and for all accounts the index of the client, the bytes down and the bytes up.
The sequence is compressed with zlib after its bytes are grouped by significance, because most high bytes are zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np


ROUNDS_PER_BLOCK = 256
# The level changes the size by a few percent only.
_COMPRESSION_LEVEL = 1
_NUM_COLUMNS_OF_ROUND, _NUM_COLUMNS_OF_ACCOUNT = 2, 3
_ITEM_BYTES = 8

# round -> client -> [down, up]
Accounts = dict[int, dict[str, list[int]]]


def encode_block(accounts: Mapping[int, Mapping[str, Sequence[int]]], index: Mapping[str, int]) -> bytes:
    """
    Encode the accounts of some rounds.

    Args:
        accounts (`Mapping[int, Mapping[str, Sequence[int]]]`): Bytes down and up, by round and client id.
        index (`Mapping[str, int]`): A number for each client id. The order of the numbers is the order of the accounts
            within a round, so that the encoding does not depend on the order in which the accounts were recorded.

    Raises:
        OverflowError: If a number does not fit into 64 bits.
    """
    rounds = sorted(accounts)
    counts = [len(accounts[round]) for round in rounds]
    rows = [
        row
        for round in rounds
        for row in sorted((index[client_id], *account) for client_id, account in accounts[round].items())
    ]
    columns = [np.array(rounds, np.int64), np.array(counts, np.int64), np.array(rows, np.int64).T.ravel()]
    values = np.concatenate(columns).astype("<i8")
    planes = values.view(np.uint8).reshape(-1, _ITEM_BYTES).T
    return zlib.compress(planes.tobytes(), _COMPRESSION_LEVEL)


def decode_block(blob: bytes, num_rounds: int, num_accounts: int, clients: Sequence[str]) -> Accounts:
    """
    Decode the accounts that `encode_block` encoded.

    Args:
        blob (`bytes`): The encoded accounts.
        num_rounds (`int`): Number of rounds in the block.
        num_accounts (`int`): Number of accounts in the block.
        clients (`Sequence[str]`): The client ids in the order of their numbers.

    Raises:
        ValueError: If the blob is damaged.
    """
    num_values = _NUM_COLUMNS_OF_ROUND * num_rounds + _NUM_COLUMNS_OF_ACCOUNT * num_accounts
    try:
        # The limit protects against a small blob that decompresses to more than the memory.
        planes = zlib.decompressobj().decompress(blob, _ITEM_BYTES * num_values + 1)
    except zlib.error as error:
        raise ValueError(f"The accounts of a ledger are damaged: {error}.") from error
    if len(planes) != _ITEM_BYTES * num_values:
        raise ValueError("The accounts of a ledger are damaged: their number differs from the announced number.")
    bytes_of_values = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(_ITEM_BYTES, -1).T)
    values = bytes_of_values.reshape(-1).view("<i8")
    rounds, counts, rows = np.split(values, [num_rounds, 2 * num_rounds])
    numbers, downs, ups = rows.reshape(_NUM_COLUMNS_OF_ACCOUNT, -1)
    is_valid = (
        (values >= 0).all()
        and (np.diff(rounds) > 0).all()
        and (counts <= num_accounts).all()
        and counts.sum() == num_accounts
        and (numbers < len(clients)).all()
    )
    if not is_valid:
        raise ValueError("The accounts of a ledger are damaged: a number is out of range.")
    rows_of_accounts = zip(numbers.tolist(), downs.tolist(), ups.tolist(), strict=True)
    return {
        round: {clients[number]: [down, up] for number, down, up in (next(rows_of_accounts) for _ in range(count))}
        for round, count in zip(rounds.tolist(), counts.tolist(), strict=True)
    }
