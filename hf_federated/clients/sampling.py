"""Sampling of clients and of their examples, epochs of samplers, the number of batches, and the seeds of clients.

All samples depend on the seed of the run and the round only. A resumed run therefore draws the same samples as an
uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import TrainingArguments

from ..utils.random import derived_seed


def client_seed(seed: int, client_id: str, round: int) -> int:
    """Derive the seed of one client in one round, below 2**32."""
    return derived_seed(seed, client_id, round)


class ClientSampler:
    """
    Uniform sampling of clients without replacement.

    Args:
        client_ids (`Sequence[str]`): Ids of all clients.
        clients_per_round (`int` or `float`): Number of clients per round, or a fraction in (0, 1] that is rounded to
            the nearest number of clients.
        seed (`int`): Seed of the run.

    Raises:
        ValueError: If a fraction rounds to zero clients, or if the number exceeds the number of clients.

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
                    f"clients_per_round={clients_per_round} rounds to 0 of {total} clients. Set it to at least "
                    f"{1 / total:.3g} (one client), or to a number of clients."
                )
        else:
            self.num_sampled = clients_per_round
        if self.num_sampled > total:
            raise ValueError(
                f"clients_per_round={clients_per_round}, but the federation has {total} clients. Set it to at most "
                f"{total}."
            )
        self._seed = seed

    def __call__(self, round: int) -> tuple[str, ...]:
        """Return the cohort of a round, sorted by client id."""
        if self.num_sampled == len(self._client_ids):
            return tuple(self._client_ids)
        # SeedSequence accepts unsigned integers only, but the seed of the run may be negative.
        generator = np.random.default_rng([abs(self._seed), int(self._seed < 0), round])
        chosen = generator.choice(len(self._client_ids), size=self.num_sampled, replace=False)
        return tuple(self._client_ids[i] for i in sorted(chosen))


@dataclass(frozen=True)
class RowLimit:
    """
    Maximum number of examples that each client of a cohort trains on in a round.

    `balance="min"` is the balance trick of FedDRS (section 5.3): "the number of training samples for each client" does
    not exceed "the count of the client with the fewest samples at the current iteration". The minimum is taken over
    the cohort of the round, not over the federation. The smallest client trains on all of its examples, and each of
    the other clients draws the same number of its examples.

    Args:
        num_rows (`Mapping[str, int]`): Number of examples of each client. `None` for a stream, which cannot be
            limited, and for a client on another machine that has not joined. Clients without a number, or without an
            example, do not limit the other clients.
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

    num_rows: Mapping[str, int | None]
    balance: str | None = None
    max_rows: int | None = None

    def __call__(self, cohort: Sequence[str]) -> int | None:
        """Return the limit for a cohort, or `None` if its clients train on all of their examples."""
        if self.balance is None:
            return self.max_rows
        known = [number for client_id in cohort if (number := self.num_rows[client_id])]
        return limit_examples(min(known), self.max_rows) if known else self.max_rows


def limit_examples(num_rows: int, max_rows: int | None) -> int:
    """
    Return the number of its examples that a client trains on.

    Args:
        num_rows (`int`): Number of examples of the client.
        max_rows (`int`, *optional*): Maximum number of examples to train on.
    """
    return num_rows if max_rows is None else min(num_rows, max_rows)


def batches_per_round(
    num_rows: Mapping[str, int | None],
    local_epochs: int,
    local_steps: int | None,
    args: TrainingArguments,
    max_rows: int | None = None,
) -> dict[str, float]:
    """
    Compute the number of batches of each client in a round.

    Args:
        num_rows (`Mapping[str, int]`): Number of examples of each client; `None` for a stream, which needs
            `local_steps`.
        local_epochs (`int`): Number of passes over the client's examples.
        local_steps (`int`, *optional*): Number of optimizer steps. It replaces `local_epochs`.
        args (`TrainingArguments`): The user's arguments.
        max_rows (`int`, *optional*): Maximum number of examples that a client trains on.
    """
    if local_steps is not None:
        return dict.fromkeys(num_rows, float(local_steps * args.gradient_accumulation_steps))
    return {
        client_id: float(local_epochs * math.ceil(limit_examples(rows or 0, max_rows) / args.train_batch_size))
        for client_id, rows in num_rows.items()
    }


def draw_examples(num_rows: int, max_rows: int | None, seed: int) -> np.ndarray | None:
    """
    Draw the examples that a client trains on in a round.

    Args:
        num_rows (`int`): Number of examples of the client.
        max_rows (`int`, *optional*): Maximum number of examples to train on.
        seed (`int`): Seed of the client in this round.

    Returns:
        `np.ndarray` of shape `(max_rows,)`, `int64`: Indices of the examples in ascending order, drawn uniformly
            without replacement; `None` if the client trains on all of its examples. The global random number
            generators are neither read nor changed.
    """
    if max_rows is None or num_rows <= max_rows:
        return None
    generator = np.random.default_rng(derived_seed(seed, "rows"))
    return np.sort(generator.choice(num_rows, size=max_rows, replace=False))


def has_epochs(loader: Any) -> bool:
    """Whether the sampler of a data loader can be set to an epoch, as the default sampler can."""
    outer = getattr(loader, "batch_sampler", None)
    inner = getattr(outer, "batch_sampler", None)
    for sampler in (outer, getattr(outer, "sampler", None), inner, getattr(inner, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            return True
    return False


def set_epoch(loader: Any, epoch: int) -> None:
    """
    Set the epoch that seeds the shuffling, as `Trainer` does at the start of an epoch.

    Args:
        loader (`Any`): A data loader.
        epoch (`int`): Number of the epoch.
    """
    for target in (loader, getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)):
        if callable(setter := getattr(target, "set_epoch", None)):
            setter(epoch)
