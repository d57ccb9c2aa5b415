"""Measure secure aggregation: time, bytes and memory relative to plain rounds, also with lost clients.

    python benchmarks/secure_aggregation.py round               # a round in one process with the size of MiniLM
    python benchmarks/secure_aggregation.py lost                # server and clients by number of lost clients
    python benchmarks/secure_aggregation.py network memory      # rounds and memory of clients that are processes

`round` alternates its sides, one run of one round at a time, and compares each side to the plain round before it.
`README.md` in this folder describes the numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from engine import print_table
from network_scale import FORK, NUM_WARM_UP, receive, start
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging
from workload import Workload, build_model, build_rows, training_arguments

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, FederatedTrainer, NetworkEngine
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientFailure, Message
from hf_federated.messages.secure_aggregation import SubmitMasked
from hf_federated.secure_aggregation import SECURE_AGGREGATIONS


MAX_WEIGHT = 2000
# Name of a side: protocol, its settings, and number of clients that are lost before they send their masked updates.
SIDES: dict[str, tuple[str | None, dict[str, Any], int]] = {
    "plain": (None, {}, 0),
    "secagg": ("secagg", {}, 0),
    "secagg, 3 lost": ("secagg", {}, 3),
    "secagg, masks=False": ("secagg", {"masks": False}, 0),
    "secagg, bits=16": ("secagg", {"bits": 16, "clip": 4e-3}, 0),
    # (N, U, T): clients, survivors that the server needs, clients that learn nothing together.
    "lightsecagg (10, 7, 3)": ("lightsecagg", {"threshold": 7, "num_private": 3}, 0),
    "lightsecagg (10, 7, 5)": ("lightsecagg", {"threshold": 7, "num_private": 5}, 0),
}
# Settings of the protocols in `lost`, whose largest share of lost clients is 0.3.
PROTOCOLS: dict[str, dict[str, Any]] = {"secagg": {}, "secagg+": {"lost_share": 0.3}, "lightsecagg": {}}


class MeasuredEngine(LocalEngine):
    """
    Engine in one process that measures clients by kind of request, and loses clients.

    Args:
        lost (`Sequence[str]`, *optional*): Clients that are lost before they send their masked updates.
    """

    def __init__(self, lost: Sequence[str] = ()) -> None:
        super().__init__()
        self.client_seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes_up: Counter[str] = Counter()
        self._lost = frozenset(lost)

    def _deliver(self, message: Message) -> Message:
        if isinstance(message, SubmitMasked) and message.client_id in self._lost:
            return ClientFailure(message.round, message.client_id, "The client is lost.", nonce=message.nonce)
        started = time.process_time()
        reply = super()._deliver(message)
        self.client_seconds[message.kind] += time.process_time() - started
        self.bytes_up[message.kind] += reply.num_bytes
        return reply


class RoundClock(FederatedCallback):
    """Records the CPU seconds and the seconds of each round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []
        self.num_failures = 0

    def on_round_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin = time.process_time(), time.perf_counter()

    def on_round_end(self, *args: Any, round: Any = None, **kwargs: Any) -> None:
        self.rounds.append((time.process_time() - self._begin[0], time.perf_counter() - self._begin[1]))
        self.num_failures += len(round.rejected)


def config(protocol: str | None, settings: Mapping[str, Any], num_rounds: int = 1) -> FederatedConfig:
    kwargs = {"max_weight": MAX_WEIGHT, **settings} if protocol is not None else None
    return FederatedConfig(num_rounds=num_rounds, secure_aggregation=protocol, secure_aggregation_kwargs=kwargs)


def run_round(
    model: nn.Module,
    arguments: Mapping[str, Any],
    clients: Any,
    protocol: str | None,
    settings: Mapping[str, Any],
    num_lost: int = 0,
) -> dict[str, Any]:
    """Run one round in this process, and return its seconds and bytes."""
    clock, engine = RoundClock(), MeasuredEngine(list(clients)[len(clients) - num_lost :])
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            model=model,
            args=TrainingArguments(**{**arguments, "output_dir": folder}),
            train_dataset=clients,
            engine=engine,
            callbacks=[clock],
            federation=config(protocol, settings),
        )
        trainer.train()
    [(cpu_seconds, seconds)] = clock.rounds
    gc.collect()
    return {
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "client_seconds": dict(engine.client_seconds),
        "server_seconds": cpu_seconds - sum(engine.client_seconds.values()),
        "bytes_up": dict(engine.bytes_up),
        "num_failures": clock.num_failures,
    }


def measure_round(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a round of each side to a plain round."""
    sides = {
        name: side for name, side in SIDES.items() if name == "plain" or not options.sides or name in options.sides
    }
    entries = []
    for num_steps in options.steps:
        workload = Workload(options.model, options.clients, 1, num_steps, 8, 64)
        clients = FederatedDataset.from_column(build_rows(workload), "client")
        model, arguments = build_model(workload), training_arguments(workload, "")
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(options.repetitions + 1):
            for name, (protocol, settings, num_lost) in sides.items():
                runs[name].append(run_round(model, arguments, clients, protocol, settings, num_lost))
        for name, measured in runs.items():
            entries.append({"steps": num_steps, "side": name, **_relative(measured[1:], runs["plain"][1:])})
    names = ("cpu_seconds", "cpu_ratio", "ratio_range", "seconds_ratio", "server_seconds", "bytes_ratio")
    print_table(
        f"A round of {options.clients} clients, {options.model}",
        ["steps", "side", "CPU s", "x plain", "range", "x plain (s)", "server CPU s", "bytes up, x plain"],
        [[entry["steps"], entry["side"], *(_shown(entry[name]) for name in names)] for entry in entries],
    )
    return entries


def _relative(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, and medians of the ratios to the plain rounds of the same turns."""
    pairs = list(zip(runs, plain, strict=True))
    ratios = [run["cpu_seconds"] / other["cpu_seconds"] for run, other in pairs]
    return {
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "server_seconds": statistics.median(run["server_seconds"] for run in runs),
        "cpu_ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "seconds_ratio": statistics.median(run["seconds"] / other["seconds"] for run, other in pairs),
        "client_seconds": _medians([run["client_seconds"] for run in runs]),
        "bytes_ratio": sum(runs[0]["bytes_up"].values()) / sum(plain[0]["bytes_up"].values()),
    }


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _shown(value: Any) -> str:
    return "-".join(f"{each:.3f}" for each in value) if isinstance(value, list) else f"{value:.4g}"


class Values(nn.Module):
    """A model with a number of parameters whose training takes almost no time."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(num_values))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.values[:8].square().sum() + 0 * inputs.sum()}


def measure_lost(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure server, clients and bytes by protocol, number of clients and share of lost clients."""
    entries = [
        costs(name, PROTOCOLS[name], num_clients, round(share * num_clients), options.values, options.repetitions)
        for num_clients in options.lost_clients
        for share in options.lost_shares
        for name in options.protocols
    ]
    print_table(
        f"CPU seconds without local training, {options.values} values",
        ["protocol", "clients", "partners", "lost", "server s", "s a client", "bytes up, x float32", "round s"],
        [[_shown(value) if isinstance(value, float) else value for value in entry.values()] for entry in entries],
    )
    return entries


def costs(
    protocol: str | None,
    settings: Mapping[str, Any],
    num_clients: int,
    num_lost: int,
    num_values: int,
    repetitions: int,
) -> dict[str, Any]:
    """Return the CPU seconds of the server and the mean of all clients, and the bytes that survivors send."""
    arguments = training_arguments(Workload("tiny", 1, 1, batch_size=1), "") | {"optim": "sgd"}
    clients = {str(number): Dataset.from_dict({"inputs": [[1.0]]}) for number in range(num_clients)}
    runs = [
        run_round(Values(num_values), arguments, clients, protocol, settings, num_lost) for _ in range(repetitions)
    ]

    def client(run: dict[str, Any]) -> float:
        seconds: float = sum(value for kind, value in run["client_seconds"].items() if kind != "secure_fit")
        return seconds / num_clients

    return {
        "protocol": protocol,
        "clients": num_clients,
        "partners": num_partners(protocol, settings, num_clients),
        "lost": num_lost,
        "server_seconds": statistics.median(run["server_seconds"] for run in runs),
        "client_seconds": statistics.median(client(run) for run in runs),
        "bytes_up": sum(runs[0]["bytes_up"].values()) / ((num_clients - num_lost) * 4 * num_values),
        "round_seconds": statistics.median(run["cpu_seconds"] for run in runs),
    }


def num_partners(protocol: str | None, settings: Mapping[str, Any], num_clients: int) -> int:
    """Return the number of clients to which a client sends shares."""
    if protocol is None:
        return 0
    names = [str(number) for number in range(num_clients)]
    created = SECURE_AGGREGATIONS[protocol](max_weight=MAX_WEIGHT, **settings)
    return len(created.neighbors_of(names[0], names, bytes(32)))


def run_server(workload: Workload, protocol: str | None, results: Any) -> None:
    """Run a federation over a network. Send the address of the server, then the seconds of its rounds."""
    _prepare_process()
    names = [str(number) for number in range(workload.num_clients)]
    engine, clock = NetworkEngine(names, address="127.0.0.1:0", insecure=True, join_timeout=300), RoundClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            model=build_model(workload),
            args=TrainingArguments(**training_arguments(workload, folder)),
            engine=engine,
            callbacks=[clock],
            federation=config(protocol, {"pins": "none"}, workload.num_rounds),
        )
        start_transport = engine.transport.start

        def start_and_send(client_ids: Any, settings: Any) -> None:
            start_transport(client_ids, settings)
            results.send(engine.transport.address)

        engine.transport.start = start_and_send  # type: ignore[method-assign]
        trainer.train()
    if clock.num_failures:
        raise RuntimeError(f"{clock.num_failures} replies failed.")
    results.send([seconds for _, seconds in clock.rounds[NUM_WARM_UP:]])


def run_client(workload: Workload, protocol: str | None, number: int, address: str, results: Any) -> None:
    """Take part in a federation. Send the peak memory of this process above the memory before the first round."""
    _prepare_process()
    size = workload.rows_per_client
    rows = build_rows(workload).remove_columns("client").select(range(number * size, (number + 1) * size))
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            model=build_model(workload),
            args=TrainingArguments(**training_arguments(workload, folder)),
            train_dataset={str(number): rows},
            federation=config(protocol, {"pins": "none"}, workload.num_rounds),
        )
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _peak_bytes()
        trainer.join(address, client_id=str(number), insecure=True)
    payload = sum(value.nbytes for value in trainer.exchange.read().values())
    results.send((_peak_bytes() - before) / payload)


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _prepare_process() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_network(workload: Workload, protocol: str | None) -> dict[str, Any]:
    """Run a federation of processes on this machine."""
    results, sender = FORK.Pipe(duplex=False)
    server = start(run_server, workload, protocol, sender)
    address = receive(results)
    peaks, peak_sender = FORK.Pipe(duplex=False)
    clients = [
        start(run_client, workload, protocol, number, address, peak_sender) for number in range(workload.num_clients)
    ]
    seconds = receive(results)
    measured = [receive(peaks) for _ in clients]
    for process in (server, *clients):
        process.join(60)
    return {"seconds": statistics.median(seconds), "payloads": statistics.median(measured)}


def measure_processes(options: argparse.Namespace, workload: Workload, field: str) -> dict[str, Any]:
    """Run plain and secure federations in turns, and return a number of each run."""
    found: dict[str, list[float]] = {"plain": [], "secagg": []}
    for _ in range(options.repetitions):
        for name, values in found.items():
            values.append(run_network(workload, None if name == "plain" else name)[field])
    medians = {name: statistics.median(values) for name, values in found.items()}
    above = {
        name: statistics.median(a - b for a, b in zip(values, found["plain"], strict=True))
        for name, values in found.items()
    }
    return {"medians": medians, "above_plain": above, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="+", choices=["round", "lost", "network", "memory"])
    parser.add_argument("--model", default="minilm", help="model of `round` and `memory`")
    parser.add_argument("--clients", type=int, default=10, help="clients of `round`")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16], help="local steps of `round`")
    parser.add_argument("--sides", nargs="*", default=[], metavar="SIDE", help=f"one of {', '.join(SIDES)}")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--values", type=int, default=2_000_000, help="parameters of `lost`")
    parser.add_argument("--lost-clients", type=int, nargs="+", default=[10, 25, 50], help="clients of `lost`")
    parser.add_argument("--protocols", nargs="+", default=list(PROTOCOLS), choices=list(PROTOCOLS), help="of `lost`")
    parser.add_argument("--lost-shares", type=float, nargs="+", default=[0, 0.1, 0.2, 0.3])
    parser.add_argument("--rounds", type=int, default=12, help="rounds of `network`, at least 3")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "round" in options.measurements or "lost" in options.measurements:
        torch.set_num_threads(1)
    tiny = Workload("tiny", 4, options.rounds, 1, 8, 16)
    large = Workload(options.model, 3, NUM_WARM_UP + 1, 1, 1, 8)
    measurements = {
        "network": lambda: measure_processes(options, tiny, "seconds"),
        "memory": lambda: measure_processes(options, large, "payloads"),
        "round": lambda: measure_round(options),
        "lost": lambda: measure_lost(options),
    }
    results: dict[str, Any] = {"load": os.getloadavg()}
    # Processes are forked before this process computes.
    for name in (name for name in measurements if name in options.measurements):
        results[name] = measurements[name]()
        print(name, json.dumps(results[name]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
