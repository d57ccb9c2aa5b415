"""What FedDRS's distillation costs the server, beside one epoch of one client's local training.

    python benchmarks/feddrs.py                                           # MiniLM-L3's size, 8 teachers
    python benchmarks/feddrs.py --num-clients 2 --num-steps 10            # shorter; the cost is linear in both

The time outside forward and backward passes is what is left of the distillation's when those are taken away: reading
the clients' models, drawing, moving samples, optimizer steps. Everything runs in this process, on its CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hf_federated import FedDRS, FederatedConfig, FederatedTrainer
from hf_federated.clients import ClientWorker, Student
from hf_federated.messages import Fit


VOCABULARY = 30522


def rows(num_rows: int, length: int, seed: int) -> Dataset:
    """Random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, VOCABULARY, (num_rows, length), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] % 2).tolist()})


class Clock:
    """Adds up the seconds inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-clients", type=int, default=8)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sample-length", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rows", type=int, default=250, help="of the client whose epoch is timed")
    parser.add_argument("--length", type=int, default=64, help="tokens of its rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a JSON file for the numbers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=max(1, options.hidden_size // 32),
        intermediate_size=4 * options.hidden_size,
    )
    sizes = [options.rows] + [2] * (options.num_clients - 1)
    trainer = FederatedTrainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.batch_size,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset={str(number): rows(size, options.length, seed=number) for number, size in enumerate(sizes)},
        federation=FederatedConfig(
            num_rounds=1,
            freeze="embeddings",
            distillation=FedDRS(
                num_samples=options.num_samples,
                sample_length=options.sample_length,
                num_steps=options.num_steps,
                post_num_iterations=0,
            ),
        ),
    )
    epoch, distillation, passes = Clock(), Clock(), Clock()
    algorithm = trainer.distillation
    algorithm.distill = distillation.around(algorithm.distill)
    handle = ClientWorker.handle

    def timed_epoch(self: ClientWorker, message: Any) -> Any:
        is_timed = isinstance(message, Fit) and message.client_id == "0"
        return epoch.around(handle)(self, message) if is_timed else handle(self, message)

    ClientWorker.handle = timed_epoch
    forward, grad, backward = Student.forward, torch.autograd.grad, torch.Tensor.backward
    Student.forward = passes.around(forward)
    torch.autograd.grad = passes.around(grad)
    start_of_passes: list[float] = []
    distil = algorithm.distill

    def only_passes_of_the_server(*args: Any) -> Any:
        torch.Tensor.backward = passes.around(backward)
        start_of_passes.append(passes.seconds)
        try:
            return distil(*args)
        finally:
            torch.Tensor.backward = backward

    algorithm.distill = only_passes_of_the_server
    trainer.train()
    inside = passes.seconds - start_of_passes[0]
    outside = 1 - inside / distillation.seconds
    ratio = distillation.seconds / epoch.seconds
    print(f"distillation of {options.num_clients} teachers / an epoch of {options.rows} rows: {ratio:.1f}")
    print(f"outside forward and backward passes: {100 * outside:.1f} %")
    if options.output:
        numbers = {"ratio": ratio, "outside": outside, "distillation": distillation.seconds, "epoch": epoch.seconds}
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({**numbers, "options": vars(options)}, file, indent=2)


if __name__ == "__main__":
    main()
