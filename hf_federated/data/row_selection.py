"""Select rows of a dataset without copying them, and draw rows with the seed of a client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from .._compat import dataset_fingerprint, indices_table, view_of_rows


def select_rows(source: Dataset, indices: np.ndarray) -> Dataset:
    """
    Return a view of the rows with the given numbers, in the given order.

    Two views with the same source and the same row numbers have the same fingerprint.
    """
    # The fingerprint is the same in every process, so `map` finds its cache.
    fingerprint = Hasher.hash((dataset_fingerprint(source), indices.astype(np.int64).tobytes()))
    if not len(indices) or indices.min() < 0 or indices.max() >= len(source) or source.list_indexes():
        # Negative numbers, empty views, and errors.
        return source.select(indices.tolist(), new_fingerprint=fingerprint)
    return view_of_rows(source, indices, fingerprint)


def kept_rows(dataset: Dataset, function: Callable[..., Any] | None, **kwargs: Any) -> np.ndarray:
    """
    Return the numbers of the rows that `Dataset.filter` keeps.

    Args:
        dataset (`datasets.Dataset`): The rows.
        function (`Callable`, *optional*): As in `datasets.Dataset.filter`.
        kwargs (*optional*): Passed to `datasets.Dataset.filter`.

    Returns:
        `np.ndarray` of shape `(num_kept_rows,)`, `int64`: Row numbers in ascending order.
    """
    rows = _stored_rows(dataset)
    if len(np.unique(rows)) < len(rows):
        # A row that occurs twice has one position in the table, which gives only one of its two row numbers.
        dataset, rows = dataset.flatten_indices(), np.arange(len(dataset))
    kept = _stored_rows(dataset.filter(function, **kwargs))
    number_of = np.full(len(dataset.data), -1, dtype=np.int64)
    number_of[rows] = np.arange(len(rows))
    return number_of[kept]


def _stored_rows(dataset: Dataset) -> np.ndarray:
    """Return the position of each row of a dataset in its table."""
    indices = indices_table(dataset)
    return np.arange(len(dataset)) if indices is None else indices.column(0).to_numpy().astype(np.int64, copy=False)


def client_generator(seed: int, client_id: str) -> np.random.Generator:
    """
    Create the random generator of one client.

    Its numbers depend on the seed and the id only, so a client draws the same rows whichever other clients exist.
    """
    digest = hashlib.sha256(f"{seed}\0{client_id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def shuffle_strata(strata: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """
    Sort rows by stratum, in random order within each stratum.

    Args:
        strata (`np.ndarray` of shape `(num_rows,)`, integer): The stratum of each row, counted from 0.
        generator (`np.random.Generator`): Draws the order.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: The row numbers in the new order, and the rank of each within its stratum.
    """
    shuffled = generator.permutation(len(strata))
    sizes = np.bincount(strata)
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]
    return order, np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
