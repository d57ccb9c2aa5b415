"""Secrets of the clients of secure aggregation, and a search for them in the memory of the server process.

The search runs in another process, which this file starts, so that the server process does not read the secrets.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


# Files of the secrets of a client in the directory of the run, and the file with the names of those in the memory.
SECRETS, FOUND = "secrets-{}", "found"
SECRET_BYTES = 32
CHUNK_BYTES = 2**26


def record_secrets(number: int, is_lost: bool) -> None:
    """
    Write the secrets of the masks of this client to a file.

    Args:
        number: Number of the client.
        is_lost: Whether the process ends instead of sending its masked update, so that the key of its masks is
            reconstructed.
    """
    from hf_federated.secure_aggregation import pairwise_masks, secagg

    generate = pairwise_masks.generate_exchange_key
    keys: list[bytes] = []

    def generate_and_keep() -> tuple[bytes, bytes]:
        pair = generate()
        keys.append(pair[0])
        return pair

    class Recorded(pairwise_masks.PairwiseMasks):
        def split(self, *arguments: Any) -> Any:
            Path(SECRETS.format(number)).write_text(f"seed {seeds[-1].hex()}\nkey {keys[-1].hex()}\n")
            return super().split(*arguments)

        def add(self, *arguments: Any) -> None:
            if is_lost:
                os.kill(os.getpid(), signal.SIGKILL)
            super().add(*arguments)

    urandom, seeds = os.urandom, list[bytes]()

    class Random:
        def urandom(self, number: int) -> bytes:
            seeds.append(urandom(number))
            return seeds[-1]

    pairwise_masks.os = Random()
    pairwise_masks.generate_exchange_key = generate_and_keep
    secagg.PairwiseMasks = Recorded


def search_when_the_masks_are_removed() -> None:
    """Search the memory of this process when it has removed the masks from a sum."""
    from hf_federated.secure_aggregation import pairwise_masks

    remove, derive, public_of = (
        pairwise_masks.PairwiseUnmasking.remove,
        pairwise_masks.derive_key,
        pairwise_masks.public_of,
    )
    # The memory of a secret that is freed can be overwritten.
    kept: list[bytes] = []

    def keep_and_derive(secret: bytes, *arguments: Any) -> bytes:
        kept.append(secret)
        return derive(secret, *arguments)

    def keep_and_publish(secret: bytes) -> bytes:
        kept.append(secret)
        return public_of(secret)

    def remove_and_search(*arguments: Any) -> None:
        remove(*arguments)
        with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE) as process:
            for piece in memory():
                process.stdin.write(piece)

    pairwise_masks.derive_key, pairwise_masks.public_of = keep_and_derive, keep_and_publish
    pairwise_masks.PairwiseUnmasking.remove = remove_and_search


def memory() -> Iterator[bytes]:
    """The contents of all mappings of this process that can be read and written."""
    with open("/proc/self/mem", "rb", buffering=0) as file:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions = line.split()[:2]
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if not permissions.startswith("rw") or "[v" in line:
                continue
            for position in range(start, stop, CHUNK_BYTES):
                file.seek(position)
                yield file.read(min(CHUNK_BYTES, stop - position))


def main() -> None:
    """Search the standard input, and write the names of the secrets that it contains."""
    secrets = {
        f"{path.name} {name}": bytes.fromhex(value)
        for path in Path().glob(SECRETS.format("*"))
        for name, value in (line.split() for line in path.read_text().splitlines())
    }
    found, last, num_bytes = set(), b"", 0
    while piece := sys.stdin.buffer.read(CHUNK_BYTES):
        num_bytes += len(piece)
        piece = last + piece
        found |= {name for name, secret in secrets.items() if name not in found and secret in piece}
        last = piece[-SECRET_BYTES:]
    Path(FOUND).write_text("\n".join([str(num_bytes), *sorted(found)]))


if __name__ == "__main__":
    main()
