"""Settings and fixtures for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # code of model repositories (`trust_remote_code`)
os.environ["HF_FEDERATED_CACHE"] = tempfile.mkdtemp()  # cached features
os.environ["HF_HUB_OFFLINE"] = "1"  # datasets and transformers read it once, when they are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from sampled_cases import pytest_collection_modifyitems
from tiny import rows, tiny_model
from transformers import BertForSequenceClassification

from hf_federated.testing.processes import WorkerProcess


__all__ = ["pytest_collection_modifyitems"]

for variable in ("HF_MODULES_CACHE", "HF_FEDERATED_CACHE"):
    atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)
torch.set_num_threads(1)
disable_progress_bar()


@pytest.fixture(autouse=True)
def freeze_existing_objects() -> None:
    """Exclude imported objects and the results of shared runs from the garbage collections of every `train()`."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """Unfreeze all objects, for tests of `gc.freeze` and tests that call `gc.get_objects()` during training."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def model() -> BertForSequenceClassification:
    """A two-layer BERT with the same initial weights in every test."""
    return tiny_model()


@pytest.fixture(scope="session")
def train_rows() -> Dataset:
    """Sixteen examples with a learnable label."""
    return rows(16)


@pytest.fixture(scope="session")
def rank_worker() -> Iterator[WorkerProcess]:
    """The process of `rank_worker.py`, which also answers the requests of the conformance kit."""
    process = WorkerProcess([str(Path(__file__).with_name("rank_worker.py"))])
    yield process
    process.stop()
