"""Measure how many round trips a step of a split model over a network waits for.

    python benchmarks/split_latency.py --output split_latency.json

A server with the body and one client run in two processes on the loopback interface. A proxy between them delays all
bytes. The additional seconds of a step with this delay, divided by the delay of a round trip, are the round trips that
the step waits for. A step has 8 accumulated micro-batches. The model is tiny, and the connections use no TLS.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tcp_proxy import TcpProxy
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.split import ModelFingerprint, SplitSessionConfig
from hf_federated.split.boundary import Boundary
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerModel
from hf_federated.transport import GrpcLink, GrpcServer


CLIENT = "north"
# Steps in which threads and connections start.
NUM_WARM_UP = 2


def split_model(hidden_size: int = 32) -> SplitModel:
    """A tiny model, equal in all processes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
        )
        return SplitModel.from_model(LlamaForCausalLM(config), client_id=CLIENT)


def training_arguments(folder: str, num_steps: int, num_micro_batches: int, batch_size: int = 1) -> TrainingArguments:
    """Arguments that the server and the client share."""
    return TrainingArguments(
        folder,
        max_steps=num_steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=num_micro_batches,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def session_config(model: SplitModel) -> SplitSessionConfig:
    """Settings that the server and the client share."""
    fingerprint = ModelFingerprint({"hidden_size": model.config.hidden_size}, weight_map="", samples={}, commit="")
    return SplitSessionConfig(fingerprint, model.cut, model.boundary.wire)


def run_server(split: SplitConfig, num_steps: int, num_micro_batches: int, addresses: Any) -> None:
    """Serve one run, and put the address into a queue."""
    torch.set_num_threads(1)
    model = split_model()
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, num_steps, num_micro_batches)
        body = ServerModel(copy_model(model.server_body), model.config, model.boundary.wire, split, args, [CLIENT])
        training = TrainingServer(body, run_digest(model.config, split, args, None))
        with GrpcServer(training.answer, None, [CLIENT], session_config(model), insecure=True) as server:
            addresses.put(server.address)
            failure = training.wait()
            assert failure is None, failure
            time.sleep(1)


class StepTimes(TrainerCallback):
    """Records the time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def seconds_of_a_step(delay: float, in_flight: int, num_steps: int, num_micro_batches: int) -> float:
    """
    Run a client, and return the median duration of a step.

    Args:
        delay (`float`): Seconds in each direction.
        in_flight (`int`): Micro-batches in flight.
        num_steps (`int`): Number of steps that count.
        num_micro_batches (`int`): Micro-batches of a step.
    """
    num_steps += NUM_WARM_UP
    split = SplitConfig(micro_batches_in_flight=in_flight)
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    process = context.Process(target=run_server, args=(split, num_steps, num_micro_batches, addresses))
    process.start()
    times = StepTimes()
    with TcpProxy(addresses.get(timeout=120), delay=delay) as proxy, tempfile.TemporaryDirectory() as folder:
        model = split_model()
        with GrpcLink(proxy.address, None, CLIENT, session_config(model), insecure=True) as link:
            parts = copy_model(torch.nn.ModuleList([model.client_head, model.client_tail]))
            client = SplitModel(model.config, *parts, Boundary(link, model.boundary.wire, CLIENT))
            rows = [[3, 4, 5, 6]] * (num_steps * num_micro_batches)
            trainer = SplitFederatedTrainer(
                client,
                training_arguments(str(Path(folder)), num_steps, num_micro_batches),
                train_dataset={CLIENT: Dataset.from_dict({"input_ids": rows, "labels": rows})},
                split=split,
                callbacks=[times],
            )
            trainer.train()
            trainer.leave()
    process.join(60)
    durations = [after - before for before, after in zip(times.ends, times.ends[1:], strict=False)]
    return statistics.median(durations[NUM_WARM_UP:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=50.0, help="delay in each direction")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[8, 4, 1])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", help="JSON file to write the results to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for in_flight in options.in_flight:
        seconds = [
            seconds_of_a_step(delay, in_flight, options.steps, options.micro_batches)
            for delay in (0.0, options.delay_ms / 1000)
        ]
        round_trips = (seconds[1] - seconds[0]) / (2 * options.delay_ms / 1000)
        results.append({"in_flight": in_flight, "seconds": seconds, "round_trips": round_trips})
        print(json.dumps(results[-1]), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
