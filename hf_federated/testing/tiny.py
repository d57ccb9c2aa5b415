"""The smallest objects that `Trainer` can train: a model, a dataset with a learnable rule, training arguments."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments


VOCAB_SIZE = 32
ROW_LENGTH = 6


def tiny_model(seed: int = 0, num_labels: int = 2, **config: Any) -> BertForSequenceClassification:
    """
    Build a BERT classifier with two layers, a hidden size of 16 and dropout from a config.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the weights. The global generator does not change.
        num_labels (`int`, *optional*, defaults to `2`): Number of classes.
        config (`Any`): Further arguments of `BertConfig`. They override the defaults here.

    Example:

    ```python
    >>> from hf_federated.testing import tiny_model

    >>> tiny_model(num_hidden_layers=1).num_parameters()
    2834
    ```
    """
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
        "num_labels": num_labels,
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification(BertConfig(**values))


def tiny_dataset(num_rows: int, seed: int = 0) -> Dataset:
    """
    Build examples of six random tokens, labeled by whether the first token lies in the upper half of the vocabulary.

    Args:
        num_rows (`int`): Number of examples.
        seed (`int`, *optional*, defaults to `0`): Seed of the tokens.

    Example:

    ```python
    >>> from hf_federated.testing import tiny_dataset

    >>> tiny_dataset(4).column_names
    ['input_ids', 'labels']
    ```
    """
    tokens = np.random.default_rng(seed).integers(1, VOCAB_SIZE, size=(num_rows, ROW_LENGTH))
    return Dataset.from_dict(
        {"input_ids": tokens.tolist(), "labels": (tokens[:, 0] >= VOCAB_SIZE // 2).astype(int).tolist()}
    )


def tiny_arguments(output_dir: str | os.PathLike[str], **kwargs: Any) -> TrainingArguments:
    """
    Build training arguments for the CPU, without progress bars, reports or checkpoints.

    Args:
        output_dir (`str` or `os.PathLike`): Output directory of the trainer.
        kwargs (`Any`): Further arguments of `TrainingArguments`. They override the defaults here.

    Example:

    ```python
    >>> from hf_federated.testing import tiny_arguments

    >>> tiny_arguments("run").per_device_train_batch_size
    4
    ```
    """
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_strategy": "epoch",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **kwargs,
    }
    return TrainingArguments(output_dir=os.fspath(output_dir), **values)
