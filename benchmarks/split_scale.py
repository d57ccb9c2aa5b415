"""Measure the seconds of a step and the memory of a server of split models, by strategy and number of clients.

    python benchmarks/split_scale.py --output split_scale.json

The server is a process. The clients are threads of two further processes, with a connection and a trainer each, so
that 64 clients fit on a small machine. All processes are forked from one process, which uses neither gRPC nor threads.
The connections use the loopback interface without TLS. Each client has 4 examples of 32 tokens in a step. The body has
4 blocks with a hidden size of 128 (0.8 million parameters), which are trained with Adam.

The memory is the peak resident memory of the server, minus its resident memory before the first step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from measure import status_mb
from split_latency import NUM_WARM_UP, StepTimes, training_arguments
from transformers import LlamaConfig, LlamaForCausalLM

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.security.certificates import create_certificates
from hf_federated.security.keys import Identity
from hf_federated.security.peer_envelopes import PeerEnvelopes
from hf_federated.split import ModelFingerprint, SplitSessionConfig
from hf_federated.split.boundary import Boundary
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerModel
from hf_federated.transport import GrpcLink, GrpcServer


HIDDEN_SIZE, NUM_BLOCKS, VOCABULARY = 128, 6, 256
NUM_EXAMPLES, LENGTH = 4, 32
NUM_PROCESSES = 2
TIMEOUT = 1200
FORK = multiprocessing.get_context("fork")


def split_model() -> SplitModel:
    """A small model, equal in all processes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=3 * HIDDEN_SIZE,
            num_hidden_layers=NUM_BLOCKS,
            num_attention_heads=4,
        )
        return SplitModel.from_model(LlamaForCausalLM(config))


def session_config(model: SplitModel) -> SplitSessionConfig:
    """Settings that the server and the clients share."""
    fingerprint = ModelFingerprint({"hidden_size": HIDDEN_SIZE}, weight_map="", samples={}, commit="")
    return SplitSessionConfig(fingerprint, model.cut, model.boundary.wire)


def run_server(split: SplitConfig, names: list[str], num_steps: int, queue: Any) -> None:
    """Serve one run. Put the address into a queue, and then the memory of the run in megabytes."""
    torch.set_num_threads(1)
    model = split_model()
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, num_steps, 1, NUM_EXAMPLES)
        body = ServerModel(copy_model(model.server_body), model.config, model.boundary.wire, split, args, names)
        training = TrainingServer(body, run_digest(model.config, split, args, None))
        with GrpcServer(training.answer, None, names, session_config(model), insecure=True) as server:
            before = status_mb("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            queue.put(server.address)
            failure = training.wait()
            assert failure is None, failure
            queue.put(status_mb("VmHWM") - before)
            time.sleep(2)


def run_clients(
    address: str,
    split: SplitConfig,
    keys: dict[str, bytes],
    own: list[str],
    fingerprints: dict[str, str],
    num_steps: int,
    queue: Any,
) -> None:
    """Train as several clients. Put an error or `None`, and the end times of each client's steps, into a queue."""
    torch.set_num_threads(1)
    recorded = {name: StepTimes() for name in own}
    model = split_model()
    parts = {name: copy_model(torch.nn.ModuleList([model.client_head, model.client_tail])) for name in own}
    ids = torch.randint(VOCABULARY, (NUM_EXAMPLES * num_steps, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    errors: list[BaseException] = []
    # Trainers share a state of `accelerate`, which several threads cannot create.
    creates = threading.Lock()

    def train(name: str) -> None:
        try:
            with (
                GrpcLink(address, None, name, session_config(model), insecure=True) as link,
                tempfile.TemporaryDirectory() as folder,
            ):
                with creates:
                    trainer = SplitFederatedTrainer(
                        SplitModel(model.config, *parts[name], Boundary(link, model.boundary.wire, name)),
                        training_arguments(folder, num_steps, 1, NUM_EXAMPLES),
                        train_dataset={name: rows},
                        split=split,
                        envelopes=PeerEnvelopes(Identity.from_pem(name, keys[name]), fingerprints, 2048),
                        callbacks=[recorded[name]],
                    )
                trainer.train()
                trainer.leave()
        except BaseException as error:
            errors.append(error)
            queue.put((repr(error), []))

    threads = [threading.Thread(target=train, args=(name,)) for name in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors:
        queue.put((None, [times.ends for times in recorded.values()]))


def measure(strategy: str, num_clients: int, num_steps: int) -> dict[str, Any]:
    """
    Run a server and clients.

    Args:
        strategy (`str`): Strategy of the run.
        num_clients (`int`): Number of clients.
        num_steps (`int`): Number of optimizer steps in which a client takes part.

    Returns:
        `dict`: The median seconds of a step, and the memory of the server in megabytes.
    """
    per_turn = {"average_every": num_clients, "steps_per_turn": 1} if strategy == "serial" else {"average_every": 1}
    split = SplitConfig(strategy=strategy, **per_turn)
    # The steps of a serial run are the steps of all clients.
    total = num_steps * num_clients if strategy == "serial" else num_steps
    names = [f"client-{number:03}" for number in range(num_clients)]
    with tempfile.TemporaryDirectory() as folder:
        create_certificates(folder, ["localhost"], names)
        keys = {name: next(Path(folder).rglob(f"{name}.key")).read_bytes() for name in names}
    fingerprints = {name: Identity.from_pem(name, key).fingerprint for name, key in keys.items()}
    server_queue, queue = FORK.Queue(), FORK.Queue()
    server = FORK.Process(target=run_server, daemon=True, args=(split, names, total, server_queue))
    server.start()
    address = server_queue.get(timeout=TIMEOUT)
    groups = [names[start::NUM_PROCESSES] for start in range(min(NUM_PROCESSES, num_clients))]
    processes = []
    for own in groups:
        arguments = (address, split, keys, own, fingerprints, total, queue)
        processes.append(FORK.Process(target=run_clients, daemon=True, args=arguments))
        processes[-1].start()
    steps = []
    for _ in groups:
        error, ends_of_clients = queue.get(timeout=TIMEOUT)
        if error is not None:
            raise RuntimeError(f"A client failed: {error}")
        for ends in ends_of_clients:
            steps += [
                after - before for before, after in zip(ends[NUM_WARM_UP:], ends[NUM_WARM_UP + 1 :], strict=False)
            ]
    memory = server_queue.get(timeout=TIMEOUT)
    for process in (*processes, server):
        process.join(60)
    return {"strategy": strategy, "clients": num_clients, "seconds": statistics.median(steps), "memory_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["serial", "client_batch", "server_hierarchical"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=8, help="steps of a run, at least 4")
    parser.add_argument("--output", help="JSON file to write the results to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for strategy in options.strategies:
        for num_clients in options.clients:
            results.append(measure(strategy, num_clients, options.steps))
            print(json.dumps(results[-1]), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
