"""The smallest things that `Trainer` can really train: a model, rows with a rule, arguments.

```python
trainer = FederatedTrainer(
    model=tiny_model(), args=arguments(tmp_path), train_dataset={"a": rows(8), "b": rows(8, seed=1)}
)
```
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments


VOCAB_SIZE = 32
ROW_LENGTH = 6


def tiny_model(seed: int = 0, num_labels: int = 2, **config: Any) -> BertForSequenceClassification:
    """
    A BERT classifier with two layers of 16 and dropout, built from a config.

    Args:
        seed (`int`, *optional*, defaults to `0`): Of its weights. The global generator is left as it was.
        num_labels (`int`, *optional*, defaults to `2`): Classes.
        config (`Any`): Further arguments of `BertConfig`, which win over the defaults here.
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
    Rows of six random tokens; the label says whether the first token lies in the upper half of the vocabulary.

    Args:
        num_rows (`int`): How many.
        seed (`int`, *optional*, defaults to `0`): Of the tokens.
    """
    tokens = np.random.default_rng(seed).integers(1, VOCAB_SIZE, size=(num_rows, ROW_LENGTH))
    return Dataset.from_dict(
        {"input_ids": tokens.tolist(), "labels": (tokens[:, 0] >= VOCAB_SIZE // 2).astype(int).tolist()}
    )


def arguments(output_dir: str | os.PathLike[str], **kwargs: Any) -> TrainingArguments:
    """
    Quiet training arguments on the CPU; `kwargs` win over the defaults here.

    Args:
        output_dir (`str` or `os.PathLike`): Where the trainer writes.
        kwargs (`Any`): Further arguments of `TrainingArguments`.
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


def same_weights(model_a: nn.Module, model_b: nn.Module) -> bool:
    """Whether two models hold the same names and, bit for bit, the same parameters and buffers."""
    a, b = model_a.state_dict(), model_b.state_dict()
    return list(a) == list(b) and all(_bits(a[name]) == _bits(b[name]) for name in a)


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    # Bytes tell 0.0 from -0.0 and a NaN from none, which == does not.
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, raw
