"""Dirichlet draws for any concentration, and the assignment of rows to clients by shares."""

from __future__ import annotations

import numpy as np


def draw_shares(generator: np.random.Generator, alpha: float, prior: np.ndarray, num_draws: int) -> np.ndarray:
    """
    Draw from Dir(alpha * prior).

    A gamma variable with a small shape parameter underflows to zero, and shares that are all zero cannot be
    normalized. Therefore the draw is made in log space: `log G(a) = log G(a + 1) + log(U) / a`, with U uniform in
    (0, 1).

    Args:
        generator (`np.random.Generator`): The random generator to draw from.
        alpha (`float`): Concentration, above 0.
        prior (`np.ndarray` of shape `(num_shares,)`):
            Values of at least 0, at least one of them above 0. A share with prior 0 is 0.
        num_draws (`int`): Number of draws.

    Returns:
        `np.ndarray` of shape `(num_draws, num_shares)`, `float64`: Each row sums to 1.
    """
    shares = np.zeros((num_draws, len(prior)))
    possible = np.flatnonzero(prior)
    # The bounds avoid overflow. Beyond them the draw does not change: one share is 1, or the shares equal the prior.
    shapes = min(max(alpha, 1e-200), 1e200) * prior[possible]
    logs = np.log(generator.standard_gamma(shapes + 1, size=(num_draws, len(possible))))
    logs -= generator.standard_exponential(logs.shape) / shapes
    logs -= logs.max(axis=1, keepdims=True)
    drawn = np.exp(logs)
    shares[:, possible] = drawn / drawn.sum(axis=1, keepdims=True)
    return shares


def split_by_shares(shares: np.ndarray, num_rows: np.ndarray | int) -> np.ndarray:
    """
    Split a number of rows by shares: `diff(floor(cumsum(shares) * num_rows))`.

    Args:
        shares (`np.ndarray` of shape `(..., num_clients)`): Each row sums to 1.
        num_rows (`int` or `np.ndarray` of shape `(..., 1)`): Number of rows to split.

    Returns:
        `np.ndarray` of shape `(..., num_clients)`, `int64`: Sizes that sum to `num_rows` exactly.
    """
    edges = np.floor(np.cumsum(shares, axis=-1) * num_rows).astype(np.int64)
    edges = np.minimum(edges, num_rows)  # the floating-point sum of the shares may differ slightly from 1
    edges[..., -1:] = num_rows
    return np.diff(edges, axis=-1, prepend=0)


def assign_rows(generator: np.random.Generator, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """
    Draw the rows of each label that each client gets, given their numbers.

    Args:
        generator (`np.random.Generator`): The random generator to draw from.
        labels (`np.ndarray` of shape `(num_rows,)`, integer): Label of each row.
        counts (`np.ndarray` of shape `(num_clients, num_labels)`, integer):
            Number of rows of each label that each client gets. The sum over the clients is at most the number of rows
            with that label. The remaining rows belong to no client.

    Returns:
        `np.ndarray` of shape `(num_rows,)`, `int64`: Position of the client that owns the row, or -1 for no client.
    """
    num_clients, num_labels = counts.shape
    # numpy uses a radix sort for 16-bit integers, which is faster.
    by_label = np.argsort(labels.astype(np.int16) if num_labels < 2**15 else labels, kind="stable")
    available = np.bincount(labels, minlength=num_labels)
    unassigned = available - counts.sum(axis=0)
    table = np.vstack([counts, unassigned])
    owner_of_cell = np.append(np.arange(num_clients), -1)
    owners_by_label = np.repeat(np.tile(owner_of_cell, num_labels), table.T.ravel())
    ends = np.cumsum(available)
    for begin, end in zip(ends - available, ends, strict=True):
        generator.shuffle(owners_by_label[begin:end])
    owners = np.empty(len(labels), dtype=np.int64)
    owners[by_label] = owners_by_label
    return owners
