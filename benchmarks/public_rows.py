"""Measure rounds of a distillation whose public rows are kept as tensors against rounds that read them one by one.

    python benchmarks/public_rows.py                                  # 3600 rows of 384 numbers, 10 clients
    python benchmarks/public_rows.py --method fedid --repetitions 5

The models are classifiers with one hidden layer, such as heads on the features of a frozen encoder. The rounds of one
run alternate between the two sides. The times are CPU times of the process, without local training. The ratio
divides the medians. The first pair of rounds is left out, because it reads the rows that are kept. The time outside
model passes leaves out forward passes, backward passes and optimizer steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from distillation_runs import Clock, write_numbers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments, default_data_collator
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.clients import Student
from hf_federated.clients.resident_rows import RESIDENT_ROWS


SIDES = ("kept", "one by one")
# Forward passes, backward passes and optimizer steps.
PASSES = (
    (Student, "forward"),
    (torch.autograd, "grad"),
    (torch.Tensor, "backward"),
    (torch.optim.Adam, "step"),
)


class HeadConfig(PretrainedConfig):
    model_type = "head"

    def __init__(self, width: int = 384, hidden_size: int = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width, self.hidden_size = width, hidden_size


class Head(PreTrainedModel):
    """A classifier with one hidden layer."""

    config_class = HeadConfig

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.hidden = nn.Linear(config.width, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.classifier(self.hidden(x).tanh())
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def rows(num_rows: int, width: int, seed: int) -> Dataset:
    values = np.random.default_rng(seed).standard_normal((num_rows, width))
    return Dataset.from_dict({"x": values.tolist(), "labels": (values[:, 0] > 0).astype(int).tolist()})


def read_one_by_one(dataset: Any, indices: Any, collator: Any) -> Any:
    return collator([dataset[int(index)] for index in indices])


def build_trainer(options: argparse.Namespace) -> FederatedTrainer:
    width, num_rounds = options.length, 2 * (1 + options.repetitions)
    return FederatedTrainer(
        model=Head(HeadConfig(width, options.hidden_size)),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=options.batch_size,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset={str(number): rows(options.batch_size, width, number) for number in range(options.num_clients)},
        public_dataset=rows(options.num_rows, width, 1000).remove_columns("labels"),
        server_dataset=rows(2 * options.batch_size, width, 1001) if options.method == "fedid" else None,
        data_collator=default_data_collator,
        federation=FederatedConfig(num_rounds=num_rounds, distillation=options.method, local_steps=1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dsfl")
    parser.add_argument("--num-clients", type=int, default=10)
    parser.add_argument("--num-rows", type=int, default=3600)
    parser.add_argument("--length", type=int, default=384, help="numbers of a row")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", help="JSON file to write the numbers to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = build_trainer(options)
    passes = Clock()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    outside: dict[str, list[float]] = {side: [] for side in SIDES}
    algorithm, kept = trainer.distillation, RESIDENT_ROWS.batch
    distill = algorithm.distill

    def measured(*args: Any) -> Any:
        side = SIDES[sum(map(len, seconds.values())) % 2]
        RESIDENT_ROWS.batch = kept if side == "kept" else read_one_by_one
        start, passes.seconds = time.process_time(), 0.0
        result = distill(*args)
        seconds[side].append(time.process_time() - start)
        outside[side].append(1 - passes.seconds / seconds[side][-1])
        return result

    algorithm.distill = measured
    with ExitStack() as patches:
        patches.enter_context(patch.object(RESIDENT_ROWS, "batch", kept))
        for owner, name in PASSES:
            patches.enter_context(patch.object(owner, name, passes.around(vars(owner)[name])))
        trainer.train()
    medians = {side: statistics.median(values[1:]) for side, values in seconds.items()}
    ratio = medians["one by one"] / medians["kept"]
    for side in SIDES:
        share = statistics.median(outside[side][1:])
        print(f"{side}: {medians[side]:.2f} s of CPU a round, {100 * share:.0f} % outside model passes")
    print(f"one by one / kept: {ratio:.2f}; kept rows: {RESIDENT_ROWS.num_bytes / 1e6:.1f} MB")
    write_numbers(options, ratio=ratio, seconds=seconds, outside=outside)


if __name__ == "__main__":
    main()
