"""Measure how much faster a step of a split model is if its messages travel while the parties compute.

    python benchmarks/split_overlap.py --output split_overlap.json

A server with the body and one client run in two processes on the loopback interface, without TLS. A proxy between them
delays all bytes and limits their rate. The blocks compute on simulated devices, as in `split_parallel.py`. A step has
8 accumulated micro-batches. In the first run, the hidden states of all micro-batches travel in one message, and so do
their gradients, as on links that allow only one message in flight. In the second run, each micro-batch is a message.
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
from split_latency import CLIENT, NUM_WARM_UP, StepTimes, session_config, split_model, training_arguments
from split_parallel import NUM_BLOCKS, simulate_device
from tcp_proxy import TcpProxy

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.split.boundary import Boundary
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerModel
from hf_federated.transport import GrpcLink, GrpcServer


HIDDEN_SIZE = 512
NUM_MICRO_BATCHES = 8


def run_server(num_steps: int, seconds_of_a_batch: float, addresses: Any) -> None:
    """Serve one run, and put the address into a queue."""
    torch.set_num_threads(1)
    model = split_model(HIDDEN_SIZE)
    body = copy_model(model.server_body)
    simulate_device(body, NUM_BLOCKS - 2, seconds_of_a_batch)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, num_steps, NUM_MICRO_BATCHES)
        split = SplitConfig()
        server_model = ServerModel(body, model.config, model.boundary.wire, split, args, [CLIENT])
        training = TrainingServer(server_model, run_digest(model.config, split, args, None))
        with GrpcServer(training.answer, None, [CLIENT], session_config(model), insecure=True) as server:
            addresses.put(server.address)
            failure = training.wait()
            assert failure is None, failure
            time.sleep(1)


def measure(options: argparse.Namespace, max_in_flight: int) -> dict[str, Any]:
    """
    Run a client.

    Args:
        options (`argparse.Namespace`): The options of the command.
        max_in_flight (`int`): Number of messages in flight.

    Returns:
        `dict[str, Any]`: The median seconds of a step, and the loss of the run.
    """
    num_steps = options.steps + NUM_WARM_UP
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    seconds_of_a_batch = options.batch_ms / 1000
    process = context.Process(target=run_server, args=(num_steps, seconds_of_a_batch, addresses))
    process.start()
    times = StepTimes()
    rate = options.mbit_per_second * 1e6 / 8
    with (
        TcpProxy(addresses.get(timeout=120), delay=options.delay_ms / 1000, bytes_per_second=rate) as proxy,
        tempfile.TemporaryDirectory() as folder,
    ):
        model = split_model(HIDDEN_SIZE)
        with GrpcLink(proxy.address, None, CLIENT, session_config(model), insecure=True) as link:
            link.max_in_flight = max_in_flight
            parts = copy_model(torch.nn.ModuleList([model.client_head, model.client_tail]))
            for part in parts:
                # The client's device is slower: its two blocks take as long as 8 blocks of the server.
                simulate_device(part, 4, seconds_of_a_batch)
            client = SplitModel(model.config, *parts, Boundary(link, model.boundary.wire, CLIENT))
            rows = [[3, 4, 5, 6] * (options.length // 4)] * (num_steps * NUM_MICRO_BATCHES)
            trainer = SplitFederatedTrainer(
                client,
                training_arguments(folder, num_steps, NUM_MICRO_BATCHES),
                train_dataset={CLIENT: Dataset.from_dict({"input_ids": rows, "labels": rows})},
                split=SplitConfig(),
                callbacks=[times],
            )
            loss = trainer.train().training_loss
            trainer.leave()
    process.join(60)
    durations = [after - before for before, after in zip(times.ends, times.ends[1:], strict=False)]
    return {"max_in_flight": max_in_flight, "seconds": statistics.median(durations[NUM_WARM_UP:-1]), "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit-per-second", type=float, default=100.0, help="rate in each direction")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="delay in each direction")
    parser.add_argument("--batch-ms", type=float, default=90.0, help="time of a micro-batch on the simulated device")
    parser.add_argument("--length", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", help="JSON file to write the results to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(options, max_in_flight) for max_in_flight in (1, GrpcLink.max_in_flight)]
    assert results[0]["loss"] == results[1]["loss"], results
    summary = {"results": results, "ratio": results[0]["seconds"] / results[1]["seconds"]}
    print(json.dumps(summary), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(summary, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
