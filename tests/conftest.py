"""Settings that every test needs before the libraries are imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator


os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets and transformers are imported, which read it once
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tiny import rows, tiny_model
from transformers import BertForSequenceClassification


torch.set_num_threads(1)
disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def settled_heap() -> None:
    """What was imported stays; the collection that begins every `train()` need not look at it again (`garbage.py`)."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """For tests of what is frozen, and of what `gc.get_objects()` finds while something trains."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def model() -> BertForSequenceClassification:
    """A fresh two-layer BERT, the same for every test."""
    return tiny_model()


@pytest.fixture(scope="session")
def train_rows() -> Dataset:
    """Sixteen rows with a rule to learn."""
    return rows(16)
