"""Measure the examples per second of networked clients that share a step, relative to clients in turn.

    python benchmarks/split_parallel.py --output split_parallel.json

The server and every client are processes on the loopback interface, without TLS. The blocks compute on simulated
devices: a block sleeps in its forward and backward pass, for a time that does not depend on the number of examples, as
on a GPU that a small batch does not fill. The times have the proportions of FL-GLM: a step of one example takes 175 ms
(table 3: 175.2 s for 1000 examples in turn), and 26 of the 28 blocks are on the server. A backward pass takes twice as
long as a forward pass. The tiny model, the messages and the optimizers are real and take the remaining time.
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
from split_latency import NUM_WARM_UP, StepTimes, session_config, split_model, training_arguments
from torch import nn

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.security.certificates import create_certificates
from hf_federated.security.keys import Identity
from hf_federated.security.peer_envelopes import PeerEnvelopes
from hf_federated.split.boundary import Boundary
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerModel
from hf_federated.transport import GrpcLink, GrpcServer


SECONDS_OF_A_STEP = 0.175
NUM_BLOCKS = 28


class _Device(torch.autograd.Function):
    """Sleeps in the forward and the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def simulate_device(part: nn.Module, num_blocks: int, seconds_of_a_step: float = SECONDS_OF_A_STEP) -> None:
    """Let the last block of a part take the time of `num_blocks` blocks of a model whose step takes some seconds."""
    seconds = seconds_of_a_step / NUM_BLOCKS / 3 * num_blocks

    def sleep(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_Device.apply(output[0], seconds), *output[1:])
        return _Device.apply(output, seconds)

    blocks = [module for name, module in part.named_modules() if name.rpartition(".")[0].endswith("layers")]
    blocks[-1].register_forward_hook(sleep)


def run_server(split: SplitConfig, clients: list[str], num_steps: int, addresses: Any) -> None:
    """Serve one run, and put the address into a queue."""
    torch.set_num_threads(1)
    model = split_model()
    body = copy_model(model.server_body)
    simulate_device(body, NUM_BLOCKS - 2)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, num_steps, 1)
        server_model = ServerModel(body, model.config, model.boundary.wire, split, args, clients)
        training = TrainingServer(server_model, run_digest(model.config, split, args, None))
        with GrpcServer(training.answer, None, clients, session_config(model), insecure=True) as server:
            addresses.put(server.address)
            failure = training.wait()
            assert failure is None, failure
            time.sleep(2)


def run_client(
    address: str, split: SplitConfig, name: str, key: bytes, fingerprints: dict[str, str], num_steps: int, times: Any
) -> None:
    """Train as one client, and put the median duration of a step into a queue."""
    torch.set_num_threads(1)
    model = split_model()
    parts = copy_model(torch.nn.ModuleList([model.client_head, model.client_tail]))
    for part in parts:
        simulate_device(part, 1)
    recorded = StepTimes()
    with (
        GrpcLink(address, None, name, session_config(model), insecure=True) as link,
        tempfile.TemporaryDirectory() as folder,
    ):
        client = SplitModel(model.config, *parts, Boundary(link, model.boundary.wire, name))
        rows = [[3, 4, 5, 6]] * num_steps
        trainer = SplitFederatedTrainer(
            client,
            training_arguments(folder, num_steps, 1),
            train_dataset={name: Dataset.from_dict({"input_ids": rows, "labels": rows})},
            split=split,
            envelopes=PeerEnvelopes(Identity.from_pem(name, key), fingerprints, 2048),
            callbacks=[recorded],
        )
        trainer.train()
        trainer.leave()
    durations = [after - before for before, after in zip(recorded.ends, recorded.ends[1:], strict=False)]
    times.put(statistics.median(durations[NUM_WARM_UP:-1]))


def seconds_of_a_step(strategy: str, num_clients: int, num_steps: int) -> float:
    """
    Run a server and clients, and return the median duration of a step.

    Args:
        strategy (`str`): Strategy of the run.
        num_clients (`int`): Number of clients.
        num_steps (`int`): Number of steps.
    """
    split = SplitConfig(strategy=strategy)
    clients = [f"client-{number}" for number in range(num_clients)]
    with tempfile.TemporaryDirectory() as folder:
        create_certificates(folder, ["localhost"], clients)
        keys = {name: next(Path(folder).rglob(f"{name}.key")).read_bytes() for name in clients}
    fingerprints = {name: Identity.from_pem(name, key).fingerprint for name, key in keys.items()}
    context = multiprocessing.get_context("spawn")
    addresses, times = context.Queue(), context.Queue()
    server = context.Process(target=run_server, args=(split, clients, num_steps, addresses))
    server.start()
    address = addresses.get(timeout=120)
    processes = []
    for name, key in keys.items():
        arguments = (address, split, name, key, fingerprints, num_steps, times)
        processes.append(context.Process(target=run_client, args=arguments))
        processes[-1].start()
    durations = [times.get(timeout=600) for _ in clients]
    for process in (*processes, server):
        process.join(60)
    return statistics.median(durations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client-batch", type=int, nargs="*", default=[2, 4, 8], help="numbers of clients")
    parser.add_argument("--hierarchical", type=int, nargs="*", default=[2, 4], help="numbers of clients")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run, at least 5")
    parser.add_argument("--output", help="JSON file to write the results to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    serial = seconds_of_a_step("serial", 1, options.steps)
    results = [{"strategy": "serial", "clients": 1, "seconds": serial, "speedup": 1.0}]
    print(json.dumps(results[-1]), flush=True)
    runs = [("client_batch", number) for number in options.client_batch]
    runs += [("server_hierarchical", number) for number in options.hierarchical]
    for strategy, num_clients in runs:
        seconds = seconds_of_a_step(strategy, num_clients, options.steps)
        results.append(
            {
                "strategy": strategy,
                "clients": num_clients,
                "seconds": seconds,
                "speedup": num_clients * serial / seconds,
            }
        )
        print(json.dumps(results[-1]), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
