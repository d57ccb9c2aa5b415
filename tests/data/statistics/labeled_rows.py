"""Rows with random owners and labels."""

from __future__ import annotations

import numpy as np
from datasets import Dataset


def rows(num_rows: int = 60, num_clients: int = 4, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    return Dataset.from_dict(
        {
            "owner": [f"client {number}" for number in rng.integers(0, num_clients, num_rows)],
            "label": [("sport", "space", "cars")[number] for number in rng.integers(0, 3, num_rows)],
        }
    )
