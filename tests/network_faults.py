"""The faults of a network between the clients and the server of `network_worker.py`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from call_proxy import CallProxy
from tcp_proxy import TcpProxy


REPORT_FILE = "faults.json"


def run_proxy(faults: dict[str, Any], address: str, target: str, directory: str) -> int:
    """
    Run a proxy until this process is killed. A report of the faults so far is in the directory.

    Args:
        faults (`dict[str, Any]`): The faults, by kind:

            - `{"kind": "cut", "every": bytes, "seconds": s, "times": n}` cuts all connections each time this number of
              bytes has passed, and refuses new connections for some seconds.
            - `{"kind": "hold", "every": bytes, "times": n}` lets all connections stay open, but forwards nothing.
            - `{"kind": "slow", "delay": s, "bytes_per_second": n}` delays and limits each direction.
            - `{"kind": "calls", "seed": n}` repeats, delays, reorders and drops calls.
        address (`str`): Address to listen on.
        target (`str`): Address of the server.
        directory (`str`): Folder of the report.
    """

    def report(values: dict[str, Any]) -> None:
        partial = Path(directory, f"{REPORT_FILE}.partial")
        partial.write_text(json.dumps(values))
        partial.replace(Path(directory, REPORT_FILE))

    kind = faults["kind"]
    if kind == "calls":
        calls = CallProxy(target, address, faults["seed"])
        while True:
            report(dict(calls.counts))
            time.sleep(0.05)
    proxy = TcpProxy(target, address, delay=faults.get("delay", 0.0), bytes_per_second=faults.get("bytes_per_second"))
    num_faults = 0
    while True:
        if num_faults < faults.get("times", 0) and proxy.num_forwarded >= (num_faults + 1) * faults["every"]:
            num_faults += 1
            if kind == "hold":
                proxy.hold()
            else:
                proxy.is_accepting = False
                proxy.cut()
                time.sleep(faults["seconds"])
                proxy.is_accepting = True
        report({"faults": num_faults, "bytes": proxy.num_forwarded})
        time.sleep(0.005)
