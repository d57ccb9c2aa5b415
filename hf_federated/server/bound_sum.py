"""`BoundSum`: a bound on the norm of the mean change of a round, if the changes of single clients are not known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch

from ..aggregation.base import STEP_EXPONENT
from ..utils.errors import RoundFailedError
from ..utils.weighted_mean import PIECE, State, WeightedSums
from ..utils.weighted_sums import pieces_of
from .bound_update import HISTORY_LENGTH, MAX_RATIO_TO_STATE, TYPICAL_VALUE, BoundUpdate


class BoundSum:
    """
    Fails a round whose mean change is much larger than the mean changes of earlier rounds.

    The magnitude is `‖Σ_i w_i Δ_i / Σ_i w_i‖₂ / (η · s^0.75)`, with the mean number `s` of optimizer steps and the
    relative learning rate `η` as in [`BoundUpdate`]. The bound is `max_update_ratio` times the median of the last 20
    rounds. In the first round, only the norm of the global state bounds the change. No client can be named.

    Args:
        bound ([`BoundUpdate`]): The settings of the bound.
    """

    def __init__(self, bound: BoundUpdate) -> None:
        self._bound = bound
        self._history: list[float] = []

    def check(self, sums: WeightedSums, state: State, num_steps: float, round: int) -> None:
        """
        Check the sum of a round, and add it to the history.

        Args:
            sums ([`WeightedSums`]): Sum of the weighted changes.
            state (`dict[str, torch.Tensor]`): The global state before the round.
            num_steps (`float`): Mean number of optimizer steps of a client.
            round (`int`): Round number, from 0.

        Raises:
            RoundFailedError: If the change is too large.
        """
        if not self._bound.is_active:
            return
        norm = _norm(sums.values) / sums.weight
        floating = {name: value for name, value in state.items() if value.is_floating_point()}
        typical = TYPICAL_VALUE * math.sqrt(sum(value.numel() for value in floating.values()))
        largest = MAX_RATIO_TO_STATE * max(_norm(floating), typical)
        scale = max(num_steps, 1.0) ** STEP_EXPONENT * self._bound.relative_learning_rate(round)
        if self._history:
            largest = min(largest, self._bound.max_ratio * statistics.median(self._history) * scale)
        if not norm <= largest:
            raise RoundFailedError(
                f"Round {round + 1}: the norm of the mean change of all clients is {norm:.3g}, but at most "
                f"{largest:.3g} is allowed (`max_update_ratio`={self._bound.max_ratio:g} times the median of past "
                "rounds). Secure aggregation hides which client causes it. Lower the learning rate of the clients, "
                "clip their gradients (`max_grad_norm`), lower `clip` of `secure_aggregation_kwargs`, or raise "
                "`max_update_ratio`."
            )
        if norm > 0 and scale > 0:
            self._history = [*self._history, norm / scale][-HISTORY_LENGTH:]

    def state_dict(self) -> list[float]:
        """Return the magnitudes of past rounds."""
        return list(self._history)

    def load_state_dict(self, state: list[float]) -> None:
        """Restore the magnitudes that `state_dict` returned."""
        self._history = list(state)


def _norm(values: Mapping[str, torch.Tensor]) -> float:
    pieces = (piece for name in values for piece in pieces_of(values, name, PIECE))
    return math.sqrt(sum(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2 for piece in pieces))
