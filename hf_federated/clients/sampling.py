"""Who takes part in a round, and with which randomness.

Both are functions of the run's seed and the round, with no state of their own, so a resumed run samples as the run
that was never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..generators import derived_seed


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
