"""A view of some rows of a data set, made without copying them."""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher


def select_rows(source: Dataset, indices: np.ndarray) -> Dataset:
    """The rows with these numbers, in this order. Rows that are selected alike share a fingerprint."""
    # A fingerprint of our own is stable over processes (so that map() finds its cache) and cheap; a list of ints takes
    # the fast path through select(), which walks over an array number by number.
    fingerprint = Hasher.hash((source._fingerprint, indices.astype(np.int64).tobytes()))
    return source.select(indices.tolist(), new_fingerprint=fingerprint)
