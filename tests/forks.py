"""Preparation of a worker that imports the libraries once and forks for every run."""

from __future__ import annotations

import gc
from tempfile import TemporaryDirectory

import torch
from tiny import tiny_model
from transformers.utils import logging


def prepare_forks() -> None:
    """
    Do once what every forked process would do again.

    The first `save_pretrained` builds a table of the names of weights. A garbage collection of the imported objects
    takes half a second, and writes to every page of memory that the processes share.
    """
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # The thread of a progress bar must not exist when the process forks.
    with TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
    logging.enable_progress_bar()
    gc.collect()
    gc.freeze()
