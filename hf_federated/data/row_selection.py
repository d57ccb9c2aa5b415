"""Select rows of a dataset without copying them."""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from .._compat import dataset_fingerprint


def select_rows(source: Dataset, indices: np.ndarray) -> Dataset:
    """
    Return a view of the rows with the given numbers, in the given order.

    Two views with the same source and the same row numbers have the same fingerprint.
    """
    # The fingerprint is the same in every process, so `map` finds its cache. A list of `int` takes the fast path of
    # `select`, which iterates over the elements of an array one by one.
    fingerprint = Hasher.hash((dataset_fingerprint(source), indices.astype(np.int64).tobytes()))
    return source.select(indices.tolist(), new_fingerprint=fingerprint)
