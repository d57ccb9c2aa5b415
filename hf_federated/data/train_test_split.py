"""Split the rows of each client into training rows and test rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .row_selection import client_generator, shuffle_strata


def check_sizes(test_size: float | int | None, train_size: float | int | None) -> None:
    """Raise `ValueError` unless each size is a share between 0 and 1, or a number of rows."""
    for name, size in (("test_size", test_size), ("train_size", train_size)):
        is_share = isinstance(size, float) and 0 < size < 1
        is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if size is not None and not is_share and not is_count:
            raise ValueError(
                f"train_test_split: {name}={size!r}. Set it to a share of the rows of each client, above 0.0 and below"
                " 1.0, or to a number of rows of each client, at least 1."
            )
    if isinstance(test_size, float) and isinstance(train_size, float) and test_size + train_size > 1:
        raise ValueError(
            f"train_test_split: test_size={test_size} and train_size={train_size} add up to more than 1. Lower one of"
            " them, or set only one of them."
        )


def split_clients(
    num_rows: Mapping[str, int],
    test_size: float | int | None,
    train_size: float | int | None,
    strata: np.ndarray | None,
    seed: int | None,
) -> dict[str, dict[str, np.ndarray]]:
    """
    Draw the training rows and the test rows of all clients.

    Args:
        num_rows (`Mapping[str, int]`): Number of rows of each client.
        test_size, train_size (`float` or `int`, *optional*): Share or number of rows of each client.
        strata (`np.ndarray` of shape `(num_rows,)`, integer, *optional*): The stratum of each row, in the order of the
            clients.
        seed (`int`, *optional*): Random seed. Without a seed, the test rows follow the training rows.

    Returns:
        `dict[str, dict[str, np.ndarray]]`: The row numbers of each client in the splits `train` and `test`. A client
        without test rows is missing in the split `test`.

    Raises:
        `ValueError`: If a client has too few rows for a number of rows, or no client has a test row.
    """
    parts: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    start = 0
    for client_id, size in num_rows.items():
        num_train, num_test = split_sizes(client_id, size, test_size, train_size)
        of_client = np.zeros(size, dtype=np.int64) if strata is None else strata[start : start + size]
        generator = None if seed is None else client_generator(seed, client_id)
        train, test = split_rows(num_train, num_test, of_client, generator)
        parts["train"][client_id] = train
        if len(test):
            parts["test"][client_id] = test
        start += size
    if not parts["test"]:
        raise ValueError(
            f"train_test_split: test_size={test_size} and train_size={train_size} give no client a test row. Set"
            " a larger test_size, or pass clients with at least two rows."
        )
    return parts


def split_sizes(
    client_id: str, num_rows: int, test_size: float | int | None, train_size: float | int | None
) -> tuple[int, int]:
    """
    Return the number of training rows and of test rows of a client.

    As in `datasets`, a share of test rows is rounded up, a share of training rows is rounded down, and a size that is
    not given is the number of the remaining rows. A client keeps at least one training row.

    Args:
        client_id (`str`): The id of the client, for error messages.
        num_rows (`int`): Number of rows of the client.
        test_size, train_size (`float` or `int`, *optional*): Share or number of rows.

    Raises:
        `ValueError`: If the client has too few rows for the given numbers of rows.
    """
    num_test = math.ceil(test_size * num_rows) if isinstance(test_size, float) else test_size
    num_train = math.floor(train_size * num_rows) if isinstance(train_size, float) else train_size
    if num_train is None:
        num_train = num_rows - (num_test or 0)
    if isinstance(test_size, float) or isinstance(train_size, float):
        num_train = max(1, num_train)
    if num_test is None:
        num_test = num_rows - num_train
    if isinstance(test_size, float):
        num_test = min(num_test, num_rows - num_train)
    if num_train < 1 or num_test < 0 or num_train + num_test > num_rows:
        raise ValueError(
            f"train_test_split: client {client_id!r} has {num_rows} rows, which are too few for test_size={test_size}"
            f" and train_size={train_size}. Set a share such as test_size=0.1, or leave out small clients with"
            " select_clients."
        )
    return num_train, num_test


def split_rows(
    num_train: int, num_test: int, strata: np.ndarray, generator: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    """
    Draw the training rows and the test rows of a client.

    Args:
        num_train (`int`): Number of training rows.
        num_test (`int`): Number of test rows.
        strata (`np.ndarray` of shape `(num_rows,)`, integer): The stratum of each row. Each stratum gives its share of
            the training rows and of the test rows. Remainders go to the strata with the largest fractions.
        generator (`np.random.Generator`, *optional*): Draws the rows. Without a generator, the test rows are the rows
            that follow the training rows.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Row numbers in ascending order.
    """
    if generator is None:
        return np.arange(num_train), np.arange(num_train, num_train + num_test)
    _, stratum = np.unique(strata, return_inverse=True)
    sizes = np.bincount(stratum)
    test_of = _share_out(num_test, sizes)
    train_of = _share_out(num_train, sizes - test_of)
    order, rank = shuffle_strata(stratum, generator)
    of_row = stratum[order]
    is_test = rank < test_of[of_row]
    is_train = ~is_test & (rank < (test_of + train_of)[of_row])
    return np.sort(order[is_train]), np.sort(order[is_test])


def _share_out(total: int, sizes: np.ndarray) -> np.ndarray:
    """Share a number of rows out in proportion to sizes, with the method of the largest remainders."""
    # Integers, so that equal fractions are equal.
    shares, remainders = np.divmod(total * sizes, max(1, int(sizes.sum())))
    order = np.argsort(-remainders, kind="stable")
    shares[order[: total - int(shares.sum())]] += 1
    return shares
