"""Measure exchanges and transfers over stock Flower, next to [`GrpcTransport`] and bare gRPC.

    python -m venv flower && flower/bin/pip install "flwr==1.41.*"
    python benchmarks/network_flower.py --flower-python flower/bin/python --output flower.json

Flower has a separate environment, because it excludes the versions of protobuf and rich with which the library is
developed. Four sides take turns: bare gRPC and the library as in `network.py`, Flower's deployment engine, which sends
messages over HTTP, and Flower's `start_server` and `start_client`, which are deprecated and use gRPC. Each client is a
process. All sides use TLS on the loopback interface. Bare gRPC and the library also verify the certificates of
clients. Flower's defaults are unchanged, except that it installs no dependencies at run time, reports no usage and
looks for no updates.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from network import MEGABYTE, BareSide, TransportSide

import hf_federated
from hf_federated.security.certificates import create_certificates


APP = Path(__file__).with_name("network_flower_app.py")

PYPROJECT = """\
[project]
name = "exchange"
version = "1.0.0"
description = "Exchanges of a benchmark"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "network_flower_app:server_app"
clientapp = "network_flower_app:client_app"

[tool.flwr.app.config]
port = {port}
clients = {clients}
"""

CONNECTION = """\
[superlink]
default = "benchmark"

[superlink.benchmark]
address = "{address}"
root-certificates = "{authority}"
"""


def flower_environment() -> dict[str, str]:
    """Return the environment variables without the packages of this interpreter."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def free_address() -> str:
    """Return an address of the loopback interface with a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


class FlowerSide:
    """
    Processes of Flower, and the connection to the process that carries out exchanges.

    Args:
        python (`str`): Interpreter of the environment with Flower.
        folder (`Path`): Folder for the logs and the files of Flower, with the certificates in `certificates`.
        num_clients (`int`): Number of clients.
    """

    def __init__(self, python: str, folder: Path, num_clients: int) -> None:
        self.python = python
        self.folder = folder
        self.certificates = folder / "certificates"
        self.num_clients = num_clients
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.environment = {
            **flower_environment(),
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        try:
            self.start_processes()
            self._listener.settimeout(120)
            self._connection, _ = self._listener.accept()
        except BaseException:
            self.stop_processes()
            raise
        self._stream = self._connection.makefile("rw")

    def start_processes(self) -> None:
        """Start the server and the clients."""
        raise NotImplementedError

    def start(self, *command: str) -> None:
        """Start a process of Flower in a new process group."""
        log = (self.folder / f"{type(self).__name__}-{len(self._processes)}.log").open("wb")
        self._processes.append(
            subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        )

    def seconds(self, size: int, calls: int) -> float:
        """Return the seconds of an exchange of a payload with all clients."""
        self._stream.write(f"{size} {calls}\n")
        self._stream.flush()
        answer = self._stream.readline()
        if not answer:
            raise RuntimeError(f"Flower ended during an exchange of {size} bytes. Its logs are in {self.folder}.")
        return float(answer)

    def stop_processes(self) -> None:
        """End all processes."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue  # the process has ended
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the run and all processes."""
        self._stream.close()
        self._connection.close()
        self._listener.close()
        self.stop_processes()


class DeploymentSide(FlowerSide):
    """Exchanges of `Grid.send_and_receive` on the deployment engine: a SuperLink, SuperNodes and `flwr run`."""

    def start_processes(self) -> None:
        app = self.folder / "app"
        app.mkdir()
        shutil.copy(APP, app)
        (app / "pyproject.toml").write_text(PYPROJECT.format(port=self.port, clients=self.num_clients))
        address, authority = free_address(), self.certificates / "ca.pem"
        home = self.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(CONNECTION.format(address=address, authority=authority))
        port = address.rpartition(":")[2]
        files = [self.certificates / name for name in ("server.pem", "server.key", "ca.pem")]
        names = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile")
        tls = [part for name, file in zip(names, files, strict=True) for part in (name, str(file))]
        self.start("flower-superlink", "--port", port, "--disable-runtime-dependency-installation", *tls)
        wait_until_open(address)
        for number in range(self.num_clients):
            port = free_address().rpartition(":")[2]
            self.start(
                "flower-supernode",
                *("--superlink", address, "--root-certificates", str(authority), "--port", port),
                *("--node-config", f"partition-id={number}"),
            )
        self.start("flwr", "run", str(app), "benchmark")


class GrpcSide(FlowerSide):
    """Exchanges of `fit_clients` over `start_server` and `start_client`."""

    def start_processes(self) -> None:
        address = free_address()
        options = ["--address", address, "--certificates", str(self.certificates)]
        server = ["--clients", str(self.num_clients), "--port", str(self.port)]
        self.start(self.python, str(APP), "server", *options, *server)
        wait_until_open(address)
        for _ in range(self.num_clients):
            self.start(self.python, str(APP), "client", *options)


def wait_until_open(address: str) -> None:
    """Wait until a server listens at an address, at most 60 seconds."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def timed(exchange: Callable[[bytes], None]) -> Callable[[int, int], float]:
    """Return a function that measures the seconds of an exchange."""

    def seconds(size: int, calls: int) -> float:
        payload = os.urandom(size)
        started = time.perf_counter()
        exchange(payload, calls)
        return (time.perf_counter() - started) / calls

    return seconds


def alternate(
    sides: dict[str, Callable[[int, int], float]], size: int, repetitions: int, calls: dict[str, int]
) -> dict[str, Any]:
    """
    Time exchanges of all sides in turns.

    Args:
        sides (`dict[str, Callable]`): Function of each side that returns the seconds of an exchange.
        size (`int`): Bytes of a payload, in each direction.
        repetitions (`int`): Number of turns.
        calls (`dict[str, int]`): Number of exchanges of a turn of each side, 1 for sides that it does not name.

    Returns:
        `dict[str, Any]`: Seconds of an exchange in each turn and their median, and the same relative to `"bare"`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions + 1):
        for name, measure in sides.items():
            measured = measure(size, calls.get(name, 1))
            if repetition:  # the first turn starts threads and connections
                seconds[name].append(measured)
    results: dict[str, Any] = {"size": size, "load": os.getloadavg()}
    for name, values in seconds.items():
        ratios = [value / bare for value, bare in zip(values, seconds["bare"], strict=True)]
        results[name] = {
            "seconds": statistics.median(values),
            "ratio": statistics.median(ratios),
            "all_seconds": values,
            "all_ratios": ratios,
        }
    print(json.dumps(results), flush=True)
    return results


def versions(python: str) -> dict[str, str]:
    """Return the versions of the compared libraries, and check that Flower is installed."""
    code = "from importlib.metadata import version; print(version('flwr'), version('grpcio'))"
    found = subprocess.run([python, "-c", code], env=flower_environment(), capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(
            f"network_flower.py: {python} has no Flower. Install it in a separate environment "
            '(`python -m venv flower && flower/bin/pip install "flwr==1.41.*"`) and set --flower-python to its '
            "interpreter."
        )
    flower, flower_grpc = found.stdout.split()
    return {
        "hf_federated": hf_federated.__version__,
        "grpcio": grpc.__version__,
        "flwr": flower,
        "grpcio of flwr": flower_grpc,
    }


def measure(options: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Start all sides and measure them."""
    clients = [f"client-{number}" for number in range(options.clients)]
    results: dict[str, Any] = {"load": os.getloadavg()}
    certificates = folder / "certificates"
    create_certificates(certificates, ["localhost", "127.0.0.1"], clients)
    opened: list[Any] = []
    try:
        opened += [BareSide(str(certificates), clients), TransportSide(str(certificates), clients)]
        sides = {name: timed(side.exchange) for name, side in zip(("bare", "transport"), opened, strict=True)}
        for name, side in (("flower", DeploymentSide), ("flower_grpc", GrpcSide)):
            opened.append(side(python, folder, options.clients))
            sides[name] = opened[-1].seconds
        calls = {"bare": options.calls, "transport": options.calls, "flower_grpc": options.calls}
        results["exchange"] = alternate(sides, 1000, options.repetitions, calls)
        results["transfer"] = alternate(sides, options.transfer_mb * MEGABYTE, options.repetitions, {})
    finally:
        for side in opened:
            side.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower-python", default=sys.executable, help="interpreter that has flwr")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--calls", type=int, default=100, help="small exchanges of a turn; the deployment engine has 1"
    )
    parser.add_argument("--transfer-mb", type=int, default=100)
    parser.add_argument("--output", required=True, help="JSON file to write the results to")
    options = parser.parse_args()
    python = os.path.abspath(options.flower_python)
    results: dict[str, Any] = {"versions": versions(python)}
    folder = Path(tempfile.mkdtemp(prefix="network-flower-"))
    results |= measure(options, python, folder)
    Path(options.output).write_text(json.dumps(results, indent=2))
    shutil.rmtree(folder)  # an error keeps the logs


if __name__ == "__main__":
    main()
