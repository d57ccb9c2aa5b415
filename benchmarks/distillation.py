"""Measure FedID's interactive exchange against a bare loop with the same forward and backward passes.

    python benchmarks/distillation.py                     # MiniLM-L3's size, 4 clients
    python benchmarks/distillation.py --hidden-size 32 --num-clients 8 --repetitions 5

The bare loop holds all models and has no messages, no trainer and no ledger. For every mini-batch it runs a forward
pass of each client, the server's two gradients for the feedback and its forward derivative, the server's step, and a
backward pass and a step of each client. The library and the bare loop take turns in one process. The ratio is that of
the medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from distillation_runs import build_trainer, random_rows, size_options, write_numbers
from torch.nn import functional as F

from hf_federated import FederatedConfig
from hf_federated.distillation import (
    chain_rule_feedback,
    chain_rule_surrogate,
    evaluation_mode,
    loss_gradients,
    soft_cross_entropy,
    virtual_step,
)


VOCABULARY = 1000


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bare_round(
    models: list[Any], optimizers: list[Any], options: argparse.Namespace, public: Any, labeled: Any
) -> None:
    """
    Run one pass over the public examples without the library.

    Args:
        models (`list[torch.nn.Module]`): The server's model, then the clients' models.
        optimizers (`list[torch.optim.Optimizer]`): Optimizers of the models, in the same order.
        options (`argparse.Namespace`): Options of the command line.
        public (`datasets.Dataset`): Public examples.
        labeled (`datasets.Dataset`): Labeled examples of the server.
    """
    server, *clients = models
    tokens = torch.tensor(public["input_ids"])
    labeled_tokens, labels = torch.tensor(labeled["input_ids"]), torch.tensor(labeled["labels"])
    weight, size = 1 / len(clients), 0.01
    for number, batch in enumerate(tokens.split(options.batch_size)):
        inputs = {"input_ids": batch}
        predictions = [client(**inputs).logits for client in clients]
        ensemble = torch.stack([logits.detach().softmax(-1) for logits in predictions]).mean(0)
        parameters = dict(server.named_parameters())
        drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number))[: options.batch_size]
        with evaluation_mode(server):
            gradients = loss_gradients(soft_cross_entropy(server(**inputs).logits, ensemble), parameters)
            with virtual_step(parameters, gradients, size):
                loss = F.cross_entropy(server(input_ids=labeled_tokens[drawn]).logits, labels[drawn])
                validation = loss_gradients(loss, parameters)
        feedback = chain_rule_feedback(server, inputs, validation, size)
        server.train()
        soft_cross_entropy(server(**inputs).logits, ensemble).backward()
        for logits in predictions:
            surrogate = chain_rule_surrogate(logits.softmax(-1), feedback, weight)
            (soft_cross_entropy(logits, ensemble) + surrogate).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()


def main() -> None:
    parser = size_options(__doc__, num_clients=4, batch_size=16, length=32)
    parser.add_argument("--num-batches", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()

    def rows(num_rows: int, seed: int) -> Dataset:
        return random_rows(num_rows, options.length, VOCABULARY, seed)

    public, labeled = rows(options.num_batches * options.batch_size, 0), rows(2 * options.batch_size, 1)
    trainer = build_trainer(
        options,
        VOCABULARY,
        {str(number): rows(2, 2 + number) for number in range(options.num_clients)},
        FederatedConfig(num_rounds=1 + options.repetitions, distillation="fedid", local_steps=1),
        {"learning_rate": 1e-4, "lr_scheduler_type": "constant"},
        public_dataset=public.remove_columns("labels"),
        server_dataset=labeled,
    )
    bare = [copy.deepcopy(trainer.model) for _ in range(1 + options.num_clients)]
    # The same optimizer as in the Trainer. It lasts for the whole run, as in the library.
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for model in bare]
    seconds: dict[str, list[float]] = {"library": [], "bare loop": []}
    algorithm = trainer.distillation
    distill = algorithm.distill

    def measured(*args: Any) -> Any:
        result: list[Any] = []
        seconds["library"].append(timed(lambda: result.append(distill(*args))))
        seconds["bare loop"].append(timed(lambda: bare_round(bare, optimizers, options, public, labeled)))
        return result[0]

    algorithm.distill = measured
    trainer.train()
    # The first round creates the optimizer states and fills caches, so it is left out.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    ratio = medians["library"] / medians["bare loop"]
    print(f"library / bare loop: {ratio:.3f}  ({medians['library']:.3f} s / {medians['bare loop']:.3f} s a round)")
    write_numbers(options, ratio=ratio, seconds=seconds)


if __name__ == "__main__":
    main()
