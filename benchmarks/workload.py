"""The workload of all sides of the benchmark: models, examples, local steps and the bare loop.

This module imports neither hf_federated nor Flower, so the process of each side only loads its own library.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput


LEARNING_RATE = 1e-4
NUM_FEATURES = 64

# Sizes of BertConfig by name. `tiny` has 0.7 M parameters, `minilm` 22.7 M, `memory` 22 M in two wide layers. The
# further models are `mlp`, and `lora` with trained LoRA factors in a GPT-2.
MODEL_SIZES = {
    "tiny": {"vocab_size": 2000, "hidden_size": 128, "layers": 2, "heads": 2, "intermediate_size": 512},
    "minilm": {"vocab_size": 30522, "hidden_size": 384, "layers": 6, "heads": 12, "intermediate_size": 1536},
    "memory": {"vocab_size": 30522, "hidden_size": 512, "layers": 2, "heads": 8, "intermediate_size": 2048},
}


class Perceptron(nn.Module):
    """A classifier with 64 inputs, 256 hidden units and 10 classes: 19 210 parameters in 4 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> SequenceClassifierOutput:
        logits = self.layers(features)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


@dataclass(frozen=True)
class Workload:
    """
    Configuration of one federation.

    Args:
        model (`str`): Name in `MODEL_SIZES`, `"mlp"` or `"lora"` (random weights), or folder for `from_pretrained`.
        num_clients (`int`): Number of clients. All clients take part in every round.
        num_rounds (`int`): Number of rounds, including one warm-up round.
        local_steps (`int`): Optimizer steps of a client in a round, which are one pass over its examples.
        batch_size (`int`): Examples in a step.
        sequence_length (`int`): Tokens of an example, without padding.
        seed (`int`): Seed of weights and examples.
    """

    model: str
    num_clients: int
    num_rounds: int
    local_steps: int = 4
    batch_size: int = 8
    sequence_length: int = 16
    seed: int = 0

    @property
    def rows_per_client(self) -> int:
        return self.local_steps * self.batch_size

    def describe(self) -> str:
        """Describe the workload in one line of a table."""
        return f"{self.local_steps} steps a client, batch {self.batch_size} x {self.sequence_length} tokens"


def build_model(workload: Workload) -> nn.Module:
    """Create the workload's model, with the same weights at each call."""
    torch.manual_seed(workload.seed)
    if workload.model == "mlp":
        return Perceptron()
    if workload.model == "lora":
        from peft import LoraConfig, get_peft_model

        model = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=64, n_embd=128, n_layer=4, n_head=4))
        return get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM", fan_in_fan_out=True))
    if workload.model not in MODEL_SIZES:
        return AutoModelForSequenceClassification.from_pretrained(workload.model)
    size = MODEL_SIZES[workload.model]
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=size["vocab_size"],
            hidden_size=size["hidden_size"],
            num_hidden_layers=size["layers"],
            num_attention_heads=size["heads"],
            intermediate_size=size["intermediate_size"],
        )
    )


def build_rows(workload: Workload) -> Dataset:
    """Create the examples of all clients, sorted by client, with a column `client`."""
    generator = np.random.default_rng(workload.seed)
    num_rows = workload.num_clients * workload.rows_per_client
    client = np.repeat(np.arange(workload.num_clients), workload.rows_per_client)
    if workload.model == "mlp":
        features = generator.standard_normal((num_rows, NUM_FEATURES), dtype=np.float32)
        return Dataset.from_dict(
            {"client": client, "features": features, "labels": generator.integers(0, 10, num_rows)}
        )
    # Token ids within every model's vocabulary and above the special tokens.
    tokens = generator.integers(1000, 2000, (num_rows, workload.sequence_length))
    return Dataset.from_dict(
        {
            "client": client,
            "input_ids": list(tokens),
            "attention_mask": list(np.ones_like(tokens)),
            "labels": list(tokens) if workload.model == "lora" else generator.integers(0, 2, num_rows),
        }
    )


def training_arguments(workload: Workload, output_dir: str) -> dict[str, Any]:
    """Return the keyword arguments of `TrainingArguments` that all sides share."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": workload.batch_size,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }


class BareLoop:
    """
    Minimal PyTorch implementation of the same federated averaging.

    The loop runs forward, backward, clipping, AdamW and its schedule on batches collated beforehand. It copies the
    global weights into the model for each client and keeps a running mean of the results. AdamW is fused, as in the
    Trainer's default.

    Args:
        workload ([`Workload`]): Configuration of the federation.
        rows (`datasets.Dataset`): Examples from [`build_rows`].
    """

    def __init__(self, workload: Workload, rows: Dataset) -> None:
        self.workload = workload
        self.model = build_model(workload).train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.weights = [parameter.detach().clone() for parameter in self.parameters]
        self._sums = [torch.zeros_like(weight) for weight in self.weights]
        self._num_added = 0
        batches = rows.remove_columns("client").with_format("torch").iter(workload.batch_size)
        flat = [dict(batch) for batch in batches]
        steps = workload.local_steps
        self._batches = [flat[i : i + steps] for i in range(0, len(flat), steps)]

    def train_client(self, position: int) -> float:
        """
        Train one client for one round.

        Args:
            position (`int`): Index of the client.

        Returns:
            `float`: Duration in seconds.
        """
        started = time.perf_counter()
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(weight)
        optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        num_steps = self.workload.local_steps
        schedule = LambdaLR(optimizer, lambda step: 1 - step / num_steps)
        for batch in self._batches[position]:
            loss = self.model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for total, parameter in zip(self._sums, self.parameters, strict=True):
                total.add_(parameter)
        self._num_added += 1
        return time.perf_counter() - started

    def end_round(self) -> float:
        """
        Average the weights of the clients.

        Returns:
            `float`: Duration in seconds.
        """
        started = time.perf_counter()
        for total, weight in zip(self._sums, self.weights, strict=True):
            weight.copy_(total / max(self._num_added, 1))
            total.zero_()
        self._num_added = 0
        return time.perf_counter() - started
