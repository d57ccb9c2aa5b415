"""Run the benchmark's federation on Flower's simulation engine: `python flower_simulation.py SPEC.json`.

The simulation has one worker with the same number of threads as the library. All other settings are Ray's defaults,
except that Ray binds to the loopback address. Flower and Ray do not report usage.
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
    # Both modules read the variables above at import.
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
