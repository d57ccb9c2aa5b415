"""Rounds of `NetworkEngine` with many clients, and over a link with latency. `network.py` runs these measurements.

- `measure_scale`: seconds of a round of FedAvg with a tiny model. The clients are threads of two processes and return
  the received parameters, or each client is a process with a trainer.
- `measure_latency`: seconds that a delay of the link adds to a round, in round trips. The clients are threads that
  return the received parameters at once.

Each server is a separate process. All processes are forked from one process, which has imported the libraries and
uses neither gRPC nor threads. The connections use no TLS.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from returning_clients import returning_clients
from tcp_proxy import TcpProxy
from torch import nn
from transformers import TrainingArguments

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer, NetworkEngine


NUM_PROCESSES = 2
# Rounds in which threads and connections start.
NUM_WARM_UP = 2
FORK = multiprocessing.get_context("fork")
TIMEOUT = 900


class TinyModel(nn.Module):
    """A classifier with 1000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear = nn.Linear(499, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class RoundTimes(FederatedCallback):
    """Records the time, the CPU time and the failures at the end of each round."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.num_failures = 0

    def on_round_end(self, args: Any, state: Any, control: Any, round: Any = None, **kwargs: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))
        self.num_failures += len(round.rejected)


def training_arguments(folder: str) -> TrainingArguments:
    return TrainingArguments(folder, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)


def config(num_rounds: int) -> FederatedConfig:
    return FederatedConfig(num_rounds=num_rounds, local_steps=1)


def run_server(names: list[str], num_rounds: int, results: Any) -> None:
    """Run a federation. Send the address and the settings, then the seconds and the CPU seconds of its rounds."""
    torch.set_num_threads(1)
    engine = NetworkEngine(names, address="127.0.0.1:0", insecure=True, join_timeout=300)
    times = RoundTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            model=TinyModel(),
            args=training_arguments(folder),
            engine=engine,
            federation=config(num_rounds),
            callbacks=[times],
        )
        start = engine.transport.start

        def start_and_send(client_ids: Any, settings: Any) -> None:
            start(client_ids, settings)
            results.send((engine.transport.address, settings.to_dict()))

        engine.transport.start = start_and_send  # type: ignore[method-assign]
        trainer.train()
    assert times.num_failures == 0, f"{times.num_failures} replies failed"
    results.send(np.diff(np.array(times.ends), axis=0)[NUM_WARM_UP - 1 :].T.tolist())


# Starts the clients and returns their processes. The arguments are the address, the settings and the client ids.
StartClients = Callable[[str, dict[str, str], list[str]], list[Any]]


def start(target: Callable[..., None], *arguments: Any) -> Any:
    # A process that waits for another one ends with the script if a measurement fails.
    process = FORK.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def start_threads(address: str, settings: dict[str, str], names: list[str]) -> list[Any]:
    """Start clients as threads of two processes."""
    parts = [names[number::NUM_PROCESSES] for number in range(NUM_PROCESSES)]
    return [start(returning_clients, address, settings, part) for part in parts if part]


def start_delayed_threads(delay: float, address: str, settings: dict[str, str], names: list[str]) -> list[Any]:
    """Start clients as threads of a process that reaches the server over a link with latency."""
    return [start(delayed_clients, delay, address, settings, names)]


def delayed_clients(delay: float, address: str, settings: dict[str, str], names: list[str]) -> None:
    """Run clients that reach the server over a link with latency."""
    with TcpProxy(address, delay=delay) as proxy:
        returning_clients(proxy.address, settings, names)


def start_processes(num_rounds: int, address: str, settings: dict[str, str], names: list[str]) -> list[Any]:
    """Start each client as a process with a trainer."""
    return [start(train_client, num_rounds, address, name, number) for number, name in enumerate(names)]


def train_client(num_rounds: int, address: str, name: str, number: int) -> None:
    """Take part in a federation with a trainer."""
    torch.set_num_threads(1)
    inputs = np.random.default_rng(number).normal(size=(8, 499)).astype(np.float32)
    examples = Dataset.from_dict({"inputs": inputs.tolist(), "labels": [0, 1] * 4})
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            model=TinyModel(),
            args=training_arguments(folder),
            train_dataset={name: examples},
            federation=config(num_rounds),
        )
        trainer.join(address, client_id=name, insecure=True)


def round_seconds(num_clients: int, num_rounds: int, start_clients: StartClients) -> list[list[float]]:
    """Run a federation, and return the seconds and the CPU seconds of each round of the server."""
    names = [f"client {number}" for number in range(num_clients)]
    results, sender = FORK.Pipe(duplex=False)
    processes = [start(run_server, names, num_rounds, sender)]
    sender.close()  # The end of the server then ends the pipe.
    processes += start_clients(*receive(results), names)
    measured: list[list[float]] = receive(results)
    for process in processes:
        process.join(TIMEOUT)
    return measured


def receive(results: Any) -> Any:
    if not results.poll(TIMEOUT):
        raise TimeoutError(f"The server sent no result for {TIMEOUT} s.")
    return results.recv()


def measure_scale(thread_counts: list[int], process_counts: list[int], num_rounds: int) -> dict[str, Any]:
    """
    Measure the seconds of a round with different numbers of clients, and fit a line.

    Args:
        thread_counts (`list[int]`): Numbers of clients that are threads.
        process_counts (`list[int]`): Numbers of clients that are processes with a trainer.
        num_rounds (`int`): Number of rounds.
    """
    results: dict[str, Any] = {}
    num_rounds += NUM_WARM_UP
    for kind, counts, start_clients in (
        ("threads", thread_counts, start_threads),
        ("processes", process_counts, functools.partial(start_processes, num_rounds)),
    ):
        measured = []
        for num_clients in counts:
            seconds, cpu_seconds = round_seconds(num_clients, num_rounds, start_clients)
            medians = {"seconds": statistics.median(seconds), "server_cpu_seconds": statistics.median(cpu_seconds)}
            measured.append({"clients": num_clients, **medians})
            print(kind, json.dumps(measured[-1]), flush=True)
        results[kind] = {"rounds": measured}
        if len(counts) > 1:
            results[kind] |= {name: fit_line(counts, [each[name] for each in measured]) for name in medians}
    return results


def fit_line(counts: list[int], seconds: list[float]) -> dict[str, float]:
    """Fit seconds as a linear function of the number of clients."""
    slope, intercept = np.polyfit(counts, seconds, 1)
    residual = np.square(np.polyval([slope, intercept], counts) - seconds).sum()
    explained = 1 - residual / np.square(seconds - np.mean(seconds)).sum()
    # The slope between the two largest numbers and between the two smallest. A linear cost has the ratio 1.
    slopes = np.diff(seconds) / np.diff(counts)
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r_squared": float(explained),
        "slope_ratio": float(slopes[-1] / slopes[0]),
    }


def measure_latency(num_clients: int, delay: float, num_rounds: int) -> dict[str, Any]:
    """
    Measure how many round trips a delay of the link adds to a round.

    Args:
        num_clients (`int`): Number of clients.
        delay (`float`): Seconds in each direction.
        num_rounds (`int`): Number of rounds.
    """
    seconds = {
        name: statistics.median(
            round_seconds(num_clients, num_rounds + NUM_WARM_UP, functools.partial(start_delayed_threads, each))[0]
        )
        for name, each in (("without_delay", 0.0), ("with_delay", delay))
    }
    return {**seconds, "round_trips": (seconds["with_delay"] - seconds["without_delay"]) / (2 * delay)}
