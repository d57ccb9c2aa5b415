"""The smallest objects that `Trainer` can train: a model, a dataset with a learnable rule, training arguments.

```python
trainer = FederatedTrainer(
    model=tiny_model(), args=arguments(tmp_path), train_dataset={"a": rows(8), "b": rows(8, seed=1)}
)
```

`federations.py` builds such a trainer with one call.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hf_federated._compat import HAS_ACTIVATION_CHECKPOINTING


VOCAB_SIZE = 32
ROW_LENGTH = 6


def tiny_model(seed: int = 0, num_labels: int = 2, **config: Any) -> BertForSequenceClassification:
    """
    A BERT classifier with two layers, a hidden size of 16 and dropout, built from a config.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the weights. The global generator does not change.
        num_labels (`int`, *optional*, defaults to `2`): Number of classes.
        config (`Any`): Further arguments of `BertConfig`. They override the defaults here.
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


def rows(num_rows: int, seed: int = 0) -> Dataset:
    """
    Examples of six random tokens, labelled by whether the first token lies in the upper half of the vocabulary.

    Args:
        num_rows (`int`): Number of examples.
        seed (`int`, *optional*, defaults to `0`): Seed of the tokens.
    """
    tokens = np.random.default_rng(seed).integers(1, VOCAB_SIZE, size=(num_rows, ROW_LENGTH))
    return Dataset.from_dict(
        {"input_ids": tokens.tolist(), "labels": (tokens[:, 0] >= VOCAB_SIZE // 2).astype(int).tolist()}
    )


def arguments(output_dir: str | os.PathLike[str], **kwargs: Any) -> TrainingArguments:
    """
    Training arguments for the CPU, without progress bars, reports or checkpoints.

    Args:
        output_dir (`str` or `os.PathLike`): Output directory of the trainer.
        kwargs (`Any`): Further arguments of `TrainingArguments`. They override the defaults here.
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
    return TrainingArguments(output_dir=os.fspath(output_dir), **supported_names(values))


def supported_names(values: dict[str, Any]) -> dict[str, Any]:
    """Training arguments under the names of the installed transformers (`hf_federated/_compat.py`)."""
    if HAS_ACTIVATION_CHECKPOINTING:
        return values
    old = "gradient_checkpointing"
    return {name.replace("activation_checkpointing", old): value for name, value in values.items()}


def checkpoints_activations(model: Any) -> bool:
    """Whether activation checkpointing of a model is on."""
    return model.is_activation_checkpointing if HAS_ACTIVATION_CHECKPOINTING else model.is_gradient_checkpointing


def same_weights(model_a: nn.Module, model_b: nn.Module) -> bool:
    """Whether two models have the same names and bit-identical parameters and buffers."""
    a, b = model_a.state_dict(), model_b.state_dict()
    return list(a) == list(b) and all(_bits(a[name]) == _bits(b[name]) for name in a)


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    # A comparison of bytes distinguishes 0.0 from -0.0 and treats identical NaN values as equal; `==` does neither.
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, raw
