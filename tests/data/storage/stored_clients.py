"""Rows with several clients, and comparisons of stored federated datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset

from hf_federated import FederatedDataset


NAMES = ["Anna", "default", "007", "no", "Zoë/..", "con"]


def rows(num_rows: int = 120, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    dataset = Dataset.from_dict(
        {
            "who": [NAMES[i % len(NAMES)] for i in range(num_rows)],
            "text": [f"text {i}" for i in range(num_rows)],
            "label": generator.integers(0, 3, num_rows),
        }
    )
    return dataset.cast_column("label", ClassLabel(names=["bad", "fair", "good"]))


def same(left: FederatedDataset, right: FederatedDataset) -> bool:
    return list(left) == list(right) and all(
        left[i][:] == right[i][:] and left[i].features == right[i].features for i in left
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
