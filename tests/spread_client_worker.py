"""Worker that runs a federation over a network whose clients are launches of several processes.

The worker works as `network_worker.py`. Each request has the additional field `num_ranks`, the number of processes of
each client, and `kill` may have a `rank`. The other processes of a killed client must end with an error before the
client is started again. The answer contains their exit codes and the seconds until they ended.

With `idle` in `kill`, the process is killed while the client waits for its first request. The last client starts after
that, so that the server sends no request before.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from network_worker import TIMEOUT, train

from hf_federated.testing.processes import fork, free_address, serve, wait


def free_port() -> int:
    return int(free_address().partition(":")[2])


def start(party: int, rank: int, request: dict[str, Any]) -> int:
    """Start a process of a party. The server, party 0, has one process."""
    environment = {}
    if party:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
        environment |= {"WORLD_SIZE": str(request["num_ranks"]), "LOCAL_WORLD_SIZE": str(request["num_ranks"])}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["ports"][party])}
    kill = request.get("kill") or {}
    is_killed = kill.get("party") == party and kill.get("rank", 0) == rank
    is_idle = is_killed and kill.get("idle", False)
    request = {**request, "kill": kill if is_killed and not is_idle else None}

    def run() -> None:
        if is_idle:
            threading.Thread(target=kill_after_joining, args=(request, party), daemon=True).start()
        train(party, request)

    return fork(run, request["directory"], f"rank-{party}.log", environment)


def kill_after_joining(request: dict[str, Any], party: int) -> None:
    """Kill this process when its party has joined."""
    log = Path(request["directory"], f"rank-{party}.log")
    while not log.exists() or "joined the federation" not in log.read_text():
        time.sleep(0.1)
    time.sleep(4)  # The client then waits for its first request.
    os.kill(os.getpid(), signal.SIGKILL)


def run(request: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    deadline = started + TIMEOUT
    parties = range(request["num_parties"])
    request |= {"address": f"127.0.0.1:{free_port()}", "ports": [free_port() for _ in parties]}
    num_ranks = [request["num_ranks"] if party else 1 for party in parties]
    processes = [(party, rank) for party in parties for rank in range(num_ranks[party])]
    kill, answer = request.get("kill"), {}
    late = parties[-1] if kill and kill.get("idle") else None
    children = {(party, rank): start(party, rank, request) for party, rank in processes if party != late}
    if kill:
        party, first = kill["party"], kill.get("rank", 0)
        killed_codes = {first: wait(children[party, first], deadline)}
        ended = time.monotonic()
        others = [rank for rank in range(num_ranks[party]) if rank != first]
        killed_codes |= {rank: wait(children[party, rank], deadline) for rank in others}
        answer["killed_codes"] = [killed_codes[rank] for rank in range(num_ranks[party])]
        answer["seconds_after_kill"] = time.monotonic() - ended
        request |= {"kill": None, "resume": party == 0, "ports": [free_port() for _ in parties]}
        started_now = [each for each in processes if each[0] in (party, late)]
        children |= {each: start(*each, request) for each in started_now}
    answer["codes"] = [wait(child, deadline) for child in children.values()]
    return {**answer, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    serve(run)
