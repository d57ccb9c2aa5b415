"""Measure exchanges and transfers over NVFlare's simulator (extra `nvflare`), in turns with bare gRPC.

    python benchmarks/network_nvflare.py --output nvflare.json

The server of one NVFlare job alternates [`CallTransport`] over NVFlare and the bare gRPC calls of `network.py`, with
the same bytes. Each client is a process. The simulator uses no TLS, and the bare calls use mutual TLS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network import MEGABYTE, SETTINGS, BareSide

from hf_federated.engines import NetworkEngine
from hf_federated.engines.nvflare import NVFlareClient, NVFlareServer
from hf_federated.security.certificates import create_certificates
from hf_federated.transport import CallTransport
from hf_federated.transport.framing import frame


class Server(NVFlareServer):
    """
    Times the exchanges.

    Args:
        clients (`Sequence[str]`): Ids of the clients.
        transfer_mb (`int`): Megabytes of a transfer in each direction.
        repetitions (`int`): Number of turns.
        calls (`int`): Number of small exchanges of a turn.
        output (`str`): JSON file to write the results to.
    """

    def __init__(self, clients: Sequence[str], transfer_mb: int, repetitions: int, calls: int, output: str) -> None:
        super().__init__(clients)
        self.transfer_mb = transfer_mb
        self.repetitions = repetitions
        self.calls = calls
        self.output = output

    def build_trainer(self, engine: NetworkEngine) -> Any:
        return engine.transport

    def run(self, trainer: CallTransport) -> None:
        trainer.start(self.clients, SETTINGS)
        for _ in self.clients:
            assert trainer.receive(300).kind == "joined"
        with tempfile.TemporaryDirectory() as folder:
            create_certificates(folder, ["localhost"], self.clients)
            bare = BareSide(folder, self.clients)
            results = {
                "load": os.getloadavg(),
                "exchange": self.alternate(trainer, bare, 1000, self.calls),
                "transfer": self.alternate(trainer, bare, self.transfer_mb * MEGABYTE, 1),
            }
            bare.close()
        trainer.stop()
        Path(self.output).write_text(json.dumps(results, indent=2))

    def exchange(self, transport: CallTransport, payload: bytes, calls: int) -> None:
        """Send a payload to all clients and receive it from all of them, `calls` times."""
        for _ in range(calls):
            for name in self.clients:
                transport.send(name, lambda: payload)
            for _ in self.clients:
                event = transport.receive(300)
                assert event is not None and event.kind == "reply" and len(event.blob) == len(payload), event
                del event

    def alternate(self, transport: CallTransport, bare: BareSide, size: int, calls: int) -> dict[str, Any]:
        """Time exchanges of both sides in turns."""
        payload = bytes(size)
        sides = {
            "nvflare": lambda: self.exchange(transport, payload, calls),
            "bare": lambda: bare.exchange(payload, calls),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repetition in range(self.repetitions + 1):
            for name, exchange in sides.items():
                started = time.perf_counter()
                exchange()
                if repetition:  # the first turn starts threads and connections
                    seconds[name].append((time.perf_counter() - started) / calls)
        ratios = [a / b for a, b in zip(seconds["nvflare"], seconds["bare"], strict=True)]
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        return {"size": size, **medians, "ratio": statistics.median(ratios), "ratios": ratios}


class Client(NVFlareClient):
    """Returns each request."""

    def build_trainer(self, client_id: str) -> None:
        return None

    def run(self, trainer: Any, connector: Any, client_id: str) -> None:
        connection = connector(SETTINGS, frame({"num_examples": 1}))
        reply = None
        while (reply := connection.receive(reply)) is not None:
            pass


def main() -> None:
    from network_nvflare import Client, Server  # NVFlare writes the name of the module to the job
    from nvflare.collab import CollabRecipe
    from nvflare.recipe import SimEnv

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="small exchanges of a turn")
    parser.add_argument("--transfer-mb", type=int, default=100)
    parser.add_argument("--output", required=True, help="JSON file to write the results to")
    options = parser.parse_args()
    clients = [f"client-{number}" for number in range(options.clients)]
    output = str(Path(options.output).resolve())
    server = Server(clients, options.transfer_mb, options.repetitions, options.calls, output)
    job = CollabRecipe("benchmark", server=server, client=Client(), min_clients=options.clients, sync_task_timeout=300)
    with tempfile.TemporaryDirectory() as workspace:
        job.execute(SimEnv(clients=clients, workspace_root=workspace))
    print(Path(output).read_text())


if __name__ == "__main__":
    main()
