"""Measure the cost of FedDRS's distillation on the server, compared with one local epoch of one client.

    python benchmarks/feddrs.py                                           # MiniLM-L3's size, 8 teachers
    python benchmarks/feddrs.py --num-clients 2 --num-steps 10            # shorter; the cost is linear in both

The time outside forward and backward passes is the rest of the distillation's time: reading the clients' models,
drawing and moving samples, optimizer steps. Everything runs in one process on the CPU. Times are CPU times of the
process, so other programs on the machine hardly change them.
"""

from __future__ import annotations

from typing import Any

import torch
from distillation_runs import Clock, build_trainer, random_rows, size_options, write_numbers

from hf_federated import FedDRS, FederatedConfig
from hf_federated.clients import ClientWorker, Student
from hf_federated.messages import Fit


VOCABULARY = 30522


def main() -> None:
    parser = size_options(__doc__, num_clients=8, batch_size=32, length=64)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sample-length", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=250, help="number of examples of the timed client")
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
    passes_at_start: list[float] = []
    distill = algorithm.distill

    def distill_with_timed_backward(*args: Any) -> Any:
        torch.Tensor.backward = passes.around(backward)
        passes_at_start.append(passes.seconds)
        try:
            return distill(*args)
        finally:
            torch.Tensor.backward = backward

    algorithm.distill = distill_with_timed_backward
    trainer.train()
    inside = passes.seconds - passes_at_start[0]
    outside = 1 - inside / distillation.seconds
    ratio = distillation.seconds / epoch.seconds
    print(f"distillation of {options.num_clients} teachers / a local epoch of {options.rows} examples: {ratio:.1f}")
    print(f"time outside forward and backward passes: {100 * outside:.1f} %")
    write_numbers(options, ratio=ratio, outside=outside, distillation=distillation.seconds, epoch=epoch.seconds)


if __name__ == "__main__":
    main()
