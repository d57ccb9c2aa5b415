"""What the interactive exchange of FedID costs over a bare loop that does the same forward and backward passes.

    python benchmarks/distillation.py                     # MiniLM-L3's size, 4 clients
    python benchmarks/distillation.py --hidden-size 32 --num-clients 8 --repetitions 5

The bare loop holds all models, has no messages, no trainer and no ledger, and for every mini-batch: a forward pass of
each client, the server's two gradients for the feedback and its forward derivative, the server's step, and a backward
pass and a step of each client. Both sides run in this process in turn; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.distillation import (
    chain_rule_feedback,
    chain_rule_surrogate,
    evaluation_mode,
    loss_gradients,
    soft_cross_entropy,
    virtual_step,
)


VOCABULARY = 1000


def rows(num_rows: int, length: int, seed: int) -> Dataset:
    """Random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (num_rows, length), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] % 2).tolist()})


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bare_round(server: Any, clients: list[Any], options: argparse.Namespace, public: Any, labelled: Any) -> None:
    """One pass over the public rows, without the library's rounds."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (server, *clients)]
    tokens = torch.tensor(public["input_ids"])
    labelled_tokens, labels = torch.tensor(labelled["input_ids"]), torch.tensor(labelled["labels"])
    weight, size = 1 / len(clients), 0.01
    for number, batch in enumerate(tokens.split(options.batch_size)):
        inputs = {"input_ids": batch}
        predictions = [client(**inputs).logits for client in clients]
        ensemble = torch.stack([logits.detach().softmax(-1) for logits in predictions]).mean(0)
        parameters = dict(server.named_parameters())
        some = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number))[: options.batch_size]
        with evaluation_mode(server):
            gradients = loss_gradients(soft_cross_entropy(server(**inputs).logits, ensemble), parameters)
            with virtual_step(parameters, gradients, size):
                loss = F.cross_entropy(server(input_ids=labelled_tokens[some]).logits, labels[some])
                validation = loss_gradients(loss, parameters)
        feedback = chain_rule_feedback(server, inputs, validation, size)
        server.train()
        soft_cross_entropy(server(**inputs).logits, ensemble).backward()
        for logits in predictions:
            surrogate = chain_rule_surrogate(logits.softmax(-1), feedback, weight)
            (soft_cross_entropy(logits, ensemble) + surrogate).backward()
        for model, optimizer in zip((server, *clients), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-clients", type=int, default=4)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--num-batches", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
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
    public = rows(options.num_batches * options.batch_size, options.length, 0)
    labelled = rows(2 * options.batch_size, options.length, 1)
    model = BertForSequenceClassification(config)
    bare = [copy.deepcopy(model) for _ in range(1 + options.num_clients)]
    trainer = FederatedTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.batch_size,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset={str(number): rows(2, options.length, 2 + number) for number in range(options.num_clients)},
        public_dataset=public.remove_columns("labels"),
        server_dataset=labelled,
        federation=FederatedConfig(num_rounds=1 + options.repetitions, distillation="fedid", local_steps=1),
    )
    seconds: dict[str, list[float]] = {"library": [], "bare loop": []}
    algorithm = trainer.distillation
    distill = algorithm.distill

    def measured(*args: Any) -> Any:
        result: list[Any] = []
        seconds["library"].append(timed(lambda: result.append(distill(*args))))
        server, *clients = bare
        seconds["bare loop"].append(timed(lambda: bare_round(server, clients, options, public, labelled)))
        return result[0]

    algorithm.distill = measured
    trainer.train()
    # The first round of both builds optimizers' states and warms caches.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    ratio = medians["library"] / medians["bare loop"]
    print(f"library / bare loop: {ratio:.3f}  ({medians['library']:.3f} s / {medians['bare loop']:.3f} s a round)")
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({"ratio": ratio, "seconds": seconds, "options": vars(options)}, file, indent=2)


if __name__ == "__main__":
    main()
