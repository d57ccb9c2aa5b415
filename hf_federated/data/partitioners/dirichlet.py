"""The Dirichlet distribution as partitioners need it: for any concentration, and from shares to owners of rows."""

from __future__ import annotations

import numpy as np


def draw_shares(generator: np.random.Generator, alpha: float, prior: np.ndarray, num_draws: int) -> np.ndarray:
    """
    Draws from Dir(alpha * prior).

    A gamma variable of a small shape underflows to zero, and shares of nothing but zeros are not a number. So the draw
    is made in logarithms: `log G(a) = log G(a + 1) + log(U) / a`, with U uniform.

    Args:
        generator (`np.random.Generator`): Where the draws come from.
        alpha (`float`): Concentration, above 0.
        prior (`np.ndarray` of shape `(num_shares,)`): At least 0, with one above; a place of 0 gets the share 0.
        num_draws (`int`): How many.

    Returns:
        `np.ndarray` of shape `(num_draws, num_shares)`, `float64`: Each row sums to 1.
    """
    shares = np.zeros((num_draws, len(prior)))
    possible = np.flatnonzero(prior)
    # Beyond these bounds a draw is one share of 1, or the prior, as it is at them; and no number overflows.
    shapes = min(max(alpha, 1e-200), 1e200) * prior[possible]
    logs = np.log(generator.standard_gamma(shapes + 1, size=(num_draws, len(possible))))
    logs -= generator.standard_exponential(logs.shape) / shapes
    logs -= logs.max(axis=1, keepdims=True)
    drawn = np.exp(logs)
    shares[:, possible] = drawn / drawn.sum(axis=1, keepdims=True)
    return shares


def cut_by_shares(shares: np.ndarray, num_rows: np.ndarray | int) -> np.ndarray:
    """
    Cuts rows at the floor of the cumulated shares: `diff(floor(cumsum(shares) * num_rows))`.

    Args:
        shares (`np.ndarray` of shape `(..., num_clients)`): Each row sums to 1.
        num_rows (`int` or `np.ndarray` of shape `(..., 1)`): What is cut.

    Returns:
        `np.ndarray` of shape `(..., num_clients)`, `int64`: Sizes that sum to `num_rows` exactly.
    """
    edges = np.floor(np.cumsum(shares, axis=-1) * num_rows).astype(np.int64)
    edges = np.minimum(edges, num_rows)  # a sum of floats may end a little above 1, or a little below
    edges[..., -1:] = num_rows
    return np.diff(edges, axis=-1, prepend=0)


def deal_rows(generator: np.random.Generator, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """
    Draws which rows of a label each client gets, given how many.

    Args:
        generator (`np.random.Generator`): Where the draws come from.
        labels (`np.ndarray` of shape `(num_rows,)`, integer): Label of each row.
        counts (`np.ndarray` of shape `(num_clients, num_labels)`, integer):
            Rows of each label that each client gets; their sum over clients is at most the number there is. What is
            left belongs to nobody.

    Returns:
        `np.ndarray` of shape `(num_rows,)`, `int64`: Position of the client that owns the row, or -1.
    """
    num_clients, num_labels = counts.shape
    # numpy sorts 16-bit integers by radix
    by_label = np.argsort(labels.astype(np.int16) if num_labels < 2**15 else labels, kind="stable")
    available = np.bincount(labels, minlength=num_labels)
    left = available - counts.sum(axis=0)
    table = np.vstack([counts, left])
    owner_of_cell = np.append(np.arange(num_clients), -1)
    dealt = np.repeat(np.tile(owner_of_cell, num_labels), table.T.ravel())
    ends = np.cumsum(available)
    for begin, end in zip(ends - available, ends, strict=True):
        generator.shuffle(dealt[begin:end])
    owners = np.empty(len(labels), dtype=np.int64)
    owners[by_label] = dealt
    return owners
