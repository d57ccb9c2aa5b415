"""Clients whose examples are a `torch.utils.data.Dataset`, map-style or iterable.

Such a client trains as in `Trainer`: the collator receives its examples, and no column is removed from the dataset.
The columns and label names are unknown, so operations on columns raise an error. This module does not import torch
before a client has a dataset of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset, IterableDataset


TorchDataset: TypeAlias = Any  # `torch.utils.data.Dataset`


def is_torch_dataset(dataset: object) -> bool:
    """Whether an object is a `torch.utils.data.Dataset`, map-style or iterable, that `datasets` does not define."""
    torch_data = sys.modules.get("torch.utils.data")  # an instance exists only if torch is imported
    return (
        torch_data is not None
        and isinstance(dataset, torch_data.Dataset)
        and not isinstance(dataset, (Dataset, IterableDataset))
    )


def is_stream(dataset: object) -> bool:
    """Whether the rows of a dataset have no number and no positions."""
    if isinstance(dataset, IterableDataset):
        return True
    return is_torch_dataset(dataset) and isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)


def is_map_style(dataset: object) -> bool:
    """Whether a dataset is a `torch.utils.data.Dataset` with a length and positions."""
    return is_torch_dataset(dataset) and not is_stream(dataset)


def kind_of(dataset: object) -> str:
    """Name the kind of a dataset for error messages."""
    if is_torch_dataset(dataset):
        kind = "IterableDataset" if is_stream(dataset) else "Dataset"
        return f"torch.utils.data.{kind} ({type(dataset).__name__})"
    return type(dataset).__name__


def subset(dataset: Any, positions: np.ndarray | Sequence[int]) -> TorchDataset:
    """Return some examples of a map-style dataset, in the given order, without copying them."""
    from torch.utils.data import Subset

    return Subset(dataset, np.asarray(positions).tolist())


def concatenate(datasets: Sequence[Any]) -> TorchDataset:
    """Return the examples of several datasets, in order, without copying them."""
    from torch.utils.data import ConcatDataset

    return ConcatDataset(datasets)
