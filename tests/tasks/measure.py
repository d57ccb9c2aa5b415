"""Shared helpers of the task tests: a model shape, a padding check, and milliseconds per example."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough for such a small model to learn in seconds
    "hidden_dropout_prob": 0.0,
}


def milliseconds_per_example(work: Callable[[], object], num_rows: int) -> float:
    """Process CPU time of the fastest of three runs, which hardly depends on other load of the machine."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times) / num_rows * 1000


def assert_padding_keeps_logits(model: torch.nn.Module, rows: list[dict[str, Any]], collate: Callable) -> None:
    """Check that an example has the same logits in a padded batch and alone, at all positions except padding."""
    model.eval()
    with torch.no_grad():
        batch = model(**collate([dict(row) for row in rows])).logits
        for position, row in enumerate(rows):
            alone = model(**collate([dict(row)])).logits[0]
            in_batch = batch[position] if alone.ndim == 1 else batch[position][: len(alone)]
            torch.testing.assert_close(in_batch, alone, atol=1e-5, rtol=1e-5)
