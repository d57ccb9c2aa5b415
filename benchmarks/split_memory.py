"""Measure the memory of the server of a split model under a hostile client, relative to an honest client.

    python benchmarks/split_memory.py --output split_memory.json

Each client is a list of messages to a training server in a new process. The honest client sends full micro-batches of
the agreed size. Hostile clients send rows of packed sequences, micro-batches without a gradient, large evaluations,
and generations that never end. A client that is refused continues with its next messages. The memory is the growth of
the peak resident set over that before the first message. `--unlimited` disables the limits of the server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.utils import logging

from hf_federated import SplitConfig, SplitModel
from hf_federated.split.messages import Backward, Forward
from hf_federated.split_training import pending_messages
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.messages import BeginStep, EndStep, Join, as_tensor
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerModel


CLIENT = "north"
HIDDEN, LENGTH, BATCH, NUM_BATCHES, NUM_STEPS = 256, 256, 4, 2, 3
# Hostile clients are honest before this step.
LAST_STEP = NUM_STEPS - 1


def states(batch_size: int, length: int, value: float = 0.1) -> dict[str, torch.Tensor]:
    """Hidden states or gradients of a micro-batch."""
    return {"values": torch.full((batch_size * length, HIDDEN), value)}


def backward(step: int, number: int, batch_size: int, length: int) -> Backward:
    """A small gradient of a micro-batch."""
    return Backward(CLIENT, step, number, states(batch_size, length, 1e-5))


def forward(step: int, number: int, batch_size: int, length: int, packed: bool = False, **fields: Any) -> Forward:
    """A micro-batch. The positions of packed sequences restart."""
    positions = (torch.arange(length) % LENGTH).int()[None] if packed else None
    fields = {"training": True, "grad": True, **fields}
    return Forward(CLIENT, step, number, states(batch_size, length), batch_size, position_ids=positions, **fields)


def honest(num_steps: int = NUM_STEPS, packed: bool = False) -> Iterator[Any]:
    """Full micro-batches and their gradients. Packed sequences are one row."""
    batch_size, length = (1, BATCH * LENGTH) if packed else (BATCH, LENGTH)
    for step in range(num_steps):
        yield BeginStep(CLIENT, step, NUM_BATCHES, NUM_BATCHES)
        for number in range(NUM_BATCHES):
            yield forward(step, number, batch_size, length, packed)
        for number in range(NUM_BATCHES):
            yield backward(step, number, batch_size, length)
        yield EndStep(CLIENT, step, 0.0)


def packed_rows() -> Iterator[Any]:
    """Rows of the agreed size, and then of 8 times the agreed size."""
    yield from honest(LAST_STEP, packed=True)
    yield BeginStep(CLIENT, LAST_STEP, NUM_BATCHES, 1)
    yield forward(LAST_STEP, 0, 1, 8 * BATCH * LENGTH, packed=True)
    yield backward(LAST_STEP, 0, 1, 8 * BATCH * LENGTH)


def micro_batches_without_gradients() -> Iterator[Any]:
    """As many micro-batches as the server accepts."""
    yield from honest(LAST_STEP)
    for announced in (64, NUM_BATCHES):
        yield BeginStep(CLIENT, LAST_STEP, announced, 1)
    for number in range(64):
        yield forward(LAST_STEP, number, BATCH, LENGTH)


def full_step_without_gradients() -> Iterator[Any]:
    """Full micro-batches of the last step."""
    yield from honest(LAST_STEP)
    yield BeginStep(CLIENT, LAST_STEP, NUM_BATCHES, 1)
    for number in range(NUM_BATCHES):
        yield forward(LAST_STEP, number, BATCH, LENGTH)


def large_evaluations() -> Iterator[Any]:
    """Evaluations during a step with full micro-batches."""
    yield from full_step_without_gradients()
    for batch_size in (64 * BATCH, 8 * BATCH):
        yield forward(0, 0, batch_size, LENGTH, training=False, grad=False)


def endless_generations() -> Iterator[Any]:
    """Caches that are never dropped, during a step with full micro-batches."""
    yield from full_step_without_gradients()
    for cache_id in range(16):
        yield forward(0, 0, 8 * BATCH, LENGTH, training=False, grad=False, cache_id=cache_id)


CLIENTS: dict[str, Callable[[], Iterator[Any]]] = {
    "honest": honest,
    "packed rows": packed_rows,
    "micro-batches without gradients": micro_batches_without_gradients,
    "large evaluations": large_evaluations,
    "endless generations": endless_generations,
}


def peak() -> int:
    """Peak resident set of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_server(folder: str) -> TrainingServer:
    """A training server that one client has joined."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = SplitModel.from_model(LlamaForCausalLM(config))
    split = SplitConfig(micro_batches_in_flight=NUM_BATCHES)
    args = TrainingArguments(
        folder,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=NUM_BATCHES,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    body = ServerModel(model.server_body, model.config, model.boundary.wire, split, args, [CLIENT])
    server = TrainingServer(body, run_digest(model.config, split, args, None))
    server.answer(CLIENT, Join(CLIENT, server.digest, NUM_STEPS, [], as_tensor(b"")).to_bytes())
    return server


def measure(name: str, unlimited: bool, results: Any) -> None:
    """Send the messages of a client to a new server. Put the growth of the memory and the refusals into a queue."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    refusals: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        server = build_server(folder)
        if unlimited:
            server.server_model.body_servers[CLIENT].limits = None
            pending_messages.StepProgress.__init__ = without_limits(pending_messages.StepProgress.__init__)
            server.steps._progress = pending_messages.StepProgress(server.split, NUM_BATCHES)
        before = peak()
        for message in CLIENTS[name]():
            try:
                server.answer(CLIENT, message.to_bytes())
            except ValueError as error:
                refusals.append(str(error))
    results.put((peak() - before, refusals))


def without_limits(init: Callable[..., None]) -> Callable[..., None]:
    """Let a step have any number of micro-batches, of which any number waits for a gradient."""

    def initialize(progress: Any, config: SplitConfig, max_batches: int) -> None:
        init(progress, config, 10**9)
        progress._window = 10**9

    return initialize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--unlimited", action="store_true", help="disable the limits of the server")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    report: dict[str, dict[str, Any]] = {}
    for name in CLIENTS:
        results: Any = context.Queue()
        process = context.Process(target=measure, args=(name, options.unlimited, results))
        process.start()
        num_bytes, refusals = results.get(timeout=600)
        process.join()
        honest_bytes = report["honest"]["bytes"] if report else num_bytes
        report[name] = {"bytes": num_bytes, "relative": num_bytes / honest_bytes, "refusals": refusals}
        first = f": {refusals[0]}" if refusals else ""
        print(
            f"{name}: {num_bytes / 1e6:.0f} MB, {num_bytes / honest_bytes:.2f} times that of an honest client, "
            f"{len(refusals)} refusals{first}"
        )
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
