"""Worker that runs a federation over a network whose clients are launches of several processes.

The worker works as `network_worker.py`. Each request has the additional field `num_ranks`, the number of processes of
each client, and `kill` may have a `rank`. The other processes of a killed client must end with an error before the
client is started again. The answer contains their exit codes and the seconds until they ended.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from typing import Any

import torch
from network_worker import TIMEOUT, run_party
from rank_worker import wait


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fork(party: int, rank: int, request: dict[str, Any]) -> int:
    """Start a process of a party. The server, party 0, has one process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if party:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
            os.environ |= {"WORLD_SIZE": str(request["num_ranks"]), "LOCAL_WORLD_SIZE": str(request["num_ranks"])}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["ports"][party])}
        kill = request.get("kill") or {}
        is_killed = kill.get("party") == party and kill.get("rank", 0) == rank
        code = run_party(party, {**request, "kill": kill if is_killed else None})
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(request: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    deadline = started + TIMEOUT
    parties = range(request["num_parties"])
    request |= {"address": f"127.0.0.1:{free_port()}", "ports": [free_port() for _ in parties]}
    num_ranks = [request["num_ranks"] if party else 1 for party in parties]
    children = {(party, rank): fork(party, rank, request) for party in parties for rank in range(num_ranks[party])}
    answer: dict[str, Any] = {}
    if kill := request.get("kill"):
        party, first = kill["party"], kill.get("rank", 0)
        killed_codes = {first: wait(children[party, first], deadline)}
        ended = time.monotonic()
        others = [rank for rank in range(num_ranks[party]) if rank != first]
        killed_codes |= {rank: wait(children[party, rank], deadline) for rank in others}
        answer["killed_codes"] = [killed_codes[rank] for rank in range(num_ranks[party])]
        answer["seconds_after_kill"] = time.monotonic() - ended
        request |= {"kill": None, "resume": party == 0, "ports": [free_port() for _ in parties]}
        children |= {(party, rank): fork(party, rank, request) for rank in range(num_ranks[party])}
    answer["codes"] = [wait(child, deadline) for child in children.values()]
    return {**answer, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
