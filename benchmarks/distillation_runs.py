"""Shared code of the distillation benchmarks: options, random examples and a federation of small BERT models."""

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

from hf_federated import FederatedConfig, FederatedTrainer


class Clock:
    """Sum the CPU seconds inside wrapped functions."""

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


def size_options(description: str | None, num_clients: int, batch_size: int, length: int) -> argparse.ArgumentParser:
    """
    Create the parser with the options of every distillation benchmark. The default model has MiniLM-L3's size.

    Args:
        description (`str`, *optional*): Docstring of the benchmark.
        num_clients, batch_size, length (`int`): Default values of the options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-clients", type=int, default=num_clients)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--length", type=int, default=length, help="number of tokens of an example")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="JSON file to write the numbers to")
    return parser


def random_rows(num_rows: int, length: int, vocabulary: int, seed: int) -> Dataset:
    """Create examples of random tokens, with a label that follows from the first token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocabulary, (num_rows, length), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] % 2).tolist()})


def build_trainer(
    options: argparse.Namespace,
    vocabulary: int,
    train_dataset: dict[str, Dataset],
    federation: FederatedConfig,
    arguments: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    """
    Create an untrained trainer with random weights on the CPU that writes no files.

    Args:
        options (`argparse.Namespace`): Options of a parser from [`size_options`]. The function sets PyTorch's number
            of threads from it.
        vocabulary (`int`): Vocabulary size of the model.
        train_dataset (`dict[str, Dataset]`): Examples by client.
        federation ([`FederatedConfig`]): Configuration to benchmark.
        arguments (`dict[str, Any]`, *optional*): Additional training arguments.
        kwargs (`Any`): Additional arguments of the trainer.
    """
    torch.set_num_threads(options.threads)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=max(1, options.hidden_size // 32),
        intermediate_size=4 * options.hidden_size,
    )
    return FederatedTrainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.batch_size,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **(arguments or {}),
        ),
        train_dataset=train_dataset,
        federation=federation,
        **kwargs,
    )


def write_numbers(options: argparse.Namespace, **numbers: Any) -> None:
    """Write the numbers and the options to the file of `--output`, if it is set."""
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({**numbers, "options": vars(options)}, file, indent=2)
