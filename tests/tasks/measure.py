"""What the tests of tasks measure alike: a model's shape, padding, and milliseconds a row."""

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
    "initializer_range": 0.2,  # wide enough that so small a model learns in seconds
    "hidden_dropout_prob": 0.0,
}


def milliseconds_a_row(work: Callable[[], object], num_rows: int) -> float:
    """The processor time of the fastest of three runs, which other work on the machine hardly touches."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times) / num_rows * 1000


def assert_padding_changes_nothing(model: torch.nn.Module, rows: list[dict[str, Any]], collate: Callable) -> None:
    """A row's outputs are the same alone and beside a longer row, wherever it has a token itself."""
    model.eval()
    with torch.no_grad():
        together = model(**collate([dict(row) for row in rows])).logits
        for position, row in enumerate(rows):
            alone = model(**collate([dict(row)])).logits[0]
            beside = together[position] if alone.ndim == 1 else together[position][: len(alone)]
            torch.testing.assert_close(beside, alone, atol=1e-5, rtol=1e-5)
