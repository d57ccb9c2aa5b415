"""Measure the transport of `NetworkEngine`: exchanges, transfers, the memory of the server, many clients and latency.

    python benchmarks/network.py exchange transfer memory scale latency --output network.json

Clients run in a second process on the loopback interface, with mutual TLS. `exchange` and `transfer` alternate the
transport and bare gRPC calls with the same TLS and the same bytes, so that other programs disturb both equally. The
clients of the bare calls make the calls of a turn one after the other, without a word from the server.
`memory` runs one round of FedAvg with clients that return the received parameters. Each server is a separate process.
For `scale` and `latency`, see `network_scale.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import torch
from network_scale import measure_latency, measure_scale
from returning_clients import MEGABYTE, Payload, returning_clients
from transformers import TrainingArguments

from hf_federated import FederatedConfig, FederatedTrainer, NetworkEngine
from hf_federated.security.certificates import create_certificates
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import GrpcConnection, GrpcTransport, TlsCredentials
from hf_federated.transport.framing import frame
from hf_federated.transport.protocol import JoinedPieces, split_into_chunks


SETTINGS = NetworkSettings({"benchmark": "network"})


def echo_client(address: str, certificates: str, name: str) -> None:
    """Return each request to the server until the run ends."""
    with GrpcConnection(address, certificates, name, SETTINGS, frame({"num_examples": 1})) as connection:
        reply = None
        while (reply := connection.receive(reply)) is not None:
            pass


class TransportSide:
    """
    Exchanges over [`GrpcTransport`].

    Args:
        certificates (`str`): Folder with the certificates.
        clients (`list[str]`): Ids of the clients.
    """

    def __init__(self, certificates: str, clients: list[str]) -> None:
        self.clients = clients
        self.transport = GrpcTransport("localhost:0", certificates)
        self.transport.start(clients, SETTINGS)
        context = multiprocessing.get_context("spawn")
        self.processes = [
            context.Process(target=echo_client, args=(self.transport.address, certificates, name), daemon=True)
            for name in clients
        ]
        for process in self.processes:
            process.start()
        for _ in clients:
            assert self.transport.receive(120).kind == "joined"

    def exchange(self, payload: bytes, calls: int = 1) -> None:
        """Send a payload to all clients and receive it from all of them, `calls` times."""
        for _ in range(calls):
            for name in self.clients:
                self.transport.send(name, lambda: JoinedPieces(payload))
            for _ in self.clients:
                event = self.transport.receive(120)
                assert event is not None and len(event.blob) == len(payload)
                del event

    def close(self) -> None:
        """End the run."""
        self.transport.stop()
        for process in self.processes:
            process.join(20)


def bare_client(address: str, certificates: str, name: str, requests: Any, answers: Any) -> None:
    """Carry out the exchanges of the bare side: a unary call, or a stream of chunks for large payloads."""
    tls = TlsCredentials.of_client(certificates, name)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    with grpc.secure_channel(address, credentials, options=[("grpc.max_receive_message_length", -1)]) as channel:
        unary = channel.unary_unary("/bare/Unary")
        stream = channel.stream_stream("/bare/Stream")
        answers.put("ready")
        while (request := requests.get()) is not None:
            size, calls = request
            payload = bytes(size)
            for _ in range(calls):
                if size < MEGABYTE:
                    received = len(unary(payload))
                else:
                    received = len(b"".join(stream(split_into_chunks(payload))))
                assert received == size
            answers.put("done")


class BareSide:
    """
    The same exchanges as bare gRPC calls of the clients.

    Args:
        certificates (`str`): Folder with the certificates.
        clients (`list[str]`): Ids of the clients.
    """

    def __init__(self, certificates: str, clients: list[str]) -> None:
        def stream(chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
            return split_into_chunks(b"".join(chunks))

        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
            "Stream": grpc.stream_stream_rpc_method_handler(stream),
        }
        tls = TlsCredentials.of_server(certificates)
        self._server = grpc.server(
            ThreadPoolExecutor(8), handlers=[grpc.method_handlers_generic_handler("bare", handlers)]
        )
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
        )
        address = f"localhost:{self._server.add_secure_port('localhost:0', credentials)}"
        self._server.start()
        context = multiprocessing.get_context("spawn")
        self._queues = [(context.Queue(), context.Queue()) for _ in clients]
        self.processes = [
            context.Process(target=bare_client, args=(address, certificates, name, *queues), daemon=True)
            for name, queues in zip(clients, self._queues, strict=True)
        ]
        for process in self.processes:
            process.start()
        for _, answers in self._queues:
            answers.get(timeout=120)

    def exchange(self, payload: bytes, calls: int = 1) -> None:
        """
        Let all clients send a payload of this size and receive it, `calls` times.

        The queues between the processes start and end the calls of a turn. They are not used between the calls.
        """
        for requests, _ in self._queues:
            requests.put((len(payload), calls))
        for _, answers in self._queues:
            answers.get(timeout=120)

    def close(self) -> None:
        """Stop the clients and the server."""
        for requests, _ in self._queues:
            requests.put(None)
        self._server.stop(1)


def alternate(size: int, num_clients: int, repetitions: int, calls: int) -> dict[str, Any]:
    """
    Time exchanges over the transport and over bare gRPC in turns.

    Args:
        size (`int`): Bytes of a payload, in each direction.
        num_clients (`int`): Number of clients that exchange at the same time.
        repetitions (`int`): Number of turns.
        calls (`int`): Number of exchanges of a turn.

    Returns:
        `dict[str, Any]`: For both sides the median seconds and the median CPU seconds of an exchange, of the server
        and all clients together, and the medians and all values of their ratios.
    """
    clients = [f"client-{number}" for number in range(num_clients)]
    with tempfile.TemporaryDirectory() as folder:
        create_certificates(folder, ["localhost"], clients)
        sides = {"transport": TransportSide(folder, clients), "bare": BareSide(folder, clients)}
        payload = bytes(size)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repetition in range(repetitions + 1):
            for name, side in sides.items():
                started, cpu_started = time.perf_counter(), cpu_time(side)
                side.exchange(payload, calls)
                if repetition:  # the first turn starts threads and connections
                    seconds[name].append((time.perf_counter() - started) / calls)
                    cpu_seconds[name].append((cpu_time(side) - cpu_started) / calls)
        for side in sides.values():
            side.close()
    return {"size": size, "clients": num_clients, "seconds": compare(seconds), "cpu_seconds": compare(cpu_seconds)}


def cpu_time(side: TransportSide | BareSide) -> float:
    """Return the CPU seconds so far of this process and the clients of a side."""
    clients = [psutil.Process(process.pid).cpu_times() for process in side.processes]
    return time.process_time() + sum(times.user + times.system for times in clients)


def compare(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of both sides, and their ratios."""
    ratios = [a / b for a, b in zip(values["transport"], values["bare"], strict=True)]
    medians = {name: statistics.median(each) for name, each in values.items()}
    return {**medians, "ratio": statistics.median(ratios), "ratios": ratios}


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, without that of its parent. Linux only."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def run_server(num_bytes: int, num_clients: int, answers: Any) -> None:
    """Run one round with clients in another process, and report the memory of this process."""
    torch.set_num_threads(1)
    names = [f"client {number}" for number in range(num_clients)]
    engine = NetworkEngine(names, address="127.0.0.1:0", insecure=True)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
        trainer = FederatedTrainer(
            model=Payload(num_bytes), args=args, engine=engine, federation=FederatedConfig(num_rounds=1)
        )
        before = peak_memory()
        start = engine.transport.start

        def start_clients(client_ids: Any, settings: Any) -> None:
            start(client_ids, settings)
            context = multiprocessing.get_context("spawn")
            arguments = (engine.transport.address, settings.to_dict(), names)
            context.Process(target=returning_clients, args=arguments).start()

        engine.transport.start = start_clients  # type: ignore[method-assign]
        trainer.train()
        answers.put({"before": before, "peak": peak_memory()})


def measure_memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the peak memory of servers with different numbers of clients."""
    results = []
    context = multiprocessing.get_context("spawn")
    for num_clients in options.memory_clients:
        answers = context.Queue()
        server = context.Process(target=run_server, args=(options.payload_mb * MEGABYTE, num_clients, answers))
        server.start()
        measured = answers.get(timeout=600)
        server.join()
        # The peak before the round contains the imports and the model.
        payloads = (measured["peak"] - measured["before"]) / (options.payload_mb * MEGABYTE)
        results.append({"clients": num_clients, **measured, "payloads_above_the_model": payloads})
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="+", choices=["exchange", "transfer", "memory", "scale", "latency"])
    parser.add_argument("--clients", type=int, default=3, help="number of clients of `exchange` and `transfer`")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300, help="exchanges of a turn of `exchange`")
    parser.add_argument("--transfer-mb", type=int, default=100)
    parser.add_argument("--payload-mb", type=int, default=350, help="size of the model of `memory`")
    parser.add_argument("--memory-clients", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--scale-clients", type=int, nargs="+", default=[8, 32, 64, 128, 200])
    parser.add_argument("--real-clients", type=int, nargs="+", default=[8, 32, 64], help="processes of `scale`")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of `scale` and `latency`, at least 3")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds in each direction in `latency`")
    parser.add_argument("--output", help="JSON file to write the results to")
    options = parser.parse_args()
    measurements: dict[str, Callable[[], Any]] = {
        "exchange": lambda: alternate(1000, options.clients, options.repetitions, options.calls),
        "transfer": lambda: alternate(options.transfer_mb * MEGABYTE, options.clients, options.repetitions, calls=1),
        "memory": lambda: measure_memory(options),
        "scale": lambda: measure_scale(options.scale_clients, options.real_clients, options.rounds),
        "latency": lambda: measure_latency(options.clients, options.delay, options.rounds),
    }
    results: dict[str, Any] = {"load": os.getloadavg()}
    for name in options.measurements:
        results[name] = measurements[name]()
        print(name, json.dumps(results[name]), flush=True)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
