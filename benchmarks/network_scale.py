"""Rounds of `NetworkEngine` with many clients, and over a link with latency. `network.py` runs these measurements.

- `measure_scale`: seconds of a round of FedAvg with a tiny model. The clients are threads of two processes and return
  the received parameters, or each client is a process with a trainer. The processes are forked from one process, which
  has imported the libraries.
- `measure_latency`: seconds that a delay of the link adds to a round, in round trips. The clients are threads that
  return the received parameters at once.

Each server is a separate process. The connections use no TLS.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
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
SPAWN = multiprocessing.get_context("spawn")


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

    def on_round_end(self, args: Any, state: Any, control: Any, server: Any = None, **kwargs: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))
        self.num_failures += len(server.rejected)


def training_arguments(folder: str) -> TrainingArguments:
    return TrainingArguments(folder, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)


def config(num_rounds: int) -> FederatedConfig:
    return FederatedConfig(num_rounds=num_rounds, local_steps=1)


def run_server(names: list[str], num_rounds: int, start_clients: Callable[..., None], answers: Any) -> None:
    """Run a federation, and report the seconds and the CPU seconds of its rounds."""
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

        def start_all(client_ids: Any, settings: Any) -> None:
            start(client_ids, settings)
            start_clients(engine.transport.address, settings.to_dict(), names)

        engine.transport.start = start_all  # type: ignore[method-assign]
        trainer.train()
    assert times.num_failures == 0, f"{times.num_failures} replies failed"
    answers.put(np.diff(np.array(times.ends), axis=0)[NUM_WARM_UP - 1 :].T.tolist())


def start_threads(address: str, settings: dict[str, str], names: list[str]) -> None:
    """Start clients as threads of two processes."""
    for number in range(NUM_PROCESSES):
        SPAWN.Process(target=returning_clients, args=(address, settings, names[number::NUM_PROCESSES])).start()


def start_delayed_threads(delay: float, address: str, settings: dict[str, str], names: list[str]) -> None:
    """Start clients as threads of a process that reaches the server over a link with latency."""
    SPAWN.Process(target=delayed_clients, args=(delay, address, settings, names)).start()


def delayed_clients(delay: float, address: str, settings: dict[str, str], names: list[str]) -> None:
    """Run clients that reach the server over a link with latency."""
    with TcpProxy(address, delay=delay) as proxy:
        returning_clients(proxy.address, settings, names)


def start_processes(num_rounds: int, address: str, settings: dict[str, str], names: list[str]) -> None:
    """Start each client as a process with a trainer."""
    SPAWN.Process(target=fork_clients, args=(num_rounds, address, names)).start()


def fork_clients(num_rounds: int, address: str, names: list[str]) -> None:
    """Fork a process for each client, and wait until all of them have ended."""
    torch.set_num_threads(1)
    children = []
    for number, name in enumerate(names):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train_client(num_rounds, address, name, number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def train_client(num_rounds: int, address: str, name: str, number: int) -> None:
    """Take part in a federation with a trainer."""
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


def round_seconds(num_clients: int, num_rounds: int, start_clients: Callable[..., None]) -> list[list[float]]:
    """Run a federation in its own process, and return the seconds and the CPU seconds of each round of the server."""
    answers = SPAWN.Queue()
    names = [f"client {number}" for number in range(num_clients)]
    server = SPAWN.Process(target=run_server, args=(names, num_rounds, start_clients, answers))
    server.start()
    measured: list[list[float]] = answers.get(timeout=900)
    server.join()
    return measured


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
    for kind, counts, start in (
        ("threads", thread_counts, start_threads),
        ("processes", process_counts, functools.partial(start_processes, num_rounds)),
    ):
        measured = []
        for num_clients in counts:
            seconds, cpu_seconds = round_seconds(num_clients, num_rounds, start)
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
