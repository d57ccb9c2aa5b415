"""Pairs of features in several processes, which `rank_worker.py` forks for `test_compatibility.py`."""

from __future__ import annotations

import functools
import time
from typing import Any

from feature_pairs import CLIENTS, Parts, build, find_pair

from hf_federated.testing.processes import fork, fork_ranks, free_address, wait


TIMEOUT = 100


def run_rank(rank: int, parts: Parts) -> None:
    build(parts, "run").train()


def run_party(number: int, parts: Parts, address: str) -> None:
    """Run the server (0), or the client with this position, from 1."""
    if number == 0:
        build(parts, "run", address).train()
        return
    client_id = list(CLIENTS)[number - 1]
    build(parts, f"client-{number}", address, client_id).join(
        address, client_id=client_id, insecure=True, connect_timeout=60.0
    )


def run_pair(request: dict[str, Any]) -> dict[str, Any]:
    """
    Run a pair of features.

    Args:
        request (`dict[str, Any]`): The names of the features as `pair`, and the `directory` of the run.

    Returns:
        `dict[str, Any]`: The exit codes of all processes, as `codes`. The output of a process is in
        `rank-<number>.log`.
    """
    directory = request["directory"]
    parts, rule = find_pair(*request["pair"])
    deadline = time.monotonic() + TIMEOUT
    if parts.is_networked and rule is None:
        run = functools.partial(run_party, parts=parts, address=free_address())
        children = [
            fork(functools.partial(run, number), directory, f"rank-{number}.log") for number in range(1 + len(CLIENTS))
        ]
    else:
        children = fork_ranks(functools.partial(run_rank, parts=parts), directory, parts.num_processes)
    return {"codes": [wait(child, deadline) for child in children]}
