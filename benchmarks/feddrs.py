"""What FedDRS's distillation costs the server, beside one epoch of one client's local training.

    python benchmarks/feddrs.py                                           # MiniLM-L3's size, 8 teachers
    python benchmarks/feddrs.py --num-clients 2 --num-steps 10            # shorter; the cost is linear in both

The time outside forward and backward passes is what is left of the distillation's when those are taken away: reading
the clients' models, drawing, moving samples, optimizer steps. Everything runs in this process, on its CPU, and times
are those that the CPU spent on it, so that what else runs on the machine hardly counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from distillation_runs import build_trainer, random_rows, size_options, write_numbers

from hf_federated import FedDRS, FederatedConfig
from hf_federated.clients import ClientWorker, Student
from hf_federated.messages import Fit


VOCABULARY = 30522


class Clock:
    """Adds up the CPU's seconds inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


def main() -> None:
    parser = size_options(__doc__, num_clients=8, batch_size=32, length=64)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sample-length", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=250, help="of the client whose epoch is timed")
    options = parser.parse_args()
    sizes = [options.rows] + [2] * (options.num_clients - 1)
    algorithm = FedDRS(
        num_samples=options.num_samples,
        sample_length=options.sample_length,
        num_steps=options.num_steps,
        post_num_iterations=0,
    )
    trainer = build_trainer(
        options,
        VOCABULARY,
        {str(number): random_rows(size, options.length, VOCABULARY, number) for number, size in enumerate(sizes)},
        FederatedConfig(num_rounds=1, freeze="embeddings", distillation=algorithm),
    )
    epoch, distillation, passes = Clock(), Clock(), Clock()
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
    write_numbers(options, ratio=ratio, outside=outside, distillation=distillation.seconds, epoch=epoch.seconds)


if __name__ == "__main__":
    main()
