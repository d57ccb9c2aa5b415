"""Who takes part in a round, on how many rows, and with which randomness.

All are functions of the run's seed and the round, with no state of their own, so a resumed run samples as the run that
was never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..utils.random import derived_seed


def client_seed(seed: int, client_id: str, round: int) -> int:
    """The seed of one client in one round, below 2**32."""
    return derived_seed(seed, client_id, round)


class ClientSampler:
    """
    Uniform sampling without replacement.

    Args:
        client_ids (`Sequence[str]`): All clients.
        clients_per_round (`int` or `float`): A count, or a share in (0, 1] that is rounded to the nearest count.
        seed (`int`): Of the run.

    Raises:
        ValueError: If the share samples nobody or the count exceeds the clients.

    Example:

    ```python
    >>> from hf_federated.clients import ClientSampler

    >>> sampler = ClientSampler(["a", "b", "c", "d"], clients_per_round=0.5, seed=0)
    >>> len(sampler(0)), sampler(0) == sampler(0)
    (2, True)
    ```
    """

    def __init__(self, client_ids: Sequence[str], clients_per_round: int | float, seed: int) -> None:
        self._client_ids = sorted(client_ids)
        total = len(self._client_ids)
        if isinstance(clients_per_round, float):
            self.num_sampled = round(clients_per_round * total)
            if self.num_sampled == 0:
                raise ValueError(
                    f"clients_per_round={clients_per_round} of {total} clients samples nobody; one client is a share "
                    f"of {1 / total:.3g}. Give a larger share or a count."
                )
        else:
            self.num_sampled = clients_per_round
        if self.num_sampled > total:
            raise ValueError(f"clients_per_round={clients_per_round}, but the federation has {total} clients.")
        self._seed = seed

    def __call__(self, round: int) -> tuple[str, ...]:
        """The cohort of a round, in sorted order."""
        if self.num_sampled == len(self._client_ids):
            return tuple(self._client_ids)
        # SeedSequence takes unsigned words; a negative seed is legal elsewhere.
        generator = np.random.default_rng([abs(self._seed), int(self._seed < 0), round])
        chosen = generator.choice(len(self._client_ids), size=self.num_sampled, replace=False)
        return tuple(self._client_ids[i] for i in sorted(chosen))


class RowLimit:
    """
    How many rows a client trains on in a round at most: the same number for the whole cohort.

    `balance="min"` is the balance trick of FedDRS (section 5.3): "the number of training samples for each client" does
    not exceed "the count of the client with the fewest samples at the current iteration", which is the smallest of the
    round's cohort, not of the federation. That client trains on all its rows; the others draw as many of theirs.

    Args:
        num_rows (`Mapping[str, int]`): Rows of each client; `None` for a stream, which cannot be limited.
        balance (`str`, *optional*): `"min"` or `None`, as in [`FederatedConfig`].
        max_rows (`int`, *optional*): `max_rows_per_round` of [`FederatedConfig`].

    Example:

    ```python
    >>> from hf_federated.clients import RowLimit

    >>> limit = RowLimit({"a": 10, "b": 3, "c": 7}, balance="min")
    >>> limit(["a", "b", "c"]), limit(["a", "c"])
    (3, 7)
    ```
    """

    def __init__(
        self, num_rows: Mapping[str, int | None], balance: str | None = None, max_rows: int | None = None
    ) -> None:
        self._num_rows = num_rows
        self._balance = balance
        self._max_rows = max_rows

    def __call__(self, cohort: Sequence[str]) -> int | None:
        """Of a cohort; `None` if it trains on all rows."""
        if self._balance is None:
            return self._max_rows
        return at_most(min(self._num_rows[client_id] or 0 for client_id in cohort), self._max_rows)


def at_most(num_rows: int, max_rows: int | None) -> int:
    """
    How many of its rows a client trains on.

    Args:
        num_rows (`int`): Rows that it has.
        max_rows (`int`, *optional*): Rows that it trains on at most.
    """
    return num_rows if max_rows is None else min(num_rows, max_rows)


def draw_rows(num_rows: int, max_rows: int | None, seed: int) -> np.ndarray | None:
    """
    Which of its rows a client trains on in a round.

    Args:
        num_rows (`int`): Rows that it has.
        max_rows (`int`, *optional*): Rows that it trains on at most.
        seed (`int`): The client's in this round.

    Returns:
        `np.ndarray` of shape `(max_rows,)`, `int64`: Positions in ascending order, drawn uniformly without
        replacement; `None` where all rows are trained on. The global generators are neither read nor changed.
    """
    if max_rows is None or num_rows <= max_rows:
        return None
    generator = np.random.default_rng(derived_seed(seed, "rows"))
    return np.sort(generator.choice(num_rows, size=max_rows, replace=False))
