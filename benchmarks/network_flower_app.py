"""The Flower side of `network_flower.py`. The interpreter of Flower runs this file.

- As a Flower app, it carries out exchanges on the deployment engine (`flower-superlink`, `flower-supernode`).
- `python network_flower_app.py server|client ...` carries them out with Flower's older gRPC transport, `start_server`
  and `start_client`.

The server receives lines `SIZE CALLS` from `network_flower.py` and answers with the seconds of an exchange. Payloads
are random and differ between clients and calls, because the deployment engine sends equal parts of messages once.
"""

from __future__ import annotations

import argparse
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.client import Client, start_client
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Parameters, Status
from flwr.server import Server, ServerConfig, SimpleClientManager, start_server
from flwr.server.history import History
from flwr.server.server import fit_clients
from flwr.serverapp import Grid, ServerApp


def answer_requests(port: int, exchange: Callable[[np.ndarray], float]) -> None:
    """Time exchanges until the connection to `network_flower.py` ends."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
        for line in stream:
            size, calls = map(int, line.split())
            seconds = 0.0
            for _ in range(calls):
                payload = np.random.default_rng().integers(0, 256, size, dtype=np.uint8)
                seconds += exchange(payload)
            stream.write(f"{seconds / calls}\n")
            stream.flush()


server_app = ServerApp()
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Return the received bytes, changed in each byte."""
    received = message.content["arrays"]["payload"]
    changed = np.frombuffer(received.data, np.uint8) ^ np.uint8(1 + int(context.node_config["partition-id"]))
    array = Array(dtype=received.dtype, shape=received.shape, stype=received.stype, data=changed.tobytes())
    return Message(content=RecordDict({"arrays": ArrayRecord({"payload": array})}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out exchanges once all clients are connected."""
    while len(nodes := list(grid.get_node_ids())) < context.run_config["clients"]:
        time.sleep(0.5)

    def exchange(payload: np.ndarray) -> float:
        data = payload.tobytes()
        array = Array(dtype="uint8", shape=payload.shape, stype="numpy.ndarray", data=data)
        content = RecordDict({"arrays": ArrayRecord({"payload": array})})
        started = time.perf_counter()
        replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes]))
        seconds = time.perf_counter() - started
        assert len(replies) == len(nodes) and not any(reply.has_error() for reply in replies), replies
        returned = {reply.content["arrays"]["payload"].data for reply in replies}
        assert len(returned) == len(nodes) and all(len(blob) == len(data) for blob in returned)
        return seconds

    answer_requests(context.run_config["port"], exchange)


class ExchangeServer(Server):
    """
    A server that carries out exchanges instead of rounds.

    Args:
        num_clients (`int`): Number of clients to wait for.
        port (`int`): Port of `network_flower.py`.
    """

    def __init__(self, num_clients: int, port: int) -> None:
        super().__init__(client_manager=SimpleClientManager())
        self.num_clients = num_clients
        self.port = port

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        self.client_manager().wait_for(self.num_clients)
        clients = list(self.client_manager().all().values())

        def exchange(payload: np.ndarray) -> float:
            instructions = FitIns(Parameters([payload.tobytes()], "numpy.ndarray"), {})
            started = time.perf_counter()
            results, failures = fit_clients([(client, instructions) for client in clients], None, None, 1)
            seconds = time.perf_counter() - started
            assert not failures and len(results) == len(clients), failures
            assert all(len(result.parameters.tensors[0]) == payload.size for _, result in results)
            return seconds

        answer_requests(self.port, exchange)
        return History(), 0.0


class ReturningClient(Client):
    """Returns the received parameters."""

    def fit(self, ins: FitIns) -> FitRes:
        return FitRes(Status(Code.OK, ""), ins.parameters, 1, {})


def run_grpc() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("--address", required=True)
    parser.add_argument("--certificates", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--port", type=int, help="port of network_flower.py")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    authority = (options.certificates / "ca.pem").read_bytes()
    if options.role == "client":
        start_client(server_address=options.address, client=ReturningClient(), root_certificates=authority)
        return
    pair = [(options.certificates / name).read_bytes() for name in ("server.pem", "server.key")]
    start_server(
        server_address=options.address,
        server=ExchangeServer(options.clients, options.port),
        config=ServerConfig(num_rounds=1),
        certificates=(authority, pair[0], pair[1]),
    )


if __name__ == "__main__":
    run_grpc()
