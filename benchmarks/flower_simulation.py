"""Runs the benchmark's federation on Flower's simulation engine: `python flower_simulation.py SPEC.json`.

One worker with as many threads as our side has; Ray's own defaults otherwise, except that it binds to the loopback
address. Neither Flower nor Ray reports usage.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(
        FLOWER_BENCHMARK_SPEC=os.path.abspath(sys.argv[1]), FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0"
    )
    # Both read the variables above when they are imported.
    from flower_app import client_app, server_app
    from flwr.simulation import run_simulation

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=spec["workload"]["num_clients"],
        backend_config={
            "init_args": {"num_cpus": spec["threads"], "_node_ip_address": "127.0.0.1"},
            "client_resources": {"num_cpus": spec["threads"], "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
